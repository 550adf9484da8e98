"""What the disk tier's threads do: records between a segment's file and the callers' memory.

Records that lie together cross in one call, straight from and to the callers' memory where that is
aligned, as arena slots are; a header's block, and what is left after the last whole block, pass through a
buffer.
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from stepwell.codec import frame
from stepwell.codec.frame import Header, Kind
from stepwell.tiers.disk.blocks import (
    BLOCK_BYTES,
    ShortRead,
    aligned,
    blocks_bytes,
    is_aligned,
    read_all,
    write_all,
)
from stepwell.tiers.disk.segment import Record, pack_header, pack_table, table_bytes
from stepwell.types import ChunkId

CALL_BYTES = 8 << 20
"""Of one call: enough for a drive's full speed, and small enough that several threads share a batch."""

RECORDS_PER_CALL = 256  # three buffers each: below IOV_MAX


class Writing(NamedTuple):
    """A record to write."""

    chunk: ChunkId
    data: memoryview
    sequence: int
    kind: Kind


class Landing(NamedTuple):
    """A record to read, and what it has to be."""

    chunk: ChunkId
    into: memoryview
    sequence: int


class _Buffers:
    """A record's memory in the order of the file: header block, whole blocks of payload, the rest."""

    def __init__(self, header: memoryview, payload: memoryview) -> None:
        self.header = header
        whole = payload.nbytes // BLOCK_BYTES * BLOCK_BYTES
        # Nothing of it, where it is not aligned: arena slots always are.
        direct = payload[:whole] if whole and is_aligned(payload) else payload[:0]
        self.rest = payload[direct.nbytes :]
        nbytes = self.rest.nbytes
        self.bounce = aligned(nbytes)[: blocks_bytes(nbytes)] if nbytes else None
        self.views = [header, direct] + ([] if self.bounce is None else [self.bounce])

    def fill_bounce(self) -> None:
        if self.bounce is not None:
            self.bounce[: self.rest.nbytes] = self.rest

    def take_bounce(self) -> None:
        if self.bounce is not None:
            self.rest[:] = self.bounce[: self.rest.nbytes]


def write_group(fd: int, offset: int, records: Sequence[Writing]) -> None:
    """Write neighbours, the first at `offset`. Raises OSError: then none of them counts as written."""
    headers = aligned(len(records) * BLOCK_BYTES)
    views: list[memoryview] = []
    for number, record in enumerate(records):
        block = headers[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        header = Header(
            record.chunk, record.sequence, record.data.nbytes, frame.digest(record.data), record.kind
        )
        block[: frame.HEADER_BYTES] = frame.pack(header)
        buffers = _Buffers(block, record.data)
        buffers.fill_bounce()
        views += buffers.views
    write_all(fd, offset, views)


def read_group(fd: int, offset: int, landings: Sequence[Landing]) -> list[bool]:
    """Read neighbours, the first at `offset`: which of them are exactly what was asked for.

    Raises OSError; a file that ends too early is no error, but its records are none.
    """
    headers = aligned(len(landings) * BLOCK_BYTES)
    buffers = [
        _Buffers(headers[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES], landing.into)
        for number, landing in enumerate(landings)
    ]
    with contextlib.suppress(ShortRead):  # the checks below tell how much came
        read_all(fd, offset, [view for one in buffers for view in one.views])
    return [_is_right(landing, one) for landing, one in zip(landings, buffers, strict=True)]


def _is_right(landing: Landing, buffers: _Buffers) -> bool:
    header = frame.unpack(buffers.header)
    if (
        header is None
        or header.kind is not Kind.CHUNK
        or header.chunk != landing.chunk
        or header.sequence != landing.sequence
        or header.payload_bytes != landing.into.nbytes
    ):
        return False
    buffers.take_bounce()
    return frame.digest(landing.into) == header.payload_digest


def write_header(fd: int, sequence: int, segment_bytes: int) -> None:
    """Begin a segment anew. Raises OSError."""
    block = aligned(BLOCK_BYTES)
    block[:] = pack_header(sequence, segment_bytes)
    write_all(fd, 0, [block])


def write_table(fd: int, sequence: int, segment_bytes: int, records: list[Record]) -> None:
    """Write a segment's table of contents. Raises OSError."""
    nbytes = table_bytes(len(records))
    table = aligned(nbytes)
    table[:] = pack_table(sequence, records)
    write_all(fd, segment_bytes - nbytes, [table])
