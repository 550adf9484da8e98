"""The cache itself, between the messages and the tiers: spaces, leases, reservations, counters.

Synchronous and single-threaded; `policy/` decides what is held and what goes. Nothing here waits.

A session is one engine (or one program): all that it pins or reserves ends with it, not with a single
connection. So a scheduler that reconnects still owns its leases, and a slot that a worker may still be
copying into is not given away before that worker is gone.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from stepwell.policy.index import Entry, Index
from stepwell.tiers.memory import MemoryTier, Slot
from stepwell.types import (
    ChunkId,
    Hit,
    Key,
    Reason,
    RequestStats,
    SpaceId,
    SpaceSpec,
    TierStats,
)
from stepwell.wire import ChunkRun, Granted, ProtocolError, Run, pack_places

logger = logging.getLogger(__name__)

# Bytes that may go for one byte of a new chunk. Chunks of one size need 1.
_EVICTED_PER_RESERVED = 8

# A writer that takes longer than any step of an engine hangs: then somebody else may write its chunks.
WRITER_PATIENCE_S = 10.0

# So many chunks of a space that are not what computing them gives are no accident: it is closed.
DIFFERING_MOST = 3

# Chunks removed between two looks at the sockets: 10 ms, where all of 300,000 took 2.6 s.
_CLEARED_PER_SLICE = 1_000


class UnknownSpace(LookupError):
    """The space was not opened on this server: it restarted, or the client never asked."""


class SlowTiers(Protocol):
    """The tiers below memory, as far as the core needs to know: see `server/below.py`."""

    def leading(self, run: ChunkRun, first: int) -> int:
        """How many leading chunks of `run` are held here or in memory; `first` of them lie in memory."""

    def bring(self, space: SpaceId, run: ChunkRun, first: int, end: int) -> None:
        """Begin to bring up the chunks from `first` to `end`, which `leading` has told of."""

    def coming(self, chunk: ChunkId) -> bool:
        """Whether this chunk is on its way up."""

    def ready_in_s(self, space: SpaceId) -> float:
        """Seconds until all that is on its way now is expected in memory."""

    def prefetch(self, space: SpaceId, run: ChunkRun, first: int) -> None:
        """Begin to bring up what follows the `first` chunks, unless enough is on its way already."""

    def drop(self, chunk: ChunkId) -> None:
        """This chunk is wrong: forget it."""

    def stored(self, chunk: ChunkId, nbytes: int) -> None:
        """An engine has stored this chunk in memory."""

    def evicted(self, entry: Entry) -> None:
        """Memory no longer holds this chunk."""

    def names(self, count: int) -> tuple[str, ...]:
        """The tiers of so many chunks that lie here."""


class NothingBelow:
    """Memory is the only tier."""

    def leading(self, run: ChunkRun, first: int) -> int:
        return first

    def bring(self, space: SpaceId, run: ChunkRun, first: int, end: int) -> None:
        pass

    def coming(self, chunk: ChunkId) -> bool:
        return False

    def ready_in_s(self, space: SpaceId) -> float:
        return 0.0

    def prefetch(self, space: SpaceId, run: ChunkRun, first: int) -> None:
        pass

    def drop(self, chunk: ChunkId) -> None:
        pass

    def stored(self, chunk: ChunkId, nbytes: int) -> None:
        pass

    def evicted(self, entry: Entry) -> None:
        pass

    def names(self, count: int) -> tuple[str, ...]:
        return ()


class Lease:
    """The leading chunks of one prompt, pinned for an engine; more may be on their way up."""

    __slots__ = ("coming", "counted", "first", "held", "pinned", "run")

    def __init__(self, run: ChunkRun, first: int, counted: bool) -> None:
        self.run = run
        self.first = first  # chunks before it the engine has itself
        self.counted = counted  # in the look-ups: not when the same request asks again
        self.held = 0  # leading chunks in memory when last looked at
        self.coming = 0  # leading chunks, with those on their way
        self.pinned: list[tuple[Entry, Slot]] = []


class Pending:
    """A chunk that someone is writing: reserved, not yet visible. Its parent is held, or pending too."""

    __slots__ = ("cancelled", "children", "chunk", "parent", "pinned_parent", "since_s", "slot", "written")

    def __init__(
        self, chunk: ChunkId, parent: ChunkId | None, slot: Slot, pinned_parent: Entry | None, since_s: float
    ) -> None:
        self.chunk = chunk
        self.parent = parent
        self.slot = slot
        self.since_s = since_s  # when it was reserved
        self.pinned_parent = pinned_parent  # a chunk must not be evicted while its child is being written
        self.children: dict[ChunkId, Pending] = {}  # reserved while this was pending
        self.written = False
        self.cancelled = False


class Session:
    """What one engine holds."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.reservations: dict[int, list[Pending]] = {}
        # Ended before they began: the end overtook the beginning, which a stopped server had not read.
        self.ended_leases: set[int] = set()
        self.ended_reservations: set[int] = set()


