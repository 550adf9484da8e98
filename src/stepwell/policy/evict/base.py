"""What every eviction policy answers: which chunk of a tier goes next."""

from collections.abc import Callable, Sequence
from typing import Protocol

from stepwell.types import ChunkId


class Evictor(Protocol):
    """Ranks the chunks that one tier holds. Pure: it sees the order of events, never a clock.

    `policy.index.Index` calls these and guarantees: ids are inserted once and removed once; a parent
    is inserted before its child and removed after it.

    Every call costs the same from 10^3 to 10^6 held chunks (amortised, at most a logarithm).
    """

    def insert(self, chunk: ChunkId, parent: ChunkId | None) -> None:
        """The tier now holds `chunk`; `parent` is the chunk before it in its prompt, None for a first.

        `parent` may not be evicted from now on. `enable(chunk)` follows at once.
        """

    def use(self, run: Sequence[ChunkId]) -> None:
        """One request used this leading run of held chunks, given first chunk first.

        It counts as touching the last chunk first, so that a parent is always younger than its child.
        """

    def enable(self, chunk: ChunkId) -> None:
        """`chunk` may now be evicted: it has no held child and no pin (again).

        May repeat. A pin is not announced: `may_evict` tells of it.
        """

    def victim(self, may_evict: Callable[[ChunkId], bool]) -> ChunkId | None:
        """The chunk to evict next, or None when none may go. The index calls `remove` for it after.

        A chunk that `may_evict` refuses can be forgotten as a candidate: `enable` names it again.
        """

    def remove(self, chunk: ChunkId) -> None:
        """The tier no longer holds `chunk` (evicted, cleared or found damaged)."""
