"""The disk below memory: what goes down, what comes up, and what is asked of it on the way."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec

from stepwell.policy.index import Entry
from stepwell.policy.log import LogUses
from stepwell.policy.place import PREFETCHED_SHARE
from stepwell.server.core import Core
from stepwell.server.promote import Promotion
from stepwell.server.write_back import WriteBack
from stepwell.tiers.disk import DiskTier
from stepwell.tiers.guard import Guarded
from stepwell.tiers.wrap import Throttled
from stepwell.types import ChunkId, Reason, SpaceId, TierStats
from stepwell.wire import ChunkRun

logger = logging.getLogger(__name__)

DRAIN_S = 5.0
"""How long a stop waits for chunks that are not written yet: orchestrators kill after 10 s or more."""


class DriveLimits(msgspec.Struct, frozen=True):
    """For a drive that others use too, and for trials. None: as fast as it can."""

    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    read_latency_s: float = 0.0


class DiskBelow:
    """`SlowTiers` with one disk. All of it runs in the server's event loop, but the drive's own work."""

    def __init__(self, core: Core, disk: DiskTier, limits: DriveLimits) -> None:
        """Needs the running event loop. Nothing happens before `start`."""
        self._core = core
        self._disk = disk
        self._throttled = Throttled(
            disk,
            read_bytes_per_s=limits.read_bytes_per_s,
            write_bytes_per_s=limits.write_bytes_per_s,
            read_latency_s=limits.read_latency_s,
        )
        self._guard = Guarded(self._throttled)
        self._uses = LogUses()
        self._promotion = Promotion(core, self._guard)
        self._write_back = WriteBack(core, self._guard, disk.holds, self._make_room)
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken = ""
        self._reclaiming = asyncio.Lock()
        self._reclaimed_chunks = 0

    def start(self) -> None:
        """Begin to work: try the drive, read its catalogue, write and read what is asked for."""
        for work in (
            self._guard.start(),
            self._disk.scan(),
            self._promotion.run(),
            self._write_back.run(),
        ):
            self._later(work)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = f"stopped by an error in Stepwell: {error!r}"
            logger.critical("the disk tier has %s", self._broken, exc_info=error)

    # -- asked by the core -----------------------------------------------------------------------------

    def leading(self, run: ChunkRun, first: int) -> int:
        if self._broken or not self._guard.in_service:
            return first
        holds = self._disk.holds
        missing = (number for number, chunk in enumerate(run.ids(first, len(run)), first) if not holds(chunk))
        return next(missing, len(run))

    def bring(self, space: SpaceId, run: ChunkRun, first: int, end: int) -> None:
        chunks = list(run.ids(first, end))
        self._uses.use(chunks)
        self._promotion.want(space, run[first - 1] if first else None, chunks)

    def prefetch(self, space: SpaceId, run: ChunkRun, first: int) -> None:
        under_way_bytes = self._promotion.queued_chunks * self._core.chunk_bytes(space)
        if under_way_bytes < PREFETCHED_SHARE * self._core.memory.limit_bytes:
            end = self.leading(run, first)
            if end > first:
                self.bring(space, run, first, end)

    def drop(self, chunk: ChunkId) -> None:
        self._later(self._disk.delete([chunk]))

    def ready_in_s(self, space: SpaceId) -> float:
        nbytes = self._promotion.queued_chunks * self._core.chunk_bytes(space)
        return self._promotion.cost.seconds(nbytes)

    def coming(self, chunk: ChunkId) -> bool:
        return self._promotion.coming(chunk)

    def stored(self, chunk: ChunkId, nbytes: int) -> None:
        if self._guard.in_service:
            self._write_back.offer(chunk, nbytes)

    def evicted(self, entry: Entry) -> None:
        if entry.used and self._disk.holds(entry.chunk):
            self._uses.use([entry.chunk])

    def names(self, count: int) -> tuple[str, ...]:
        return (self._disk.name,) * count

    # -- the rest --------------------------------------------------------------------------------------

    async def _make_room(self) -> bool:
        async with self._reclaiming:
            segment = self._disk.oldest()
            if not segment and not self._disk.usage().chunks:
                return False
            kept = self._uses.kept(segment, self._disk.segment_bytes, self._core.is_in_use)
            self._uses.forget([chunk for chunk, _ in segment])
            await self._disk.reclaim(kept)
            self._reclaimed_chunks += len(segment) - len(kept)
            return True

    @property
    def unwritten_chunks(self) -> int:
        """On their way down."""
        return self._write_back.queued_chunks

    @property
    def dropped(self) -> Counter[Reason]:
        """Chunks that were not written, and why."""
        return self._write_back.dropped

    async def clear(self, space: SpaceId | None) -> int:
        """Forget what the disk holds (of one space), for good: how many chunks were not in memory too."""
        before = self._disk.usage().chunks
        both = sum(map(self._disk.holds, self._core.chunks(space)))
        await self._disk.clear(space)
        return max(0, before - self._disk.usage().chunks - both)

    @property
    def health(self) -> str:
        """The word `ok`, or what is wrong."""
        if self._broken:
            return self._broken
        return self._guard.health if self._disk.scanned else "reading its catalogue"

    def stats(self) -> TierStats:
        usage = self._disk.usage()
        return TierStats(
            chunks=usage.chunks,
            used_bytes=usage.used_bytes,
            limit_bytes=usage.limit_bytes,
            pinned_chunks=0,
            loaded_chunks=self._promotion.chunks,
            stored_chunks=self._write_back.chunks,
            evicted_chunks=self._reclaimed_chunks,
            queued_chunks=self._write_back.queued_chunks,
            damaged_chunks=self._disk.damaged,
            read_latency_s=self._promotion.cost.latency_s,
            read_bytes_per_s=1 / self._promotion.cost.seconds_per_byte,
            health=self.health,
        )

    async def close(self) -> None:
        """End the work; what is being read or written is finished first, what waits for that, for a while."""
        end_s = time.monotonic() + DRAIN_S
        while (
            self._guard.in_service and not self._broken and self.unwritten_chunks and time.monotonic() < end_s
        ):
            await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._guard.close()