class Core:
    """All state of one cache server but its connections."""

    def __init__(self, memory: MemoryTier, index: Index, clock: Callable[[], float] = time.monotonic) -> None:
        """`index` decides for `memory`; both start empty. `clock` counts seconds from anywhere."""
        self.memory = memory
        self.below: SlowTiers = NothingBelow()
        self._clock = clock
        self.requests = RequestStats()
        self.missed: Counter[Reason] = Counter()
        self.dropped: Counter[Reason] = Counter()
        self.checked_chunks = 0
        self.differing: Counter[SpaceId] = Counter()  # chunks that were computed again and differed
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

    @property
    def closed_spaces(self) -> int:
        """Spaces in which nothing is served or stored any more."""
        return sum(map(self._is_closed, self.differing))

    def _is_closed(self, space: SpaceId) -> bool:
        return self.differing[space] >= DIFFERING_MOST

    def checked(self, space: SpaceId, key: Key, difference: float, matches: bool) -> bool:
        """An engine computed a held chunk again: whether its space is closed now and has to be forgotten."""
        self.checked_chunks += 1
        if matches:
            return False
        self.differing[space] += 1
        logger.error(
            "chunk %s of space %s is not what computing it gives (difference %.3g): its bytes were wrong "
            "when they were stored, or the engine computes differently now",
            key.hex(),
            space.hex(),
            difference,
        )
        self._remove(space + key)
        self.below.drop(space + key)
        if self.differing[space] == DIFFERING_MOST:
            logger.error("space %s is closed: %d of its chunks differed", space.hex(), DIFFERING_MOST)
            return True
        return False

    def _spec(self, space: SpaceId) -> SpaceSpec:
        try:
            return self._spaces[space]
        except KeyError:
            raise UnknownSpace(space.hex()) from None

    # -- reading ---------------------------------------------------------------------------------------

    def lookup(self, space: SpaceId, keys: bytes) -> Hit:
        """Counts nothing and keeps nothing: a look-up is a question."""
        self._spec(space)
        run = ChunkRun(space, b"" if self._is_closed(space) else keys)
        held = self._index.held_run(run)
        chunks = self.below.leading(run, held)
        return Hit(chunks, (self.memory.name,) * held + self.below.names(chunks - held))

    def prefetch(self, space: SpaceId, keys: bytes) -> None:
        """Begin to bring up what slower tiers hold of a prompt. Raises UnknownSpace."""
        self._spec(space)
        run = ChunkRun(space, b"" if self._is_closed(space) else keys)
        self.below.prefetch(space, run, self._index.held_run(run))

    def load(
        self,
        session: Session,
        number: int,
        space: SpaceId,
        keys: bytes,
        *,
        first: int = 0,
        again: bool = False,
    ) -> tuple[int, list[int], int]:
        """Pin the leading chunks held, from number `first` on, and begin to bring up those that follow.

        How many leading chunks lie in memory, the pinned ones' offsets, and how many are to come.
        Raises UnknownSpace, or ProtocolError for a lease that exists or a `first` below 0.
        """
        if number in session.leases or first < 0:
            raise ProtocolError(f"lease {number} exists already, or begins before its first chunk")
        self._spec(space)
        run = ChunkRun(space, keys)
        if self._is_closed(space):
            self.missed[Reason.IN_DOUBT] += len(run)
            run = run[:0]
        lease = Lease(run, first, not again)
        held = self._index.held_run(run)
        if held and run[held - 1] in self._index:  # always, where the keys are a chain
            self._index.use(run[:held])
        if number in session.ended_leases:
            session.ended_leases.discard(number)
            lease.coming = held
            self._count(lease)
            return held, [], held
        session.leases[number] = lease
        # Not what the engine has itself: that may have gone from here, and is not asked for.
        lease.held = min(first, held)
        offsets = self._pin_to(lease, held)
        lease.coming = lease.held
        if lease.held == held:
            end = self.below.leading(run, held)
            if end > max(first, held):  # else the engine has as much itself
                self.below.bring(space, run, held, end)
                lease.coming = end
        self._count(lease)
        return lease.held, offsets, lease.coming

    def more(self, session: Session, number: int) -> tuple[int, list[int], int]:
        """Pin what has come up for this lease; as `load`, with the offsets of what is newly pinned.

        Raises ProtocolError for an unknown lease.
        """
        lease = session.leases.get(number)
        if lease is None:
            raise ProtocolError(f"there is no lease {number}")
        end = lease.held
        while end < lease.coming and lease.run[end] in self._index:
            end += 1
        offsets = self._pin_to(lease, end)
        if lease.held < lease.coming and not self.below.coming(lease.run[lease.held]):
            self._give_up(lease, Reason.NOT_HELD)  # it could not be read, or went again before it was pinned
        return lease.held, offsets, lease.coming

    def release(self, session: Session, number: int) -> None:
        lease = session.leases.pop(number, None)
        if lease is None:
            session.ended_leases.add(number)
            return
        self._give_up(lease, Reason.TOO_SLOW)
        for entry, slot in lease.pinned:
            self._unpin(entry, slot)

    def _pin_to(self, lease: Lease, end: int) -> list[int]:
        """Pin the lease's chunks up to `end`, as far as they are held: their offsets."""
        offsets = []
        nbytes = self._spec(lease.run.space).chunk_bytes
        while lease.held < end:
            entry = self._index.get(lease.run[lease.held])
            if entry is None:  # the keys are no chain: a bisection was misled
                break
            if lease.held >= lease.first:
                self._index.pin(entry)
                lease.pinned.append((entry, Slot(entry.place, nbytes)))
                offsets.append(entry.place)
                self._loaded_chunks += lease.counted
            lease.held += 1
        return offsets

    def _count(self, lease: Lease) -> None:
        # What is coming counts as a hit until it is given up.
        if lease.counted:
            self.lookups += 1
            self.hit_chunks += lease.coming
            self.missed[Reason.NOT_HELD] += len(lease.run) - lease.coming

    def _give_up(self, lease: Lease, reason: Reason) -> None:
        """What has not come up yet will not be waited for any more."""
        missing = lease.coming - lease.held
        lease.coming = lease.held
        if lease.counted:
            self.hit_chunks -= missing
            self.missed[reason] += missing

    def chunk_bytes(self, space: SpaceId) -> int:
        """Raises UnknownSpace."""
        return self._spec(space).chunk_bytes

    def chunks(self, space: SpaceId | None) -> Iterator[ChunkId]:
        """All that lie in memory (of one space)."""
        return (chunk for chunk in self._index if space is None or chunk.startswith(space))

    def hold(self, chunk: ChunkId) -> tuple[Entry, Slot] | None:
        """Pin one chunk for a copy of the server's own; None when it is not held."""
        entry = self._index.get(chunk)
        if entry is None:
            return None
        self._index.pin(entry)
        return entry, Slot(entry.place, self.memory.nbytes(chunk))

    def let_go(self, entry: Entry, slot: Slot) -> None:
        """Take back a pin of `hold`."""
        self._unpin(entry, slot)

    def holds(self, chunk: ChunkId) -> bool:
        """Whether the chunk lies in memory, written."""
        return chunk in self._index

    def is_in_use(self, chunk: ChunkId) -> bool:
        """Whether the chunk lies in memory and somebody used it, or what follows it, since it came there."""
        entry = self._index.get(chunk)
        return entry is not None and (entry.used or entry.children > 0)

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
        if self._is_closed(run.space):
            self.dropped[Reason.IN_DOUBT] += len(chunks)
            return Granted(0, [], b"", Reason.IN_DOUBT)
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
            if not self._being_written(chunk) and chunk not in self._index:
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

    def _being_written(self, chunk: ChunkId) -> bool:
        pending = self._pending.get(chunk)
        if pending is not None and self._clock() - pending.since_s > WRITER_PATIENCE_S:
            self._cancel(pending)  # its slot stays its own until it says that it writes no more
            return False
        return pending is not None

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
        pending = self._pending[chunk] = Pending(chunk, parent, slot, parent_entry, self._clock())
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
            self.below.evicted(victim)
        return slot

    def commit(self, session: Session, reservation: int, failed: Collection[ChunkId] = ()) -> None:
        """The reservation's chunks are written, but the `failed`: each becomes visible once its parent is."""
        for pending in session.reservations.pop(reservation, ()):
            pending.written = True
            if pending.chunk in failed:
                self._cancel(pending)  # and drops it
            elif pending.cancelled:
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
            self.below.stored(pending.chunk, pending.slot.nbytes)
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

    def clear(self, space: SpaceId | None) -> Iterator[int]:
        """Forget every chunk (of one space) that is there now, a slice at each step: how many were removed.

        Leases keep their bytes until they end.
        """
        for pending in [p for p in self._pending.values() if space is None or p.chunk.startswith(space)]:
            self._cancel(pending)
        chunks = list(self.chunks(space))
        chunks.reverse()  # the youngest first, children before parents: what is left is always a whole prefix
        for start in range(0, len(chunks), _CLEARED_PER_SLICE):
            yield sum(map(self._remove, chunks[start : start + _CLEARED_PER_SLICE]))

    def _remove(self, chunk: ChunkId) -> int:
        gone = self._index.remove(chunk)
        for entry in gone:
            slot = self.memory.take(entry.chunk)
            if entry.pins == 0:
                self.memory.free(slot)
        return len(gone)

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
    def counts(self) -> tuple[int, int, int]:
        """Spaces, leases and reservations that exist now."""
        return (
            len(self._spaces),
            sum(len(session.leases) for session in self._sessions),
            sum(len(session.reservations) for session in self._sessions),
        )

    def report(self, requests: RequestStats, missed: dict[Reason, int], dropped: dict[Reason, int]) -> None:
        """Add what an engine says of one request."""
        self.requests = self.requests.plus(requests)
        self.missed.update(missed)
        self.dropped.update(dropped)
