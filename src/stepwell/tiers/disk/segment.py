"""One file of the log: a header block, records, and when it is full a table of contents at its end.

    header block | record header block, payload in whole blocks | … | free | table of contents

Every record names the segment's sequence number, which is new with every use of the file: what an earlier
use left behind is no record. The table makes a start quick and is only a hint: every read checks the
record itself.
"""

import os
import struct
from collections.abc import Iterator

import msgspec

from stepwell.codec import frame
from stepwell.codec.frame import Kind
from stepwell.tiers.disk.blocks import BLOCK_BYTES, aligned, blocks_bytes, read_all
from stepwell.types import ChunkId

FIRST_RECORD = BLOCK_BYTES  # the offset behind the header block
_MAGIC = b"STEPWSEG"
_VERSION = 1
_HEADER = struct.Struct("<8sQQQ16s")  # magic, version, sequence, bytes of the file, digest
_TABLE_MAGIC = b"STEPWTOC"
_TRAILER = struct.Struct("<8sQQ16s16s")  # magic, sequence, entries, digest of the entries, digest of this
_ENTRY = struct.Struct("<48sQII")  # chunk, payload bytes, number of its header block, kind
_DIGEST_BYTES = 16
_WINDOW_BYTES = 256 << 10  # read at once while scanning: a drive takes as long for it as for two blocks


class Record(msgspec.Struct, frozen=True):
    """Where one record lies in its segment."""

    chunk: ChunkId
    offset: int  # of its header block
    payload_bytes: int
    kind: Kind = Kind.CHUNK

    @property
    def end(self) -> int:
        return self.offset + record_bytes(self.payload_bytes)


def record_bytes(payload_bytes: int) -> int:
    """What a record takes: its header's block and its payload's."""
    return BLOCK_BYTES + blocks_bytes(payload_bytes)


def table_bytes(records: int) -> int:
    """What the table of so many records takes."""
    return blocks_bytes(records * _ENTRY.size + _TRAILER.size)


def pack_header(sequence: int, segment_bytes: int) -> bytes:
    """The first block."""
    fields = _HEADER.pack(_MAGIC, _VERSION, sequence, segment_bytes, bytes(_DIGEST_BYTES))
    head = fields[:-_DIGEST_BYTES]
    return (head + frame.digest(head)).ljust(BLOCK_BYTES, b"\0")


def read_sequence(fd: int) -> int | None:
    """The sequence number of a segment's file, None when it has no valid header. Raises OSError."""
    size_bytes = os.fstat(fd).st_size
    if size_bytes < BLOCK_BYTES:
        return None
    block = aligned(BLOCK_BYTES)
    read_all(fd, 0, [block])
    head = bytes(block[: _HEADER.size - _DIGEST_BYTES])
    if bytes(block[_HEADER.size - _DIGEST_BYTES : _HEADER.size]) != frame.digest(head):
        return None
    magic, version, sequence, segment_bytes, _ = _HEADER.unpack(bytes(block[: _HEADER.size]))
    if magic != _MAGIC or version != _VERSION or segment_bytes != size_bytes:
        return None
    return int(sequence)


def pack_table(sequence: int, records: list[Record]) -> bytes:
    """The table of contents, to end where the file ends."""
    entries = b"".join(
        _ENTRY.pack(record.chunk, record.payload_bytes, record.offset // BLOCK_BYTES, record.kind)
        for record in sorted(records, key=lambda record: record.offset)
    )
    head = struct.pack("<8sQQ16s", _TABLE_MAGIC, sequence, len(records), frame.digest(entries))
    table = entries + head + frame.digest(head)
    return table.rjust(table_bytes(len(records)), b"\0")


def read_records(fd: int, sequence: int) -> tuple[list[Record], bool]:
    """A segment's records in the order of the log, and whether they come from its table. Raises OSError."""
    size_bytes = os.fstat(fd).st_size
    table = _read_table(fd, sequence, size_bytes)
    if table is not None:
        return table, True
    return list(_walk(fd, sequence, size_bytes)), False


def _read_table(fd: int, sequence: int, size_bytes: int) -> list[Record] | None:
    last = aligned(BLOCK_BYTES)
    read_all(fd, size_bytes - BLOCK_BYTES, [last])
    trailer = bytes(last[-_TRAILER.size :])
    head = trailer[:-_DIGEST_BYTES]
    magic, table_sequence, count, entries_digest, own_digest = _TRAILER.unpack(trailer)
    if magic != _TABLE_MAGIC or table_sequence != sequence or own_digest != frame.digest(head):
        return None
    nbytes = table_bytes(count)
    if nbytes > size_bytes - FIRST_RECORD:
        return None
    table = aligned(nbytes)
    read_all(fd, size_bytes - nbytes, [table])
    end = nbytes - _TRAILER.size
    entries = table[end - count * _ENTRY.size : end]
    if frame.digest(entries) != entries_digest:
        return None
    return [
        Record(chunk, block * BLOCK_BYTES, payload_bytes, Kind(kind))
        for chunk, payload_bytes, block, kind in _ENTRY.iter_unpack(entries)
    ]


def _walk(fd: int, sequence: int, size_bytes: int) -> Iterator[Record]:
    """From header to header, up to the first block that is none of this segment's."""
    window = aligned(_WINDOW_BYTES)
    offset = start = end = FIRST_RECORD
    while offset + BLOCK_BYTES <= size_bytes:
        if offset >= end:
            # Small records are read many at once, of large ones only the header.
            large = offset - start >= _WINDOW_BYTES
            start, end = offset, min(size_bytes, offset + (BLOCK_BYTES if large else _WINDOW_BYTES))
            read_all(fd, start, [window[: end - start]])
        header = frame.unpack(window[offset - start :][:BLOCK_BYTES])
        if header is None or header.sequence != sequence:
            return
        record = Record(header.chunk, offset, header.payload_bytes, header.kind)
        if record.end > size_bytes:
            return
        yield record
        offset = record.end
