"""The queue under every policy here: chunks without a held child, in order of a rank."""

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from stepwell.types import ChunkId

SPARE_HEAP_ENTRIES = 64  # so that a small heap is not rebuilt at every other call


class Line:
    """Chunks by rank, lowest first. Any of them may leave, and come back to its old place.

    Nearly every chunk enters with the highest rank yet: those lie in a linked list, at O(1). Only a
    chunk that comes back (its last child has gone, or it was pinned when its turn came) belongs
    somewhere in the middle: those lie in a heap, and the first of all is the lower of the two fronts.
    A heap alone would do, but its outdated entries come due all at once: after 10^5 hits and no
    eviction, the next one would sift them all.
    """

    def __init__(self) -> None:
        self._list: OrderedDict[ChunkId, int] = OrderedDict()  # chunk -> rank, ascending
        self._returned: dict[ChunkId, int] = {}  # chunk -> rank, in no order
        self._heap: list[tuple[int, ChunkId]] = []  # all that returned, and entries since outdated
        self._highest = -1  # rank

    def __len__(self) -> int:
        return len(self._list) + len(self._returned)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._list or chunk in self._returned

    def put(self, chunk: ChunkId, rank: int) -> None:
        """Queue a chunk that is not in line, at its rank (0 or more, no two alike in one line)."""
        if rank >= self._highest:
            self._list[chunk] = self._highest = rank
            return
        self._returned[chunk] = rank
        heappush(self._heap, (rank, chunk))
        if len(self._heap) > 2 * len(self._returned) + SPARE_HEAP_ENTRIES:
            self._heap = [(rank, chunk) for chunk, rank in self._returned.items()]
            heapify(self._heap)

    def discard(self, chunk: ChunkId) -> None:
        """Take a chunk out of the line, if it is in it."""
        if self._list.pop(chunk, None) is None:
            self._returned.pop(chunk, None)

    def first(self, may_go: Callable[[ChunkId], bool]) -> ChunkId | None:
        """The first that may go, left in its place; those before it are out of the line until put again."""
        while (chunk := self._front()) is not None and not may_go(chunk):
            self.discard(chunk)
        return chunk

    def _front(self) -> ChunkId | None:
        while self._heap and self._returned.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        oldest = next(iter(self._list), None)
        if self._heap and (oldest is None or self._heap[0][0] < self._list[oldest]):
            return self._heap[0][1]
        return oldest
