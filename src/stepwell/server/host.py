"""A running cache: the core and the sessions of whoever is connected, in one event loop."""

import time
import uuid
from importlib.metadata import version

from stepwell.policy.evict import make_evictor
from stepwell.policy.index import Index
from stepwell.server.connection import Connection
from stepwell.server.core import Core, Session
from stepwell.tiers.memory import MemoryTier
from stepwell.types import CacheStats, Reason

_ALIGN_BYTES = 4096


class CacheHost:
    """Owns the tiers and knows which connections belong to which session."""

    def __init__(self, memory_bytes: int, eviction: str = "lru") -> None:
        """Allocates the arena. Raises ValueError for a size (ArenaTooLarge) or policy that cannot be, or
        OSError when the kernel refuses."""
        self.version = version("stepwell")
        self.server_id = uuid.uuid4().hex
        index = Index(make_evictor(eviction))  # may raise: before there is an arena to give back
        self.core = Core(MemoryTier(memory_bytes - memory_bytes % _ALIGN_BYTES), index)
        self._started_s = time.monotonic()
        self._sessions: dict[str, tuple[Session, set[Connection]]] = {}

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

    def stats(self) -> CacheStats:
        core = self.core
        sessions, spaces, leases, reservations = core.counts
        return CacheStats(
            version=self.version,
            server_id=self.server_id,
            uptime_s=time.monotonic() - self._started_s,
            sessions=sessions,
            spaces=spaces,
            leases=leases,
            reservations=reservations,
            lookups=core.lookups,
            hit_chunks=core.hit_chunks,
            missed={reason: core.missed[reason] for reason in Reason},
            dropped={reason: core.dropped[reason] for reason in Reason},
            requests=core.requests,
            tiers={core.memory.name: core.memory_stats()},
        )

    async def close(self) -> None:
        await self.core.memory.close()
