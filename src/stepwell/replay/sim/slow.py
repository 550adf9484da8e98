"""Tiers below memory: a log on a drive, as the server's, or a store that evicts by an index."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from stepwell.policy.evict.lru import Lru
from stepwell.policy.index import Index
from stepwell.policy.log import LogUses
from stepwell.replay.store import insert_run
from stepwell.types import ChunkId

# The geometry of the server's log (tiers/disk): so many segments, one of them always spare.
SEGMENTS = 16
SEGMENT_BYTES_MOST = 1 << 30


class SlowStore(Protocol):
    """What a tier holds, without its bytes."""

    def __contains__(self, chunk: ChunkId) -> bool: ...

    def __len__(self) -> int: ...

    def use(self, run: Sequence[ChunkId], first: int, end: int) -> None:
        """A request reads `run[first:end]`, all of them held here."""

    def store(self, run: Sequence[ChunkId], first: int, end: int) -> list[ChunkId]:
        """Hold these of a run as far as it goes; those that are held now and were not before."""


class LogStore:
    """Segments in order; the oldest goes, but for what `policy.log` keeps."""

    def __init__(self, size_bytes: int, block_bytes: float, in_use: Callable[[ChunkId], bool]) -> None:
        segment_bytes = min(size_bytes // SEGMENTS, SEGMENT_BYTES_MOST)
        self._block_bytes = int(block_bytes)
        # A large block makes segments of one block each, where a gibibyte could not hold it.
        self._segment_bytes = max(segment_bytes, self._block_bytes)
        self._segments_most = size_bytes // self._segment_bytes - 1
        self._uses = LogUses()
        self._in_use = in_use
        self._segments: deque[list[ChunkId]] = deque([[]])
        self._room_bytes = self._segment_bytes
        self._held: set[ChunkId] = set()

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._held

    def __len__(self) -> int:
        return len(self._held)

    def use(self, run: Sequence[ChunkId], first: int, end: int) -> None:
        for number in range(first, end):
            self._uses.use([run[number]])

    def evicted_used(self, chunk: ChunkId) -> None:
        """Memory evicted a chunk that somebody had used."""
        if chunk in self._held:
            self._uses.use([chunk])

    def store(self, run: Sequence[ChunkId], first: int, end: int) -> list[ChunkId]:
        new: list[ChunkId] = []
        if self._segments_most < 1:
            return new
        for number in range(first, end):
            if run[number] not in self._held:
                self._append(run[number])
                new.append(run[number])
        return new

    def _append(self, chunk: ChunkId) -> None:
        if self._room_bytes < self._block_bytes:
            self._segments.append([])
            self._room_bytes = self._segment_bytes
            if len(self._segments) > self._segments_most:
                self._reclaim()
        self._segments[-1].append(chunk)
        self._held.add(chunk)
        self._room_bytes -= self._block_bytes

    def _reclaim(self) -> None:
        oldest = self._segments.popleft()
        with_bytes = [(chunk, self._block_bytes) for chunk in oldest]
        kept = self._uses.kept(with_bytes, self._segment_bytes, self._in_use)
        self._uses.forget(oldest)
        self._held.difference_update(oldest)
        # At most half of a segment: it always fits into the new one.
        for chunk in kept:
            self._segments[-1].append(chunk)
            self._held.add(chunk)
            self._room_bytes -= self._block_bytes


class IndexStore:
    """A store that evicts leaves, least recently used first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._index = Index(Lru())

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._index

    def __len__(self) -> int:
        return len(self._index)

    def use(self, run: Sequence[ChunkId], first: int, end: int) -> None:
        self._index.use(run[:end])

    def store(self, run: Sequence[ChunkId], first: int, end: int) -> list[ChunkId]:
        return insert_run(
            self._index, run, self._index.held_run(run[:end]), end, capacity_blocks=self._capacity_blocks
        )
