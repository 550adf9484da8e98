"""Least recently used, exactly, at O(1) for a use of a run of any length."""

from collections.abc import Callable, Sequence

from stepwell.policy.evict.line import Line
from stepwell.types import ChunkId


class Lru:
    """An `Evictor`. A use of a run touches its last chunk first; an insert uses all the run up to it.

    Only the last chunk of a run is marked. Whoever uses a chunk uses all before it, so a chunk's true
    last use is the latest mark on it or on any descendant, gone ones too: a chunk that goes leaves its
    mark to its parent, and a chunk without held children thus carries its true last use. Those are the
    only ones that may go, and no two of them share a mark, so victims are those of plain LRU.
    """

    def __init__(self) -> None:
        self._line = Line()
        self._parent: dict[ChunkId, ChunkId | None] = {}
        self._mark: dict[ChunkId, int] = {}
        self._uses = 0  # of any chunk, so far

    def insert(self, chunk: ChunkId, parent: ChunkId | None) -> None:
        self._uses += 1
        self._mark[chunk] = self._uses
        self._parent[chunk] = parent
        if parent is not None:
            self._line.discard(parent)

    def use(self, run: Sequence[ChunkId]) -> None:
        if not run:
            return
        last = run[len(run) - 1]
        self._uses += 1
        self._mark[last] = self._uses
        if last in self._line:
            self._line.discard(last)
            self._line.put(last, self._uses)

    def enable(self, chunk: ChunkId) -> None:
        if chunk not in self._line:
            self._line.put(chunk, self._mark[chunk])

    def victim(self, may_evict: Callable[[ChunkId], bool]) -> ChunkId | None:
        return self._line.first(may_evict)

    def remove(self, chunk: ChunkId) -> None:
        self._line.discard(chunk)
        mark = self._mark.pop(chunk)
        parent = self._parent.pop(chunk)
        if parent is not None and mark > self._mark[parent]:
            self._mark[parent] = mark
