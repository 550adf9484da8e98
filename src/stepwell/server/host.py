"""A running cache: the tiers, the core and the sessions of whoever is connected, in one event loop."""

import asyncio
import time
import uuid
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import msgspec

from stepwell.policy.evict import make_evictor
from stepwell.policy.index import Index
from stepwell.server.below import DiskBelow, DriveLimits
from stepwell.server.connection import Connection
from stepwell.server.core import Core, Session
from stepwell.tiers.disk import DiskTier
from stepwell.tiers.memory import MemoryTier
from stepwell.types import CacheStats, Reason, SpaceId

_ALIGN_BYTES = 4096


class DiskSetting(msgspec.Struct, frozen=True):
    """Where the disk tier lies, and what it may take."""

    folder: Path
    limit_bytes: int
    limits: DriveLimits = DriveLimits()


class CacheHost:
    """Owns the tiers and knows which connections belong to which session."""

    def __init__(self, memory_bytes: int, eviction: str = "lru", disk: DiskSetting | None = None) -> None:
        """Allocates the arena and opens the folder. `start` begins to serve.

        Raises ValueError for a size (ArenaTooLarge) or policy that cannot be, DiskError for a folder that
        cannot be used, or OSError when the kernel refuses.
        """
        self.version = version("stepwell")
        self.server_id = uuid.uuid4().hex
        index = Index(make_evictor(eviction))  # may raise: before there is an arena to give back
        memory = MemoryTier(memory_bytes - memory_bytes % _ALIGN_BYTES)
        self._setting = disk
        try:
            self._disk = None if disk is None else DiskTier(disk.folder, disk.limit_bytes)
        except BaseException:
            memory.close_now()
            raise
        self.core = Core(memory, index)
        self._below: DiskBelow | None = None
        self._started_s = time.monotonic()
        self._sessions: dict[str, tuple[Session, set[Connection]]] = {}
        self._forgetting: set[asyncio.Task[int]] = set()

    def start(self) -> None:
        """Begin the work of the slower tiers, in the running event loop."""
        if self._disk is not None and self._setting is not None:
            self._below = self.core.below = DiskBelow(self.core, self._disk, self._setting.limits)
            self._below.start()

    def connection(self) -> Connection:
        """A protocol for asyncio to drive: one for each client that connects."""
        return Connection(self)

    def join(self, name: str, connection: Connection) -> Session:
        if name not in self._sessions:
            self._sessions[name] = (self.core.begin_session(), set())
        session, connections = self._sessions[name]
        connections.add(connection)
        return session

    def leave(self, name: str, connection: Connection) -> None:
        session, connections = self._sessions[name]
        connections.discard(connection)
        if not connections:
            del self._sessions[name]
            self.core.end_session(session)

    def attached(self, name: str) -> dict[int, bytes]:
        """The layouts of the session's workers that have mapped the arena, by rank."""
        _, connections = self._sessions[name]
        return {c.rank: c.layout for c in connections if c.rank is not None}

    @property
    def promotes(self) -> bool:
        """Whether there is a tier below memory."""
        return self._disk is not None

    @property
    def unwritten_chunks(self) -> int:
        """On their way to slower tiers."""
        return 0 if self._below is None else self._below.unwritten_chunks

    async def clear(self, space: SpaceId | None) -> int:
        """Forget every chunk (of one space) in every tier: how many there were. It serves meanwhile."""
        only_below = 0 if self._below is None else await self._below.clear(space)
        removed = 0
        for chunks in self.core.clear(space):
            removed += chunks
            await asyncio.sleep(0)
        if self._below is not None:
            await self._below.clear(space)  # what was on its way down when we began
        return only_below + removed

    def forget(self, space: SpaceId) -> None:
        """As `clear`, when there is time."""
        task = asyncio.ensure_future(self.clear(space))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    def health(self) -> dict[str, str]:
        """Of each tier: "ok", or what is wrong."""
        health = {self.core.memory.name: "ok"}
        if self._below is not None:
            health["disk"] = self._below.health
        return health

    def stats(self) -> CacheStats:
        core = self.core
        spaces, leases, reservations = core.counts
        dropped = Counter(core.dropped)
        tiers = {core.memory.name: core.memory_stats()}
        if self._below is not None:
            dropped += self._below.dropped
            tiers["disk"] = self._below.stats()
        return CacheStats(
            version=self.version,
            server_id=self.server_id,
            uptime_s=time.monotonic() - self._started_s,
            sessions=len(self._sessions),
            spaces=spaces,
            leases=leases,
            reservations=reservations,
            lookups=core.lookups,
            hit_chunks=core.hit_chunks,
            missed={reason: core.missed[reason] for reason in Reason},
            dropped={reason: dropped[reason] for reason in Reason},
            requests=core.requests,
            tiers=tiers,
        )

    async def close(self) -> None:
        """Let go of everything; what a slower tier reads or writes is finished first."""
        for task in self._forgetting:
            task.cancel()
        if self._below is not None:
            await self._below.close()
        elif self._disk is not None:
            await self._disk.close()
        await self.core.memory.close()
