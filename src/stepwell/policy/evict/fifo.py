"""First in, first out: the chunk that was stored first goes first, used or not."""

from collections.abc import Callable, Sequence

from stepwell.policy.evict.line import Line
from stepwell.types import ChunkId


class Fifo:
    """An `Evictor`. A chunk with a held child or a pin is passed over and keeps its place."""

    def __init__(self) -> None:
        self._line = Line()
        self._number: dict[ChunkId, int] = {}  # chunk -> how many were inserted before it
        self._inserts = 0

    def insert(self, chunk: ChunkId, parent: ChunkId | None) -> None:
        self._number[chunk] = self._inserts
        self._inserts += 1
        if parent is not None:
            self._line.discard(parent)

    def use(self, run: Sequence[ChunkId]) -> None:
        pass

    def enable(self, chunk: ChunkId) -> None:
        if chunk not in self._line:
            self._line.put(chunk, self._number[chunk])

    def victim(self, may_evict: Callable[[ChunkId], bool]) -> ChunkId | None:
        return self._line.first(may_evict)

    def remove(self, chunk: ChunkId) -> None:
        del self._number[chunk]
        self._line.discard(chunk)
