"""The top tier: chunks in an arena that engines copy into and out of directly."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from stepwell.tiers.arena import create_arena
from stepwell.tiers.base import Get, Put, TierUsage
from stepwell.tiers.extents import Extents
from stepwell.types import ChunkId, Reason


class Slot(NamedTuple):
    """A chunk's bytes in the arena."""

    offset: int
    nbytes: int


class MemoryTier:
    """Chunks of any size in one arena of exactly `limit_bytes` bytes.

    A slot is taken invisibly (`reserve`), filled by whoever maps the arena, and then made findable
    (`publish`) or given back (`free`). `take` is the way back: the chunk is no longer findable, and its
    slot is the caller's to free once no copy uses it.
    """

    def __init__(self, limit_bytes: int, name: str = "memory") -> None:
        """Allocate the arena. Raises ArenaTooLarge, or OSError when the kernel refuses."""
        self.name = name
        self.limit_bytes = limit_bytes
        self.fd, self.arena = create_arena(limit_bytes)
        self._extents = Extents(limit_bytes)
        self._slots: dict[ChunkId, Slot] = {}
        self._closed = False

    def reserve(self, nbytes: int) -> Slot | None:
        """Room for a chunk, not yet findable; None when no gap is large enough."""
        offset = self._extents.allocate(nbytes)
        return None if offset is None else Slot(offset, nbytes)

    def publish(self, chunk: ChunkId, slot: Slot) -> None:
        """Make the filled slot findable. Raises ValueError when the chunk is held already."""
        if chunk in self._slots:
            raise ValueError(f"chunk {chunk.hex()} is held already")
        self._slots[chunk] = slot

    def take(self, chunk: ChunkId) -> Slot:
        """Make the chunk unfindable and hand its slot over. Raises KeyError when it is not held."""
        return self._slots.pop(chunk)

    def free(self, slot: Slot) -> None:
        """Give the slot's bytes back."""
        self._extents.free(slot.offset, slot.nbytes)

    def nbytes(self, chunk: ChunkId) -> int:
        """The size of a held chunk. Raises KeyError when it is not held."""
        return self._slots[chunk].nbytes

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, writable."""
        return self.arena.view(slot.offset, slot.nbytes)

    async def held(self, chunks: Sequence[ChunkId]) -> int:
        return next((n for n, chunk in enumerate(chunks) if chunk not in self._slots), len(chunks))

    async def put(self, items: Sequence[Put]) -> list[Reason | None]:
        return [self._put(item) for item in items]

    def _put(self, item: Put) -> Reason | None:
        if item.chunk in self._slots:
            return None
        slot = self.reserve(item.data.nbytes)
        if slot is None:
            return Reason.NO_ROOM
        self.view(slot)[:] = item.data.cast("B")
        self.publish(item.chunk, slot)
        return None

    async def get(self, items: Sequence[Get]) -> list[Reason | None]:
        return [self._get(item) for item in items]

    def _get(self, item: Get) -> Reason | None:
        slot = self._slots.get(item.chunk)
        if slot is None:
            return Reason.NOT_HELD
        if slot.nbytes != item.into.nbytes:
            return Reason.CORRUPT
        item.into.cast("B")[:] = self.view(slot)
        return None

    async def delete(self, chunks: Sequence[ChunkId]) -> None:
        for chunk in chunks:
            if chunk in self._slots:
                self.free(self.take(chunk))

    def usage(self) -> TierUsage:
        return TierUsage(len(self._slots), self.limit_bytes - self._extents.free_bytes, self.limit_bytes)

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        """As `close`; there is nothing to wait for."""
        if not self._closed:
            self._closed = True
            self._slots.clear()
            self.arena.close()
            os.close(self.fd)
