"""The contract of every tier: whole chunks by id, nothing in doubt, nothing decided.

A tier holds bytes. It never evicts on its own to make room for a `put` (what goes is decided in
`policy/`) and never waits for room: it answers `NO_ROOM`. tests/contracts/ runs one suite over all.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from stepwell.types import ChunkId, Reason


class Put(NamedTuple):
    """A chunk to store. The tier has taken the bytes when `put` returns; `data` may change after."""

    chunk: ChunkId
    data: memoryview


class Get(NamedTuple):
    """A chunk to fetch into `into`, which has exactly the chunk's size."""

    chunk: ChunkId
    into: memoryview


class TierUsage(NamedTuple):
    """What a tier holds now."""

    chunks: int
    used_bytes: int
    limit_bytes: int


class Tier(Protocol):
    """One level of the cache. Methods take batches, because slow tiers live on batches.

    An outcome is None for success, else the reason why not; there is one per item, in order. Nothing
    here raises for a chunk that is missing, damaged or too large: that is an outcome.
    """

    @property
    def name(self) -> str:
        """`memory`, `disk`, `redis`, …: a metric's label."""

    async def held(self, chunks: Sequence[ChunkId]) -> int:
        """How many leading chunks are held."""

    async def put(self, items: Sequence[Put]) -> list[Reason | None]:
        """Store chunks. One that is held already stays as it is: content is named by its id."""

    async def get(self, items: Sequence[Get]) -> list[Reason | None]:
        """Fetch chunks, checked. After a failure the content of `into` is undefined."""

    async def delete(self, chunks: Sequence[ChunkId]) -> None:
        """Forget chunks; unknown ones are no error."""

    def usage(self) -> TierUsage:
        """What is held now; bytes as they count against the limit."""

    async def close(self) -> None:
        """Let go of every resource; a second call does nothing."""
