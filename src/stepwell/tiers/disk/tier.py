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
from pathlib import Path
from typing import NamedTuple, TypeVar, TypeVarTuple, Unpack

from stepwell.codec.frame import Kind
from stepwell.tiers.base import Get, Put, TierUsage
from stepwell.tiers.disk.blocks import BLOCK_BYTES, aligned, write_all
from stepwell.tiers.disk.files import SegmentFiles, is_there
from stepwell.tiers.disk.folder import DiskError
from stepwell.tiers.disk.parts import OpenSegment, Place, Read, Write, neighbours
from stepwell.tiers.disk.segment import (
    FIRST_RECORD,
    Record,
    read_records,
    record_bytes,
    table_bytes,
)
from stepwell.tiers.disk.transfer import (
    Landing,
    LargeRecord,
    Writing,
    is_large,
    read_group,
    read_part,
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
IO_THREADS = 6  # more than the four calls at once that a drive wants: each also checks what it read
_SEGMENTS_WANTED = 16  # so that reclaiming takes a small part of what is held
_SEGMENTS_MOST = 256  # each keeps a descriptor open
_WRITTEN_AGAIN_BYTES = 8 << 20  # read and written again at once
_RECORDS_PER_LOOK = 5_000  # records entered into the catalogue between two looks at the sockets


class Kept(NamedTuple):
    """A chunk in the segment that goes next."""

    chunk: ChunkId
    nbytes: int


def segment_bytes_of(limit_bytes: int) -> int:
    """How large the segments of a log of this size are."""
    wanted = max(limit_bytes // _SEGMENTS_MOST, min(limit_bytes // _SEGMENTS_WANTED, SEGMENT_BYTES_MOST))
    return max(wanted, SEGMENT_BYTES_LEAST) // BLOCK_BYTES * BLOCK_BYTES


class DiskTier:
    """A `Tier`. It never reclaims by itself: `put` answers `NO_ROOM`, and `reclaim` makes some."""

    name = "disk"

    def __init__(self, folder: Path, limit_bytes: int, *, io_threads: int = IO_THREADS) -> None:
        """Take the folder, bring it within its limit, and read the segments' headers; `scan` reads the rest.

        Raises FolderInUse, or DiskError for a folder or limit that cannot be used.
        """
        self.segment_bytes = segment_bytes_of(limit_bytes)
        self.limit_bytes = limit_bytes
        self.damaged = 0
        self.scanned = False
        self._folder = folder
        if limit_bytes < SEGMENTS_LEAST * self.segment_bytes:
            least = SEGMENTS_LEAST * SEGMENT_BYTES_LEAST
            raise DiskError(22, f"a disk tier needs at least {least >> 10} KiB: choose a larger --disk-size")
        self._catalogue: dict[ChunkId, Place] = {}
        self._used_bytes = 0  # of the records in the catalogue
        self._writing: dict[ChunkId, Write] = {}
        self._segments: list[OpenSegment] = []  # in the order of the log
        self._killed: set[SpaceId] = set()  # while scanning: cleared by what was read or done since
        self._killed_all = False
        self._closed = False
        self._append = asyncio.Lock()
        self._reclaiming = asyncio.Lock()
        self._sealing: set[asyncio.Task[None]] = set()
        self._files = SegmentFiles(folder, limit_bytes, self.segment_bytes, io_threads)
        try:
            found = self._files.open_all()
        except BaseException:
            self._let_go()
            raise
        self._segments = [OpenSegment(file, sequence, sealed=True) for sequence, file in found]
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
        return self._files.file_bytes

    @property
    def direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        return self._files.direct

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
        writes = [Write(n, item.chunk, item.data.cast("B")) for n, item in enumerate(items)]
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
            write = Write(0, chunk, memoryview(b""), kind)
            (outcome,) = await self._put_writes([write], spare=True)
            if outcome is Reason.NO_ROOM:
                await self.reclaim(())
                continue
            if outcome is None and write.segment is not None:
                # What stands before it in the segment has to be whole, or a start after kill -9 stops there.
                await write.segment.idle.wait()
                if write.segment.torn:
                    continue
                outcome = await self._sync(write.segment)
            break
        if outcome is not None:
            logger.warning("the disk tier could not note that it was cleared (%s)", outcome)

    async def _sync(self, segment: OpenSegment) -> Reason | None:
        segment.begin()
        try:
            await self._run(os.fdatasync, segment.fd)
        except OSError:
            return Reason.OUT_OF_SERVICE
        finally:
            segment.finish()
        return None

    # -- writing ---------------------------------------------------------------------------------------

    async def _put(self, writes: list[Write]) -> list[Reason | None]:
        if self._closed:
            return [Reason.OUT_OF_SERVICE] * len(writes)
        wanted: list[Write] = []
        shared: list[tuple[Write, Write]] = []  # with whoever is writing the same chunk
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

    async def _put_marked(self, writes: list[Write], *, spare: bool = False) -> None:
        """Write what is marked in `_writing`, and take the marks away."""
        try:
            await self._put_writes(writes, spare=spare)
        finally:
            for write in writes:
                del self._writing[write.chunk]
                write.ended.set()

    async def _put_writes(self, writes: list[Write], *, spare: bool = False) -> list[Reason | None]:
        """Give room, write, enter into the catalogue. `spare`: also the room kept back for reclaiming."""
        async with self._append:
            for write in writes:
                write.outcome = await self._give_room(write, spare)
        groups = list(neighbours([write for write in writes if write.segment is not None]))
        await asyncio.gather(*(self._write(group) for group in groups))
        return [write.outcome for write in writes]

    async def _give_room(self, write: Write, spare: bool) -> Reason | None:
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

    async def _write(self, group: list[Write]) -> None:
        segment = group[0].segment
        assert segment is not None
        jobs = [Writing(w.chunk, w.data, segment.sequence, w.kind) for w in group]
        try:
            if is_large(jobs[0].data.nbytes):
                await self._write_large(segment.fd, group[0].offset, jobs[0])
            else:
                await self._run(write_group, segment.fd, group[0].offset, jobs)
        except OSError as error:
            logger.warning("segment %d of %s cannot be written: %s", segment.number, self._folder, error)
            for write in group:
                write.outcome = Reason.OUT_OF_SERVICE
            segment.torn = True
        finally:
            for _ in group:
                segment.finish()
        if segment.torn and not segment.sealed:
            await self._seal(segment)
        for write in group:
            if write.outcome is None and (write.kind is not Kind.CHUNK or not write.unwanted):
                self._add(segment, Record(write.chunk, write.offset, write.data.nbytes, write.kind))

    async def _write_large(self, fd: int, offset: int, job: Writing) -> None:
        record = LargeRecord(offset, job.data)
        record.fill_bounce()
        parts = [self._run(write_all, fd, at, views) for at, views in record.parts()]
        await _all([self._run(record.seal, job), *parts])
        await self._run(write_all, fd, offset, [record.header])

    async def _read_large(self, fd: int, offset: int, landing: Landing) -> list[bool]:
        record = LargeRecord(offset, landing.into)
        parts = [(offset, [record.header]), *record.parts()]
        await _all([self._run(read_part, fd, at, views) for at, views in parts])
        return [await self._run(record.is_right, landing)]

    def _add(self, segment: OpenSegment, record: Record) -> None:
        segment.records.append(record)
        if record.kind is Kind.CHUNK:
            self._forget(record.chunk)  # an older copy, where it was written again
            self._catalogue[record.chunk] = Place(segment, record.offset, record.payload_bytes)
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
        found: list[Read] = []
        for number, item in enumerate(items):
            place = self._catalogue.get(item.chunk)
            if place is None:
                continue
            if place.nbytes != item.into.nbytes:
                outcomes[number] = Reason.CORRUPT
                continue
            place.segment.begin()
            found.append(Read(*place, number))
        found.sort(key=lambda read: (read.segment.sequence, read.offset))
        await asyncio.gather(*(self._read(group, items, outcomes) for group in neighbours(found)))
        return outcomes

    async def _read(self, group: list[Read], items: Sequence[Get], outcomes: list[Reason | None]) -> None:
        segment, offset = group[0].segment, group[0].offset
        landings = [
            Landing(item.chunk, item.into.cast("B"), segment.sequence)
            for item in (items[read.number] for read in group)
        ]
        try:
            if is_large(group[0].nbytes):
                good = await self._read_large(segment.fd, offset, landings[0])
            else:
                good = await self._run(read_group, segment.fd, offset, landings)
        except OSError as error:
            logger.warning("segment %d of %s cannot be read: %s", segment.number, self._folder, error)
            for read in group:
                outcomes[read.number] = Reason.OUT_OF_SERVICE
            return
        finally:
            for _ in group:
                segment.finish()
        for read, is_good in zip(group, good, strict=True):
            outcomes[read.number] = None if is_good else Reason.CORRUPT
            if not is_good:
                self._drop_damaged(items[read.number].chunk, segment, read.offset)

    def _drop_damaged(self, chunk: ChunkId, segment: OpenSegment, offset: int) -> None:
        place = self._catalogue.get(chunk)
        if place is not None and place.segment is segment and place.offset == offset:
            self.damaged += 1
            self._forget(chunk)
            logger.warning(
                "a damaged record was dropped: chunk %s, segment %d of %s",
                chunk.hex(),
                segment.number,
                self._folder,
            )

    # -- segments --------------------------------------------------------------------------------------

    def _findable(self, segment: OpenSegment) -> Iterator[Record]:
        for record in segment.records:
            place = self._catalogue.get(record.chunk)
            if place is not None and place.segment is segment and place.offset == record.offset:
                yield record

    async def _reclaim(self, keep: Collection[ChunkId]) -> None:
        async with self._reclaiming:
            if self._segments and self._segments[0].sealed and not self._closed:
                await self._reclaim_segment(self._segments[0], frozenset(keep))
            # After a start with another limit, one segment may not make room for one of ours and a spare.
            while self._segments and self._segments[-1].sealed and not self._files.can_begin:
                await self._reclaim_segment(self._segments[0], frozenset())

    async def _reclaim_segment(self, segment: OpenSegment, keep: frozenset[ChunkId]) -> None:
        kept = [record for record in self._findable(segment) if record.chunk in keep]
        # Some at a time: each takes a buffer.
        largest = max((record.payload_bytes for record in kept), default=1)
        at_once = max(1, _WRITTEN_AGAIN_BYTES // largest)
        for start in range(0, len(kept), at_once):
            await self._write_again(kept[start : start + at_once])
        if segment in self._segments:  # else it was lost meanwhile
            self._drop(segment)
            await self._free_file(segment)

    def _drop(self, segment: OpenSegment) -> None:
        self._segments.remove(segment)
        for record in list(self._findable(segment)):
            self._forget(record.chunk)

    async def _free_file(self, segment: OpenSegment) -> None:
        # Who reads it now gets what lies there: it is not written before they have.
        await segment.idle.wait()
        await self._files.give_back(segment.file)

    async def _write_again(self, records: list[Record]) -> None:
        buffers = [aligned(record.payload_bytes)[: record.payload_bytes] for record in records]
        outcomes = await self._get(
            [Get(record.chunk, buffer) for record, buffer in zip(records, buffers, strict=True)]
        )
        good = [
            Write(number, record.chunk, buffer)
            for number, (record, buffer, why) in enumerate(zip(records, buffers, outcomes, strict=True))
            if why is None and record.chunk in self._catalogue and record.chunk not in self._writing
        ]
        for write in good:
            self._writing[write.chunk] = write
        await self._put_marked(good, spare=True)

    async def _drop_lost(self) -> None:
        """Give up the segments that somebody has removed from the folder."""
        # Not those in flight: their writes may wait for the very caller. They go the next time.
        idle = [s for s in self._segments if s.sealed and not s.in_flight]
        for segment in [s for s in idle if not is_there(s.fd)]:
            lost = sum(1 for _ in self._findable(segment))
            logger.warning("segment %d of %s was removed: %d chunks lost", segment.number, self._folder, lost)
            self.damaged += lost
            self._drop(segment)
            await self._free_file(segment)

    async def _open_next(self, spare: bool) -> OpenSegment | None:
        """A new segment to write to; None when there is no room, or only what is kept back for reclaiming."""
        await self._drop_lost()
        file = await self._files.take(spare)
        if file is None:
            return None
        segment = OpenSegment(file, self._next_sequence)
        self._next_sequence += 1
        try:
            await self._run(write_header, file.fd, segment.sequence, file.nbytes)
        except BaseException:
            self._files.untake(file)
            raise
        return segment

    async def _seal(self, segment: OpenSegment) -> None:
        """Nothing more is appended; the table is written when the last record is."""
        segment.sealed = True
        if segment.in_flight:
            task = asyncio.ensure_future(self._seal_later(segment))
            self._sealing.add(task)
            task.add_done_callback(self._sealing.discard)
        else:
            await self._write_table(segment)

    async def _seal_later(self, segment: OpenSegment) -> None:
        await segment.idle.wait()
        if segment in self._segments:
            await self._write_table(segment)

    async def _write_table(self, segment: OpenSegment) -> None:
        segment.begin()
        try:
            await self._run(write_table, segment.fd, segment.sequence, segment.segment_bytes, segment.records)
        except OSError as error:  # a hint only: the next start reads the headers
            logger.warning("the table of segment %d cannot be written: %s", segment.number, error)
        finally:
            segment.finish()

    async def _enter(self, segment: OpenSegment, records: list[Record]) -> None:
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
                self._catalogue[record.chunk] = Place(segment, record.offset, record.payload_bytes)
                self._used_bytes += record_bytes(record.payload_bytes)
            if number % _RECORDS_PER_LOOK == 0:
                await asyncio.sleep(0)

    def _let_go(self) -> None:
        self._files.close(segment.fd for segment in self._segments)
        self._segments = []

    def _run(self, work: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> Awaitable[T]:
        return self._files.run(work, *arguments)


async def _all(works: Sequence[Awaitable[None]]) -> None:
    """Wait for all, whatever happens: each uses the caller's memory. Raises the first error."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if result is not None:
            raise result
