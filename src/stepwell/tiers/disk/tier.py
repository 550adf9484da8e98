"""Chunks in a log of segments: appended, never changed in place, reclaimed a whole segment at a time.

The shape is that of flash caches (CacheLib's Navy, foyer): writes are sequential, sizes may vary without
fragmentation, and the folder is bounded by construction. Nothing is synced: a cache need not be durable,
only checked. A torn or stale record is a miss.

One event loop drives it; the I/O runs on threads of its own. See `segment.py` for what lies in a file.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import NamedTuple, TypeVar, TypeVarTuple, Unpack

from stepwell.codec.frame import Kind
from stepwell.tiers.base import Get, Put, TierUsage
from stepwell.tiers.disk.blocks import BLOCK_BYTES, aligned, open_blocks, write_all
from stepwell.tiers.disk.folder import DiskError, own_folder, segment_files, segment_path
from stepwell.tiers.disk.segment import (
    FIRST_RECORD,
    Record,
    read_records,
    read_sequence,
    record_bytes,
    table_bytes,
)
from stepwell.tiers.disk.transfer import (
    CALL_BYTES,
    RECORDS_PER_CALL,
    Landing,
    Writing,
    read_group,
    write_group,
    write_header,
    write_table,
)
from stepwell.types import SPACE_ID_BYTES, ChunkId, Reason, SpaceId

logger = logging.getLogger(__name__)
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

SEGMENT_BYTES_LEAST = 64 << 10
SEGMENT_BYTES_MOST = 1 << 30
SEGMENTS_LEAST = 4  # one is written, one is kept free, one is reclaimed
_SEGMENTS_WANTED = 16  # so that reclaiming takes a small part of what is held
_SEGMENTS_MOST = 256  # each keeps a descriptor open
_FULL = (ENOSPC, EDQUOT, EFBIG)  # no room for more, for whatever reason
_RECORDS_PER_LOOK = 5_000  # records entered into the catalogue between two looks at the sockets


class Kept(NamedTuple):
    """A chunk in the segment that goes next."""

    chunk: ChunkId
    nbytes: int


class _Segment:
    """A file of the log in use."""

    def __init__(self, number: int, fd: int, sequence: int, segment_bytes: int) -> None:
        self.number = number
        self.fd = fd
        self.sequence = sequence
        self.segment_bytes = segment_bytes
        self.records: list[Record] = []
        self.end = FIRST_RECORD  # where the next record goes
        self.begun = 0  # records given room, written or not: the table needs room for all of them
        self.sealed = False
        self.in_flight = 0  # reads and writes
        self.idle = asyncio.Event()
        self.idle.set()

    def room_for(self, payload_bytes: int) -> bool:
        return self.end + record_bytes(payload_bytes) + table_bytes(self.begun + 1) <= self.segment_bytes

    def take(self, payload_bytes: int) -> int:
        """The offset of the next record, which now is taken."""
        offset = self.end
        self.end += record_bytes(payload_bytes)
        self.begun += 1
        return offset

    def begin(self) -> None:
        self.in_flight += 1
        self.idle.clear()

    def finish(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self.idle.set()


class _Place(NamedTuple):
    segment: _Segment
    offset: int
    nbytes: int


class _Write:
    """A chunk on its way to the log."""

    __slots__ = ("chunk", "data", "ended", "kind", "number", "offset", "outcome", "segment", "unwanted")

    def __init__(self, number: int, chunk: ChunkId, data: memoryview, kind: Kind = Kind.CHUNK) -> None:
        self.number = number  # of the item in its batch
        self.chunk = chunk
        self.data = data
        self.kind = kind
        self.segment: _Segment | None = None
        self.offset = 0
        self.outcome: Reason | None = None
        self.unwanted = False  # cleared or deleted while it was written
        self.ended = asyncio.Event()  # `outcome` is the last word


def segment_bytes_of(limit_bytes: int) -> int:
    """How large the segments of a log of this size are."""
    wanted = max(limit_bytes // _SEGMENTS_MOST, min(limit_bytes // _SEGMENTS_WANTED, SEGMENT_BYTES_MOST))
    return max(wanted, SEGMENT_BYTES_LEAST) // BLOCK_BYTES * BLOCK_BYTES


class DiskTier:
    """A `Tier`. It never reclaims by itself: `put` answers `NO_ROOM`, and `reclaim` makes some."""

    name = "disk"

    def __init__(self, folder: Path, limit_bytes: int, *, io_threads: int = 4) -> None:
        """Take the folder, bring it within its limit, and read the segments' headers; `scan` reads the rest.

        Raises FolderInUse, or DiskError for a folder or limit that cannot be used.
        """
        self.segment_bytes = segment_bytes_of(limit_bytes)
        self.limit_bytes = limit_bytes
        self.damaged = 0
        self.scanned = False
        self.direct = True
        self._folder = folder
        if limit_bytes < SEGMENTS_LEAST * self.segment_bytes:
            least = SEGMENTS_LEAST * SEGMENT_BYTES_LEAST
            raise DiskError(22, f"a disk tier needs at least {least} bytes, not {limit_bytes}")
        self._catalogue: dict[ChunkId, _Place] = {}
        self._used_bytes = 0  # of the records in the catalogue
        self._writing: dict[ChunkId, _Write] = {}
        self._segments: list[_Segment] = []  # in the order of the log
        self._free: list[tuple[int, int]] = []  # files of our size that hold nothing: number, descriptor
        self._file_bytes = 0  # of all files, whatever they hold
        self._cannot_grow = False  # the drive is full of others' files
        self._killed: set[SpaceId] = set()  # while scanning: cleared by what was read or done since
        self._killed_all = False
        self._closed = False
        self._append = asyncio.Lock()
        self._reclaiming = asyncio.Lock()
        self._sealing: set[asyncio.Task[None]] = set()
        self._lock = own_folder(folder)
        self._threads = ThreadPoolExecutor(io_threads, "stepwell-disk")
        try:
            self._open_all()
        except BaseException:
            self._let_go()
            raise
        self._next_sequence = max((s.sequence for s in self._segments), default=0) + 1

    # -- what is asked without waiting -----------------------------------------------------------------

    def holds(self, chunk: ChunkId) -> bool:
        """Whether it is findable: a look into the catalogue."""
        return chunk in self._catalogue

    def nbytes(self, chunk: ChunkId) -> int | None:
        """Its size, None when it is not held."""
        place = self._catalogue.get(chunk)
        return None if place is None else place.nbytes

    def usage(self) -> TierUsage:
        """Bytes of findable records, headers and padding included."""
        return TierUsage(len(self._catalogue), self._used_bytes, self.limit_bytes)

    @property
    def file_bytes(self) -> int:
        """What the folder takes, whatever the files hold: never more than the limit."""
        return self._file_bytes

    def oldest(self) -> Sequence[Kept]:
        """The findable chunks of the segment that `reclaim` would free, in the order of the log."""
        if not self._segments or not self._segments[0].sealed:
            return []
        segment = self._segments[0]
        return [Kept(record.chunk, record.payload_bytes) for record in self._findable(segment)]

    # -- the contract ----------------------------------------------------------------------------------

    async def held(self, chunks: Sequence[ChunkId]) -> int:
        return next((n for n, chunk in enumerate(chunks) if chunk not in self._catalogue), len(chunks))

    async def put(self, items: Sequence[Put]) -> list[Reason | None]:
        # Shielded: the threads read the caller's memory until they are done, whoever stops waiting.
        writes = [_Write(n, item.chunk, item.data.cast("B")) for n, item in enumerate(items)]
        return await asyncio.shield(asyncio.ensure_future(self._put(writes)))

    async def get(self, items: Sequence[Get]) -> list[Reason | None]:
        return await asyncio.shield(asyncio.ensure_future(self._get(items)))

    async def delete(self, chunks: Sequence[ChunkId]) -> None:
        """Forget chunks until the next start. To find them again is no harm: an id names its content."""
        for chunk in chunks:
            self._forget(chunk)
            if chunk in self._writing:
                self._writing[chunk].unwanted = True

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for segment in self._segments:
            await segment.idle.wait()
        await asyncio.gather(*self._sealing)
        if self._segments and not self._segments[-1].sealed:
            await self._seal(self._segments[-1])
        self._let_go()

    # -- more than the contract ------------------------------------------------------------------------

    async def scan(self) -> None:
        """Fill the catalogue, newest segments first. What is not read yet is not held."""
        for segment in [s for s in reversed(self._segments) if s.sealed]:
            if self._closed:
                return
            segment.begin()
            try:
                records, from_table = await self._run(read_records, segment.fd, segment.sequence)
            except OSError as error:
                logger.warning("segment %d of %s cannot be read: %s", segment.number, self._folder, error)
                continue
            finally:
                segment.finish()
            segment.records += records
            await self._enter(segment, records)
            if not from_table and segment in self._segments:
                segment.begun = len(records)
                await self._seal(segment)
        self._killed.clear()
        self._killed_all = False
        self.scanned = True

    async def reclaim(self, keep: Collection[ChunkId]) -> None:
        """Free the oldest segment; chunks in `keep` are written again first, as far as there is room.

        Does nothing when only the segment is left that is being written.
        """
        await asyncio.shield(asyncio.ensure_future(self._reclaim(keep)))

    async def clear(self, space: SpaceId | None) -> None:
        """Forget all chunks (of one space), also those on their way, for good."""
        for chunk in [c for c in self._catalogue if space is None or c.startswith(space)]:
            self._forget(chunk)
        for chunk, write in self._writing.items():
            if space is None or chunk.startswith(space):
                write.unwanted = True
        if space is None:
            self._killed_all = True
        else:
            self._killed.add(space)
        kind = Kind.CLEAR_ALL if space is None else Kind.CLEAR_SPACE
        chunk = (space or b"").ljust(SPACE_ID_BYTES + 32, b"\0")
        outcome: Reason | None = None
        # A log without room has segments to reclaim, but the one that is written.
        for _ in range(len(self._segments) + 2):
            write = _Write(0, chunk, memoryview(b""), kind)
            (outcome,) = await self._put_writes([write], spare=True)
            if outcome is not Reason.NO_ROOM:
                break
            await self.reclaim(())
        if outcome is None and write.segment is not None:
            outcome = await self._sync(write.segment)
        if outcome is not None:
            logger.warning("the disk tier could not note that it was cleared (%s)", outcome)

    async def _sync(self, segment: _Segment) -> Reason | None:
        segment.begin()
        try:
            await self._run(os.fdatasync, segment.fd)
        except OSError:
            return Reason.OUT_OF_SERVICE
        finally:
            segment.finish()
        return None

    # -- writing ---------------------------------------------------------------------------------------

    async def _put(self, writes: list[_Write]) -> list[Reason | None]:
        if self._closed:
            return [Reason.OUT_OF_SERVICE] * len(writes)
        wanted: list[_Write] = []
        shared: list[tuple[_Write, _Write]] = []  # with whoever is writing the same chunk
        for write in writes:
            if (other := self._writing.get(write.chunk)) is not None:
                shared.append((write, other))
            elif write.chunk not in self._catalogue:
                self._writing[write.chunk] = write
                wanted.append(write)
        await self._put_marked(wanted)
        for write, other in shared:
            await other.ended.wait()
            write.outcome = other.outcome
        return [write.outcome for write in writes]

    async def _put_marked(self, writes: list[_Write], *, spare: bool = False) -> None:
        """Write what is marked in `_writing`, and take the marks away."""
        try:
            await self._put_writes(writes, spare=spare)
        finally:
            for write in writes:
                del self._writing[write.chunk]
                write.ended.set()

    async def _put_writes(self, writes: list[_Write], *, spare: bool = False) -> list[Reason | None]:
        """Give room, write, enter into the catalogue. `spare`: also the room kept back for reclaiming."""
        async with self._append:
            for write in writes:
                write.outcome = await self._give_room(write, spare)
        groups = list(_groups([write for write in writes if write.segment is not None]))
        await asyncio.gather(*(self._write(group) for group in groups))
        return [write.outcome for write in writes]

    async def _give_room(self, write: _Write, spare: bool) -> Reason | None:
        nbytes = write.data.nbytes
        if FIRST_RECORD + record_bytes(nbytes) + table_bytes(1) > self.segment_bytes:
            return Reason.NO_ROOM
        segment = self._segments[-1] if self._segments else None
        if segment is None or segment.sealed or not segment.room_for(nbytes):
            try:
                opened = await self._open_next(spare)
            except OSError as error:
                logger.warning("the disk tier cannot begin a segment in %s: %s", self._folder, error)
                return Reason.OUT_OF_SERVICE
            if opened is None:
                if segment is not None and not segment.sealed:
                    await self._seal(segment)  # or it could never be reclaimed, where it is the only one
                return Reason.NO_ROOM
            if segment is not None and not segment.sealed:
                await self._seal(segment)
            self._segments.append(opened)
            segment = opened
        write.segment = segment
        write.offset = segment.take(nbytes)
        segment.begin()
        return None

    async def _write(self, group: list[_Write]) -> None:
        segment = group[0].segment
        assert segment is not None
        jobs = [Writing(w.chunk, w.data, segment.sequence, w.kind) for w in group]
        try:
            await self._run(write_group, segment.fd, group[0].offset, jobs)
        except OSError as error:
            logger.warning("segment %d of %s cannot be written: %s", segment.number, self._folder, error)
            for write in group:
                write.outcome = Reason.OUT_OF_SERVICE
            return
        finally:
            for _ in group:
                segment.finish()
        for write in group:
            if write.kind is not Kind.CHUNK or not write.unwanted:
                self._add(segment, Record(write.chunk, write.offset, write.data.nbytes, write.kind))

    def _add(self, segment: _Segment, record: Record) -> None:
        segment.records.append(record)
        if record.kind is Kind.CHUNK:
            self._forget(record.chunk)  # an older copy, where it was written again
            self._catalogue[record.chunk] = _Place(segment, record.offset, record.payload_bytes)
            self._used_bytes += record_bytes(record.payload_bytes)

    def _forget(self, chunk: ChunkId) -> None:
        place = self._catalogue.pop(chunk, None)
        if place is not None:
            self._used_bytes -= record_bytes(place.nbytes)

    # -- reading ---------------------------------------------------------------------------------------

    async def _get(self, items: Sequence[Get]) -> list[Reason | None]:
        outcomes: list[Reason | None] = [Reason.NOT_HELD] * len(items)
        if self._closed:
            return outcomes
        found: list[tuple[_Place, int]] = []
        for number, item in enumerate(items):
            place = self._catalogue.get(item.chunk)
            if place is None:
                continue
            if place.nbytes != item.into.nbytes:
                outcomes[number] = Reason.CORRUPT
                continue
            place.segment.begin()
            found.append((place, number))
        found.sort(key=lambda one: (one[0].segment.sequence, one[0].offset))
        await asyncio.gather(*(self._read(group, items, outcomes) for group in _neighbours(found)))
        return outcomes

    async def _read(
        self, group: list[tuple[_Place, int]], items: Sequence[Get], outcomes: list[Reason | None]
    ) -> None:
        segment = group[0][0].segment
        landings = [
            Landing(items[number].chunk, items[number].into.cast("B"), segment.sequence)
            for _, number in group
        ]
        try:
            good = await self._run(read_group, segment.fd, group[0][0].offset, landings)
        except OSError as error:
            logger.warning("segment %d of %s cannot be read: %s", segment.number, self._folder, error)
            for _, number in group:
                outcomes[number] = Reason.OUT_OF_SERVICE
            return
        finally:
            for _ in group:
                segment.finish()
        for (place, number), is_good in zip(group, good, strict=True):
            outcomes[number] = None if is_good else Reason.CORRUPT
            if not is_good:
                self._drop_damaged(items[number].chunk, place)

    def _drop_damaged(self, chunk: ChunkId, place: _Place) -> None:
        if self._catalogue.get(chunk) is place:
            self.damaged += 1
            self._forget(chunk)
            logger.warning(
                "a damaged record was dropped: chunk %s, segment %d of %s",
                chunk.hex(),
                place.segment.number,
                self._folder,
            )

    # -- segments --------------------------------------------------------------------------------------

    def _findable(self, segment: _Segment) -> Iterator[Record]:
        for record in segment.records:
            place = self._catalogue.get(record.chunk)
            if place is not None and place.segment is segment and place.offset == record.offset:
                yield record

    async def _reclaim(self, keep: Collection[ChunkId]) -> None:
        async with self._reclaiming:
            if self._segments and self._segments[0].sealed and not self._closed:
                await self._reclaim_segment(self._segments[0], frozenset(keep))
            # After a start with another limit, one segment may not make room for one of ours and a spare.
            while self._segments and self._segments[-1].sealed and not self._can_begin():
                await self._reclaim_segment(self._segments[0], frozenset())

    def _can_begin(self) -> bool:
        return self._spaces() >= 2 or (self._cannot_grow and bool(self._free))

    def _spaces(self) -> int:
        """How many segments could be begun, the one that is kept back included."""
        return len(self._free) + (self.limit_bytes - self._file_bytes) // self.segment_bytes

    async def _reclaim_segment(self, segment: _Segment, keep: frozenset[ChunkId]) -> None:
        kept = [record for record in self._findable(segment) if record.chunk in keep]
        for batch in _batches(kept):
            await self._write_again(batch)
        if segment in self._segments:  # else it was lost meanwhile
            self._drop(segment)
            await self._free_file(segment)

    def _drop(self, segment: _Segment) -> None:
        self._segments.remove(segment)
        for record in list(self._findable(segment)):
            self._forget(record.chunk)

    async def _free_file(self, segment: _Segment) -> None:
        # Who reads it now gets what lies there: it is not written before they have.
        await segment.idle.wait()
        if segment.segment_bytes == self.segment_bytes and await self._is_emptied(segment):
            self._free.append((segment.number, segment.fd))
        else:
            await self._run(self._remove_file, segment.number, segment.fd)
            self._file_bytes -= segment.segment_bytes

    async def _is_emptied(self, segment: _Segment) -> bool:
        """Take back its header, or the next start would find again what was reclaimed, and even cleared."""
        try:
            await self._run(write_all, segment.fd, 0, [aligned(BLOCK_BYTES)])
        except OSError:
            return False
        return _is_whole(segment)

    async def _write_again(self, records: list[Record]) -> None:
        buffers = [aligned(record.payload_bytes)[: record.payload_bytes] for record in records]
        outcomes = await self._get(
            [Get(record.chunk, buffer) for record, buffer in zip(records, buffers, strict=True)]
        )
        good = [
            _Write(number, record.chunk, buffer)
            for number, (record, buffer, why) in enumerate(zip(records, buffers, outcomes, strict=True))
            if why is None and record.chunk in self._catalogue and record.chunk not in self._writing
        ]
        for write in good:
            self._writing[write.chunk] = write
        await self._put_marked(good, spare=True)

    async def _drop_lost(self) -> None:
        """Give up the segments, and free files, that somebody has removed from the folder."""
        for segment in [s for s in self._segments if s.sealed and os.fstat(s.fd).st_nlink == 0]:
            lost = sum(1 for _ in self._findable(segment))
            logger.warning("segment %d of %s was removed: %d chunks lost", segment.number, self._folder, lost)
            self.damaged += lost
            self._drop(segment)
            await self._free_file(segment)
        for number, fd in [one for one in self._free if os.fstat(one[1]).st_nlink == 0]:
            self._free.remove((number, fd))
            os.close(fd)
            self._file_bytes -= self.segment_bytes

    async def _open_next(self, spare: bool) -> _Segment | None:
        """A new segment to write to; None when there is no room, or only what is kept back for reclaiming."""
        await self._drop_lost()
        if self._spaces() < (1 if spare else 2):
            return None
        if not self._free:
            try:
                number, fd = await self._run(self._make_file)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                if not self._cannot_grow:
                    self._cannot_grow = True
                    logger.warning(
                        "the drive of %s is full: the disk tier goes on with %d bytes",
                        self._folder,
                        self._file_bytes,
                    )
                return None
            self._cannot_grow = False
            self._file_bytes += self.segment_bytes
            self._free.append((number, fd))
        number, fd = self._free.pop()
        segment = _Segment(number, fd, self._next_sequence, self.segment_bytes)
        self._next_sequence += 1
        try:
            await self._run(write_header, fd, segment.sequence, self.segment_bytes)
        except BaseException:
            self._free.append((number, fd))
            raise
        return segment

    async def _seal(self, segment: _Segment) -> None:
        """Nothing more is appended; the table is written when the last record is."""
        segment.sealed = True
        if segment.in_flight:
            task = asyncio.ensure_future(self._seal_later(segment))
            self._sealing.add(task)
            task.add_done_callback(self._sealing.discard)
        else:
            await self._write_table(segment)

    async def _seal_later(self, segment: _Segment) -> None:
        await segment.idle.wait()
        if segment in self._segments:
            await self._write_table(segment)

    async def _write_table(self, segment: _Segment) -> None:
        segment.begin()
        try:
            await self._run(write_table, segment.fd, segment.sequence, segment.segment_bytes, segment.records)
        except OSError as error:  # a hint only: the next start reads the headers
            logger.warning("the table of segment %d cannot be written: %s", segment.number, error)
        finally:
            segment.finish()

    async def _enter(self, segment: _Segment, records: list[Record]) -> None:
        """Into the catalogue, the last record first: what it cleared is not entered, nor an older copy."""
        for number, record in enumerate(reversed(records)):
            if segment not in self._segments:
                return  # reclaimed meanwhile
            if record.kind is Kind.CLEAR_ALL:
                self._killed_all = True
            elif record.kind is Kind.CLEAR_SPACE:
                self._killed.add(record.chunk[:SPACE_ID_BYTES])
            elif (
                not self._killed_all
                and record.chunk[:SPACE_ID_BYTES] not in self._killed
                and record.chunk not in self._catalogue
            ):
                self._catalogue[record.chunk] = _Place(segment, record.offset, record.payload_bytes)
                self._used_bytes += record_bytes(record.payload_bytes)
            if number % _RECORDS_PER_LOOK == 0:
                await asyncio.sleep(0)

    # -- files (on the threads, or before there are any) -----------------------------------------------

    def _open_all(self) -> None:
        found: list[_Segment] = []
        for number, path in sorted(segment_files(self._folder).items()):
            try:
                fd, direct = open_blocks(path, create=False, direct=self.direct)
            except OSError as error:
                raise DiskError(
                    error.errno, f"cannot open {path}: {error.strerror}; remove it, or choose another --disk"
                ) from error
            self._note_direct(direct)
            nbytes = os.fstat(fd).st_size
            sequence = _read_sequence(fd)
            if sequence is None and nbytes == self.segment_bytes:
                self._free.append((number, fd))
            elif sequence is None:
                self._remove_file(number, fd)
                continue
            else:
                segment = _Segment(number, fd, sequence, nbytes)
                segment.sealed = True
                found.append(segment)
            self._file_bytes += nbytes
        self._segments = sorted(found, key=lambda segment: segment.sequence)
        while self._file_bytes > self.limit_bytes:
            if self._free:
                self._remove_file(*self._free.pop())
                self._file_bytes -= self.segment_bytes
            else:
                segment = self._segments.pop(0)
                self._remove_file(segment.number, segment.fd)
                self._file_bytes -= segment.segment_bytes

    def _make_file(self) -> tuple[int, int]:
        number = next(n for n in range(1 << 30) if not segment_path(self._folder, n).exists())
        path = segment_path(self._folder, number)
        self._folder.mkdir(mode=0o700, exist_ok=True)  # somebody may have removed it
        fd, direct = open_blocks(path, create=True, direct=self.direct)
        try:
            self._note_direct(direct)
            os.posix_fallocate(fd, 0, self.segment_bytes)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return number, fd

    def _remove_file(self, number: int, fd: int) -> None:
        segment_path(self._folder, number).unlink(missing_ok=True)
        os.close(fd)

    def _note_direct(self, direct: bool) -> None:
        if self.direct and not direct:
            self.direct = False
            logger.warning(
                "%s has no direct I/O: reads and writes go through the page cache, slower and at the cost "
                "of memory",
                self._folder,
            )

    def _let_go(self) -> None:
        self._threads.shutdown()
        for fd in [s.fd for s in self._segments] + [fd for _, fd in self._free]:
            os.close(fd)
        self._segments, self._free = [], []
        os.close(self._lock)

    def _run(self, work: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _groups(writes: list[_Write]) -> Iterator[list[_Write]]:
    """Neighbours in one segment, as many as one call takes."""
    group: list[_Write] = []
    group_bytes = 0
    for write in writes:
        nbytes = record_bytes(write.data.nbytes)
        if group and (
            write.segment is not group[0].segment
            or write.offset != group[0].offset + group_bytes
            or _is_full(len(group), group_bytes + nbytes)
        ):
            yield group
            group, group_bytes = [], 0
        group.append(write)
        group_bytes += nbytes
    if group:
        yield group


def _neighbours(found: list[tuple[_Place, int]]) -> Iterator[list[tuple[_Place, int]]]:
    """As `_groups`, of places in the order of the log."""
    group: list[tuple[_Place, int]] = []
    group_bytes = 0
    for one in found:
        place, nbytes = one[0], record_bytes(one[0].nbytes)
        if group and (
            place.segment is not group[0][0].segment
            or place.offset != group[0][0].offset + group_bytes
            or _is_full(len(group), group_bytes + nbytes)
        ):
            yield group
            group, group_bytes = [], 0
        group.append(one)
        group_bytes += nbytes
    if group:
        yield group


def _is_full(records: int, nbytes: int) -> bool:
    return records == RECORDS_PER_CALL or nbytes > CALL_BYTES


def _batches(records: list[Record]) -> Iterator[list[Record]]:
    """For writing again: some calls' worth."""
    batch: list[Record] = []
    batch_bytes = 0
    for record in records:
        if batch and batch_bytes + record.payload_bytes > 2 * CALL_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(record)
        batch_bytes += record.payload_bytes
    if batch:
        yield batch


def _read_sequence(fd: int) -> int | None:
    try:
        return read_sequence(fd)
    except OSError as error:
        logger.warning("a segment's header cannot be read, its chunks are lost: %s", error)
        return None


def _is_whole(segment: _Segment) -> bool:
    """Whether its file is still there, at its full size."""
    state = os.fstat(segment.fd)
    return state.st_nlink > 0 and state.st_size == segment.segment_bytes
