"""The header of a chunk outside memory: what it is, and checksums of itself and of the bytes that follow.

A header is believed only whole: magic, version and its own checksum first, then what the reader asked for.
Checksums are XXH3-128 (Collet, xxhash.com), which finds damage; it keeps nobody out who can write here.
"""

import struct
from enum import IntEnum

import msgspec
import xxhash

from stepwell.types import ChunkId

HEADER_BYTES = 128
_VERSION = 1
_MAGIC = b"STEPWELL"
_FIELDS = struct.Struct("<8sHHI48sQQ16s")  # magic, version, kind, codec, chunk, sequence, bytes, digest
_DIGEST_BYTES = 16
_PADDING = bytes(HEADER_BYTES - _FIELDS.size - _DIGEST_BYTES)


class Kind(IntEnum):
    """What a header announces."""

    CHUNK = 0
    CLEAR_SPACE = 1  # forget what was written before of the space in the chunk id
    CLEAR_ALL = 2


_KINDS = {kind.value for kind in Kind}


class Header(msgspec.Struct, frozen=True):
    """What stands before a chunk's bytes."""

    chunk: ChunkId  # space and full key
    sequence: int  # of the place it was written to: what is left of an earlier use of that place has another
    payload_bytes: int
    payload_digest: bytes
    kind: Kind = Kind.CHUNK
    codec: int = 0  # 0: the bytes as the engine gave them


def digest(payload: memoryview | bytes | bytearray) -> bytes:
    """16 bytes, the XXH3-128 of the payload. Lets go of the interpreter lock where that is worth it."""
    return xxhash.xxh3_128_digest(payload)


def pack(header: Header) -> bytes:
    """`HEADER_BYTES` bytes."""
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        header.kind,
        header.codec,
        header.chunk,
        header.sequence,
        header.payload_bytes,
        header.payload_digest,
    )
    return fields + _PADDING + digest(fields)


def unpack(data: memoryview | bytes | bytearray) -> Header | None:
    """The inverse of `pack`; None for anything that is not exactly such a header."""
    if len(data) < HEADER_BYTES:
        return None
    fields = bytes(data[: _FIELDS.size])
    if bytes(data[_FIELDS.size : HEADER_BYTES]) != _PADDING + digest(fields):
        return None
    magic, version, kind, codec, chunk, sequence, payload_bytes, payload_digest = _FIELDS.unpack(fields)
    if magic != _MAGIC or version != _VERSION or kind not in _KINDS:
        return None
    return Header(chunk, sequence, payload_bytes, payload_digest, Kind(kind), codec)
