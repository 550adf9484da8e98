"""What the disk tier handles: segments in use, places in them, chunks on their way in and out."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

from stepwell.codec.frame import Kind
from stepwell.tiers.disk.files import SegmentFile
from stepwell.tiers.disk.segment import FIRST_RECORD, Record, record_bytes, table_bytes
from stepwell.tiers.disk.transfer import CALL_BYTES, RECORDS_PER_CALL
from stepwell.types import ChunkId, Reason


class OpenSegment:
    """A file of the log in use."""

    def __init__(self, file: SegmentFile, sequence: int, *, sealed: bool = False) -> None:
        self.file = file
        self.sequence = sequence
        self.records: list[Record] = []
        self.end = FIRST_RECORD  # where the next record goes
        self.begun = 0  # records given room, written or not: the table needs room for all of them
        self.sealed = sealed
        self.torn = False  # a write failed: without a table, nothing behind it is found again
        self.in_flight = 0  # reads and writes
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def number(self) -> int:
        return self.file.number

    @property
    def fd(self) -> int:
        return self.file.fd

    @property
    def segment_bytes(self) -> int:
        return self.file.nbytes

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


class Place(NamedTuple):
    segment: OpenSegment
    offset: int
    nbytes: int


class Write:
    """A chunk on its way to the log."""

    __slots__ = ("chunk", "data", "ended", "kind", "number", "offset", "outcome", "segment", "unwanted")

    def __init__(self, number: int, chunk: ChunkId, data: memoryview, kind: Kind = Kind.CHUNK) -> None:
        self.number = number  # of the item in its batch
        self.chunk = chunk
        self.data = data
        self.kind = kind
        self.segment: OpenSegment | None = None
        self.offset = 0
        self.outcome: Reason | None = None
        self.unwanted = False  # cleared or deleted while it was written
        self.ended = asyncio.Event()  # `outcome` is the last word

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class Read(NamedTuple):
    """A chunk to fetch."""

    segment: OpenSegment
    offset: int
    nbytes: int
    number: int  # of the item in its batch


class Placed(Protocol):
    """A record with its place."""

    @property
    def segment(self) -> OpenSegment | None: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


PlacedT = TypeVar("PlacedT", bound=Placed)


def neighbours(items: Iterable[PlacedT]) -> Iterator[list[PlacedT]]:
    """Runs of records that lie together in one segment, as many as one call takes, in the given order."""
    group: list[PlacedT] = []
    group_bytes = 0
    for item in items:
        nbytes = record_bytes(item.nbytes)
        if group and (
            item.segment is not group[0].segment
            or item.offset != group[0].offset + group_bytes
            or len(group) == RECORDS_PER_CALL
            or group_bytes + nbytes > CALL_BYTES
        ):
            yield group
            group, group_bytes = [], 0
        group.append(item)
        group_bytes += nbytes
    if group:
        yield group
