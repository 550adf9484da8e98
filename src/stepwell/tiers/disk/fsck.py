"""A look at a disk tier's folder while no server uses it: what is there, and whether it is whole."""

import os
from collections import Counter
from pathlib import Path

import msgspec

from stepwell.codec import frame
from stepwell.codec.frame import Kind
from stepwell.tiers.disk.blocks import BLOCK_BYTES, aligned, blocks_bytes, open_blocks, read_all
from stepwell.tiers.disk.folder import own_folder, segment_files
from stepwell.tiers.disk.segment import Record, read_records, read_sequence
from stepwell.types import SPACE_ID_BYTES


class FolderReport(msgspec.Struct, frozen=True):
    """What `check` found."""

    segments: int  # with a valid header
    empty_files: int  # without one: kept for what comes
    file_bytes: int  # of all of them
    records: int  # chunks, older copies included
    chunk_bytes: int
    chunks_by_space: dict[str, int]  # the newest copy of each, by the space's id in hexadecimal
    cleared: int  # notes that something was cleared
    damaged: list[str]  # each damaged record, in words


def check(folder: Path) -> FolderReport:
    """Read every record and check it.

    Raises FolderInUse, DiskError for a folder that cannot be used, OSError where the drive fails.
    """
    lock = own_folder(folder)
    try:
        return _check(folder)
    finally:
        os.close(lock)


def _check(folder: Path) -> FolderReport:
    counts: Counter[str] = Counter()
    newest: dict[bytes, tuple[int, int]] = {}
    damaged: list[str] = []
    for _, path in sorted(segment_files(folder).items()):
        fd, _ = open_blocks(path, create=False, direct=True)
        try:
            counts["bytes"] += os.fstat(fd).st_size
            sequence = read_sequence(fd)
            if sequence is None:
                counts["empty"] += 1
                continue
            counts["segments"] += 1
            for record in read_records(fd, sequence)[0]:
                if record.kind is not Kind.CHUNK:
                    counts["cleared"] += 1
                elif (why := _damage(fd, sequence, record)) is not None:
                    damaged.append(f"{path.name} at {record.offset}: chunk {record.chunk.hex()}: {why}")
                else:
                    counts["records"] += 1
                    counts["chunk bytes"] += record.payload_bytes
                    newest[record.chunk] = (sequence, record.offset)
        finally:
            os.close(fd)
    spaces = Counter(chunk[:SPACE_ID_BYTES].hex() for chunk in newest)
    return FolderReport(
        segments=counts["segments"],
        empty_files=counts["empty"],
        file_bytes=counts["bytes"],
        records=counts["records"],
        chunk_bytes=counts["chunk bytes"],
        chunks_by_space=dict(spaces),
        cleared=counts["cleared"],
        damaged=damaged,
    )


def _damage(fd: int, sequence: int, record: Record) -> str | None:
    data = aligned(BLOCK_BYTES + blocks_bytes(record.payload_bytes))
    try:
        read_all(fd, record.offset, [data])
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    header = frame.unpack(data)
    if header is None or header.sequence != sequence or header.chunk != record.chunk:
        return "its header is not the one that the table names"
    payload = data[BLOCK_BYTES : BLOCK_BYTES + record.payload_bytes]
    if header.payload_bytes != record.payload_bytes or frame.digest(payload) != header.payload_digest:
        return "its bytes fail their checksum"
    return None
