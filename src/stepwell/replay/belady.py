"""Belady's rule applied to blocks one by one, as they are touched: last block of a request first.

Source: Belady, "A study of replacement algorithms", IBM Systems Journal 1966, with bypass. The touch order
has a child needed again before its parent, so this rule may keep the child alone, whose hit then does not
count: it stays a little below the optimum for prefixes (`optimum.py`). It is here because others report it.
"""

from heapq import heappop, heappush

from stepwell.replay.traces.row import Trace

_NEVER = -1


def belady_hits(trace: Trace, capacity_blocks: int) -> list[int]:
    """Leading blocks held of each request, in order. Linear in blocks, but for a heap of the reused ones."""
    next_touch = _next_touches(trace)
    due = [_NEVER] * trace.blocks  # held block -> its next touch
    heap: list[tuple[int, int]] = []  # (-due, block); outdated where the block is due otherwise by now
    held = 0
    touch = 0
    hits = []
    for row in trace.rows:
        run = 0
        while run < len(row.blocks) and due[row.blocks[run]] != _NEVER:
            run += 1
        hits.append(run)
        for block in reversed(row.blocks):
            held -= due[block] != _NEVER
            due[block] = next_touch[touch]
            touch += 1
            if due[block] == _NEVER:
                continue
            heappush(heap, (-due[block], block))
            held += 1
            while held > capacity_blocks:
                latest, victim = heappop(heap)
                if due[victim] == -latest:
                    due[victim] = _NEVER
                    held -= 1
    return hits


def _next_touches(trace: Trace) -> list[int]:
    """For each touch of the trace, the next one of the same block."""
    last = [_NEVER] * trace.blocks
    following: list[int] = []
    for row in trace.rows:
        for block in reversed(row.blocks):
            if last[block] != _NEVER:
                following[last[block]] = len(following)
            last[block] = len(following)
            following.append(_NEVER)
    return following
