"""S3-FIFO: most chunks are used once, so a small queue weeds them out before they reach the main one.

Source: Yang, Zhang, Qiu, Yue, Vinayak, "FIFO queues are all you need for cache eviction", SOSP 2023,
algorithm 1. Theirs has no tree: here a chunk with a held child or a pin is passed over and keeps its
place in its queue.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from stepwell.policy.evict.line import Line
from stepwell.types import ChunkId

SMALL_SHARE = 0.1  # of the held chunks; the paper finds 5 to 20% alike
MOST_USES = 3  # counted; two bits in the paper
USES_TO_STAY = 2  # while in the small queue, to move on to the main one


class _Chunk:
    __slots__ = ("parent", "queue", "rank", "uses")

    def __init__(self, parent: "_Chunk | None", queue: Line, rank: int) -> None:
        self.parent = parent
        self.queue = queue
        self.rank = rank  # its place in the queue
        self.uses = 0  # 0 to MOST_USES


class S3Fifo:
    """An `Evictor`. A use costs one step a chunk of the run; the rest O(1) or a logarithm, amortised."""

    def __init__(self) -> None:
        self._small = Line()
        self._main = Line()
        self._chunks: dict[ChunkId, _Chunk] = {}
        self._small_chunks = 0  # those with held children too, which are in no line
        self._ranks = 0  # given out so far
        self._ghosts: OrderedDict[ChunkId, None] = OrderedDict()  # evicted from the small queue, by age

    def insert(self, chunk: ChunkId, parent: ChunkId | None) -> None:
        before = None if parent is None else self._chunks[parent]
        if chunk in self._ghosts:
            del self._ghosts[chunk]
            queue = self._main
        else:
            queue = self._small
            self._small_chunks += 1
        self._chunks[chunk] = _Chunk(before, queue, self._next_rank())
        if before is not None and parent is not None:
            before.queue.discard(parent)

    def use(self, run: Sequence[ChunkId]) -> None:
        # By the parents, not by the run: its ids may cost more to build than a step here.
        chunk = self._chunks[run[len(run) - 1]] if run else None
        while chunk is not None:
            if chunk.uses < MOST_USES:
                chunk.uses += 1
            chunk = chunk.parent

    def enable(self, chunk: ChunkId) -> None:
        held = self._chunks[chunk]
        if chunk not in held.queue:
            held.queue.put(chunk, held.rank)

    def victim(self, may_evict: Callable[[ChunkId], bool]) -> ChunkId | None:
        while True:
            small = self._small.first(may_evict)
            main = self._main.first(may_evict)
            small_is_full = self._small_chunks >= SMALL_SHARE * len(self._chunks)
            if small is not None and (small_is_full or main is None):
                if self._chunks[small].uses < USES_TO_STAY:
                    self._remember(small)
                    return small
                self._small_chunks -= 1
                self._requeue(small, uses=0)
            elif main is not None and self._chunks[main].uses > 0:
                self._requeue(main, uses=self._chunks[main].uses - 1)
            else:
                return main

    def remove(self, chunk: ChunkId) -> None:
        held = self._chunks.pop(chunk)
        held.queue.discard(chunk)
        if held.queue is self._small:
            self._small_chunks -= 1

    def _requeue(self, chunk: ChunkId, uses: int) -> None:
        """Move a chunk to the young end of the main queue."""
        held = self._chunks[chunk]
        held.queue.discard(chunk)
        held.queue, held.rank, held.uses = self._main, self._next_rank(), uses
        self._main.put(chunk, held.rank)

    def _remember(self, chunk: ChunkId) -> None:
        self._ghosts[chunk] = None
        while len(self._ghosts) > (1 - SMALL_SHARE) * len(self._chunks):
            self._ghosts.popitem(last=False)

    def _next_rank(self) -> int:
        self._ranks += 1
        return self._ranks
