"""Caches again, slow and obvious: lists and sets, nothing shared with the code under test.

Each takes requests as tuples of blocks in which a block names its whole prefix, and gives the leading
blocks held of each request.
"""

from collections import OrderedDict
from collections.abc import Sequence

Requests = Sequence[Sequence[int]]


def leading(held: Sequence[int] | set[int] | OrderedDict[int, None], run: Sequence[int]) -> int:
    count = 0
    while count < len(run) and run[count] in held:
        count += 1
    return count


def lru(requests: Requests, capacity: int) -> list[int]:
    """Plain LRU of single blocks, touched last block first; it knows of no tree."""
    order: OrderedDict[int, None] = OrderedDict()
    hits = []
    for run in requests:
        hits.append(leading(order, run))
        for block in reversed(run):
            order.pop(block, None)
            order[block] = None
        while len(order) > capacity:
            order.popitem(last=False)
    return hits


def parents_of(requests: Requests) -> dict[int, int | None]:
    found: dict[int, int | None] = {}
    for run in requests:
        for depth, block in enumerate(run):
            parent = run[depth - 1] if depth else None
            assert found.setdefault(block, parent) == parent
    return found


def fifo(requests: Requests, capacity: int) -> list[int]:
    """The oldest block without a held child goes, but for the request's own; then all new ones come."""
    parents = parents_of(requests)
    queue: list[int] = []
    hits = []
    for run in requests:
        hits.append(leading(queue, run))
        new = list(run[hits[-1] :])
        while len(queue) + len(new) > capacity:
            needed = {parents[other] for other in queue} | set(run)
            victim = next((other for other in queue if other not in needed), None)
            if victim is None:
                new = new[: max(0, capacity - len(queue))]
            else:
                queue.remove(victim)
        queue += new
    return hits


def s3fifo(requests: Requests, capacity: int) -> list[int]:
    """Two queues and ghosts, after the paper; leaves alone may go or move."""
    parents = parents_of(requests)
    small: list[int] = []
    main: list[int] = []
    ghosts: list[int] = []
    uses: dict[int, int] = {}

    def make_room(run: Sequence[int]) -> bool:
        while True:
            needed = {parents[other] for other in uses} | set(run)
            free_small = [block for block in small if block not in needed]
            free_main = [block for block in main if block not in needed]
            if free_small and (not free_main or len(small) >= 0.1 * len(uses)):
                block = free_small[0]
                small.remove(block)
                if uses[block] < 2:
                    del uses[block]
                    ghosts.append(block)
                    while len(ghosts) > 0.9 * (len(uses) + 1):
                        ghosts.pop(0)
                    return True
                main.append(block)
                uses[block] = 0
            elif free_main:
                block = free_main[0]
                main.remove(block)
                if uses[block] == 0:
                    del uses[block]
                    return True
                uses[block] -= 1
                main.append(block)
            else:
                return False

    hits = []
    for run in requests:
        hits.append(leading(set(uses), run))
        for block in run[: hits[-1]]:
            uses[block] = min(3, uses[block] + 1)
        new = list(run[hits[-1] :])
        while len(uses) + len(new) > capacity:
            if not make_room(run):
                new = new[: max(0, capacity - len(uses))]
        for block in new:
            if block in ghosts:
                ghosts.remove(block)
                main.append(block)
            else:
                small.append(block)
            uses[block] = 0
    return hits


def belady(requests: Requests, capacity: int) -> list[int]:
    """Single blocks, last of a request first; of those held and the new one, the one needed last goes."""
    touches = [block for run in requests for block in reversed(run)]
    places: dict[int, list[int]] = {}
    for at in range(len(touches) - 1, -1, -1):
        places.setdefault(touches[at], []).append(at)  # latest first
    held: set[int] = set()
    hits = []
    for run in requests:
        hits.append(leading(held, run))
        for block in reversed(run):
            places[block].pop()
            held.add(block)
            if len(held) > capacity:
                held.remove(max(held, key=lambda other: places[other][-1] if places[other] else len(touches)))
    return hits


def optimum(requests: Requests, capacity: int) -> list[int]:
    """After each request, of all blocks held or just seen, those needed soonest stay, parents first."""
    parents = parents_of(requests)
    needs: dict[int, list[int]] = {}
    for number in range(len(requests) - 1, -1, -1):
        for block in requests[number]:
            needs.setdefault(block, []).append(number)

    def depth(block: int) -> int:
        parent = parents[block]
        return 0 if parent is None else 1 + depth(parent)

    held: set[int] = set()
    hits = []
    for run in requests:
        hits.append(leading(held, run))
        for block in run:
            needs[block].pop()
        known = held | set(run)
        order = sorted((needs[block][-1], depth(block), block) for block in known if needs[block])
        held = {block for _, _, block in order[:capacity]}
    return hits


NAIVE = {"lru": lru, "fifo": fifo, "s3fifo": s3fifo, "belady": belady, "optimum": optimum}


def best_by_trying_everything(requests: Requests, capacity: int) -> int:
    """The most blocks that any cache closed under parents can hit, over all it may hold at each time."""
    parents = parents_of(requests)
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for run in requests:
        after: dict[frozenset[int], int] = {}
        for held, hit in best.items():
            total = hit + leading(set(held), run)
            for kept in _closed_subsets(sorted(held | set(run)), parents, capacity):
                after[kept] = max(after.get(kept, -1), total)
        best = after
    return max(best.values())


def _closed_subsets(
    blocks: Sequence[int], parents: dict[int, int | None], capacity: int
) -> list[frozenset[int]]:
    found = [frozenset[int]()]
    for block in blocks:  # a parent has the smaller number
        parent = parents[block]
        grown = [kept | {block} for kept in found if parent is None or parent in kept]
        found += [kept for kept in grown if len(kept) <= capacity]
    return found
