"""The cache itself, between the messages and the tiers: spaces, leases, reservations, counters.

Synchronous and single-threaded; `policy/` decides what is held and what goes. Nothing here waits.

A session is one engine (or one program): all that it pins or reserves ends with it, not with a single
connection. So a scheduler that reconnects still owns its leases, and a slot that a worker may still be
copying into is not given away before that worker is gone.
"""

from collections import Counter
from collections.abc import Sequence

from stepwell.policy.index import Entry, Index
from stepwell.tiers.memory import MemoryTier, Slot
from stepwell.types import (
    ChunkId,
    Hit,
    Reason,
    RequestStats,
    SpaceId,
    SpaceSpec,
    TierStats,
)
from stepwell.wire import ChunkRun, Granted, ProtocolError, Run, pack_places

# Bytes that may go for one byte of a new chunk. Chunks of one size need 1.
_EVICTED_PER_RESERVED = 8


class UnknownSpace(LookupError):
    """The space was not opened on this server: it restarted, or the client never asked."""


class Pending:
    """A chunk that someone is writing: reserved, not yet visible. Its parent is held, or pending too."""

    __slots__ = ("cancelled", "children", "chunk", "parent", "pinned_parent", "slot", "written")

    def __init__(
        self, chunk: ChunkId, parent: ChunkId | None, slot: Slot, pinned_parent: Entry | None
    ) -> None:
        self.chunk = chunk
        self.parent = parent
        self.slot = slot
        self.pinned_parent = pinned_parent  # a chunk must not be evicted while its child is being written
        self.children: dict[ChunkId, Pending] = {}  # reserved while this was pending
        self.written = False
        self.cancelled = False


class Session:
    """What one engine holds."""

    def __init__(self) -> None:
        self.leases: dict[int, list[tuple[Entry, Slot]]] = {}
        self.reservations: dict[int, list[Pending]] = {}
        # Ended before they began: the end overtook the beginning, which a stopped server had not read.
        self.ended_leases: set[int] = set()
        self.ended_reservations: set[int] = set()


class Core:
    """All state of one cache server but its connections."""

    def __init__(self, memory: MemoryTier, index: Index) -> None:
        """`index` decides for `memory`; both start empty."""
        self.memory = memory
        self.requests = RequestStats()
        self.missed: Counter[Reason] = Counter()
        self.dropped: Counter[Reason] = Counter()
        self.lookups = 0
        self.hit_chunks = 0
        self._index = index
        self._spaces: dict[SpaceId, SpaceSpec] = {}
        self._sessions: set[Session] = set()
        self._pending: dict[ChunkId, Pending] = {}
        self._loaded_chunks = 0
        self._stored_chunks = 0
        self._evicted_chunks = 0

    # -- sessions and spaces ---------------------------------------------------------------------------

    def begin_session(self) -> Session:
        session = Session()
        self._sessions.add(session)
        return session

    def end_session(self, session: Session) -> None:
        """Release all that it holds; nobody of it copies any more."""
        for lease in list(session.leases):
            self.release(session, lease)
        for reservation in list(session.reservations):
            self.abort(session, reservation)
        self._sessions.discard(session)

    def open_space(self, space: SpaceId, spec: SpaceSpec) -> None:
        if spec.chunk_tokens < 1 or spec.chunk_bytes < 1:
            raise ProtocolError(f"no chunk has {spec.chunk_tokens} tokens in {spec.chunk_bytes} bytes")
        self._spaces[space] = spec

    def _spec(self, space: SpaceId) -> SpaceSpec:
        try:
            return self._spaces[space]
        except KeyError:
            raise UnknownSpace(space.hex()) from None

    # -- reading ---------------------------------------------------------------------------------------

    def lookup(self, space: SpaceId, keys: bytes) -> Hit:
        """Counts nothing and keeps nothing: a look-up is a question."""
        self._spec(space)
        held = self._index.held_run(ChunkRun(space, keys))
        return Hit(held, (self.memory.name,) * held)

    def load(
        self,
        session: Session,
        lease: int,
        space: SpaceId,
        keys: bytes,
        *,
        first: int = 0,
        again: bool = False,
    ) -> tuple[int, list[int]]:
        """Pin the leading chunks held, from number `first` on: how many there are, and their offsets.

        Raises UnknownSpace, or ProtocolError for a lease that exists or a `first` below 0.
        """
        if lease in session.leases or first < 0:
            raise ProtocolError(f"lease {lease} exists already, or begins before its first chunk")
        spec = self._spec(space)
        run = ChunkRun(space, keys)
        held = self._index.held_run(run)
        if not again:
            self.lookups += 1
            self.hit_chunks += held
            if held < len(run):
                self.missed[Reason.NOT_HELD] += len(run) - held
        if held and run[held - 1] in self._index:  # always, where the keys are a chain
            self._index.use(run[:held])
        if lease in session.ended_leases:
            session.ended_leases.discard(lease)
            return held, []
        pinned: list[tuple[Entry, Slot]] = []
        for number in range(first, held):
            entry = self._index.get(run[number])
            if entry is None:  # the keys are no chain: the bisection was misled
                held = number
                break
            self._index.pin(entry)
            pinned.append((entry, Slot(entry.place, spec.chunk_bytes)))
        session.leases[lease] = pinned
        if not again:
            self._loaded_chunks += len(pinned)
        return held, [slot.offset for _, slot in pinned]

    def release(self, session: Session, lease: int) -> None:
        pinned = session.leases.pop(lease, None)
        if pinned is None:
            session.ended_leases.add(lease)
            return
        for entry, slot in pinned:
            self._unpin(entry, slot)

    def _unpin(self, entry: Entry, slot: Slot) -> None:
        self._index.unpin(entry)
        if not entry.held and entry.pins == 0:
            self.memory.free(slot)

    # -- writing ---------------------------------------------------------------------------------------

    def reserve(self, session: Session, reservation: int, runs: Sequence[Run]) -> list[Granted]:
        """Slots for those chunks of each run that nobody holds or writes, as far as there is room.

        All or nothing when it raises: UnknownSpace, or ProtocolError for a reservation that exists.
        """
        if reservation in session.reservations:
            raise ProtocolError(f"reservation {reservation} exists already")
        asked = [(run, self._spec(run.space).chunk_bytes, ChunkRun(run.space, run.keys)) for run in runs]
        if reservation in session.ended_reservations:
            session.ended_reservations.discard(reservation)
            return [Granted(0, [], b"", Reason.ABANDONED) for _ in runs]
        taken = session.reservations[reservation] = []
        return [self._reserve_run(run, nbytes, chunks, taken) for run, nbytes, chunks in asked]

    def _reserve_run(self, run: Run, nbytes: int, chunks: ChunkRun, taken: list[Pending]) -> Granted:
        parent = None if run.parent is None else run.space + run.parent
        before = None if parent is None else self._index.get(parent)
        held = self._index.held_run(chunks, 0 if before is None else before.depth + 1)
        if held:
            parent = chunks[held - 1]
        numbers: list[int] = []
        offsets: list[int] = []
        stopped: Reason | None = None
        for number in range(held, len(chunks)):
            chunk = chunks[number]
            if chunk not in self._pending and chunk not in self._index:
                outcome = self._reserve_chunk(chunk, parent, nbytes)
                if isinstance(outcome, Reason):
                    stopped = outcome
                    self.dropped[outcome] += len(chunks) - number
                    break
                taken.append(outcome)
                numbers.append(number)
                offsets.append(outcome.slot.offset)
            parent = chunk
        return Granted(held, numbers, pack_places(offsets), stopped)

    def _reserve_chunk(self, chunk: ChunkId, parent: ChunkId | None, nbytes: int) -> Pending | Reason:
        parent_entry = None if parent is None else self._index.get(parent)
        parent_pending = None if parent is None else self._pending.get(parent)
        if parent is not None and parent_entry is None and parent_pending is None:
            return Reason.NO_PARENT
        if parent_entry is not None:
            self._index.pin(parent_entry)
        slot = self._make_room(nbytes)
        if slot is None:
            if parent_entry is not None:
                self._index.unpin(parent_entry)
            return Reason.NO_ROOM
        pending = self._pending[chunk] = Pending(chunk, parent, slot, parent_entry)
        if parent_pending is not None:
            parent_pending.children[chunk] = pending
        return pending

    def _make_room(self, nbytes: int) -> Slot | None:
        # Between pinned chunks of another size no gap may ever be large enough: evicting on and on would
        # empty the cache for nothing.
        evicted_bytes_most = _EVICTED_PER_RESERVED * nbytes
        evicted_bytes = 0
        while (slot := self.memory.reserve(nbytes)) is None and nbytes <= self.memory.limit_bytes:
            victim = self._index.evict() if evicted_bytes < evicted_bytes_most else None
            if victim is None:
                break
            gone = self.memory.take(victim.chunk)
            self.memory.free(gone)
            evicted_bytes += gone.nbytes
            self._evicted_chunks += 1
        return slot

    def commit(self, session: Session, reservation: int) -> None:
        """The reservation's chunks are written: each becomes visible once its parent is."""
        for pending in session.reservations.pop(reservation, ()):
            pending.written = True
            if pending.cancelled:
                self._drop(pending)
            elif pending.parent is None or pending.pinned_parent is not None:
                self._publish(pending)

    def _publish(self, first: Pending) -> None:
        ready = [first]
        while ready:
            pending = ready.pop()
            del self._pending[pending.chunk]
            entry = self._index.insert(pending.chunk, pending.parent, pending.slot.offset)
            self.memory.publish(pending.chunk, pending.slot)
            self._stored_chunks += 1
            self._unpin_parent(pending)
            for child in pending.children.values():
                if not child.cancelled:
                    self._index.pin(entry)
                    child.pinned_parent = entry
                    if child.written:
                        ready.append(child)

    def abort(self, session: Session, reservation: int) -> None:
        """Nobody writes into the reservation's slots any more."""
        taken = session.reservations.pop(reservation, None)
        if taken is None:
            session.ended_reservations.add(reservation)
            return
        for pending in taken:
            self._cancel(pending)
            self._drop(pending)

    def _cancel(self, first: Pending) -> None:
        """Neither this chunk nor what builds on it becomes visible; others may write them again.

        Whose writer may still be copying keeps its slot until the writer commits, aborts or goes away.
        """
        gone = [first]
        while gone:
            pending = gone.pop()
            if pending.cancelled:
                continue
            pending.cancelled = True
            del self._pending[pending.chunk]
            gone += pending.children.values()
            if pending.written:
                self._drop(pending)

    def _drop(self, pending: Pending) -> None:
        self.dropped[Reason.ABANDONED] += 1
        self._unpin_parent(pending)
        self.memory.free(pending.slot)

    def _unpin_parent(self, pending: Pending) -> None:
        entry = pending.pinned_parent
        if entry is not None:
            self._unpin(entry, Slot(entry.place, pending.slot.nbytes))

    # -- the whole -------------------------------------------------------------------------------------

    def clear(self, space: SpaceId | None) -> int:
        """Forget every chunk (of one space): how many there were. Leases keep their bytes until they end."""
        chunks = [chunk for chunk in self._index if space is None or chunk.startswith(space)]
        for chunk in chunks:
            if chunk not in self._index:
                continue  # went with an ancestor
            for entry in self._index.remove(chunk):
                slot = self.memory.take(entry.chunk)
                if entry.pins == 0:
                    self.memory.free(slot)
        for pending in [p for p in self._pending.values() if space is None or p.chunk.startswith(space)]:
            self._cancel(pending)
        return len(chunks)

    def memory_stats(self) -> TierStats:
        usage = self.memory.usage()
        return TierStats(
            chunks=len(self._index),
            used_bytes=usage.used_bytes,
            limit_bytes=usage.limit_bytes,
            pinned_chunks=self._index.pinned_chunks,
            loaded_chunks=self._loaded_chunks,
            stored_chunks=self._stored_chunks,
            evicted_chunks=self._evicted_chunks,
        )

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Sessions, spaces, leases and reservations that exist now."""
        return (
            len(self._sessions),
            len(self._spaces),
            sum(len(session.leases) for session in self._sessions),
            sum(len(session.reservations) for session in self._sessions),
        )

    def report(self, requests: RequestStats, missed: dict[Reason, int], dropped: dict[Reason, int]) -> None:
        """Add what an engine says of one request."""
        self.requests = self.requests.plus(requests)
        self.missed.update(missed)
        self.dropped.update(dropped)
