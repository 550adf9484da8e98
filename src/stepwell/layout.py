"""What makes two engines' bytes interchangeable, as a fingerprint.

Everything is encoded injectively (typed, length-prefixed fields, never concatenated strings), so two
different descriptions cannot have equal encodings, and so, with SHA-256, no equal fingerprints.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from stepwell.types import SPACE_ID_BYTES, SpaceId, SpaceSpec

Field: TypeAlias = "bool | int | float | str | bytes | Sequence[Field] | Mapping[str, Field] | None"


def encode(value: Field) -> bytes:
    """Encode a value so that different values have different encodings, types included.

    Strings are taken as they are (NFC and NFD differ); a mapping is an unordered set of fields, a list
    and a tuple are the same sequence. Raises TypeError for any other type.
    """
    match value:
        case None:
            return _frame(b"n", b"")
        case bool():
            return _frame(b"b", bytes([value]))
        case int():
            return _frame(b"i", str(value).encode())
        case float():
            return _frame(b"f", struct.pack("<d", value))
        case str():
            return _frame(b"s", value.encode("utf-8", "surrogatepass"))
        case bytes():
            return _frame(b"y", value)
        case Mapping():
            pairs = sorted(encode(name) + encode(field) for name, field in value.items())
            return _frame(b"m", b"".join(pairs))
        case Sequence():
            return _frame(b"l", b"".join(encode(item) for item in value))
        case _:
            raise TypeError(f"a {type(value).__name__} cannot be part of a fingerprint: {value!r}")


def _frame(tag: bytes, payload: bytes) -> bytes:
    return tag + len(payload).to_bytes(8, "little") + payload


def fingerprint(value: Field) -> bytes:
    """32 bytes that differ whenever `value` differs."""
    return hashlib.sha256(b"stepwell.fingerprint.1" + encode(value)).digest()


def space_id(spec: SpaceSpec) -> SpaceId:
    """The space's name in every server and tier."""
    parts = (spec.fingerprint, spec.chunk_tokens, spec.chunk_bytes)
    return fingerprint(("space", parts))[:SPACE_ID_BYTES]


class EngineSpace(msgspec.Struct, frozen=True):
    """All that decides whether another engine may use the bytes that this one computed."""

    engine: str  # "vllm"
    engine_version: str
    model_config: str  # the resolved config as JSON with sorted names: RoPE, shapes, quantisation, overrides
    weights: bytes  # digest of the weight files' content
    adapter: bytes | None  # digest of the adapter's files, None for the bare model
    kv_dtype: str  # resolved, never "auto"
    block_tokens: int
    chunk_blocks: int
    worker_layouts: tuple[bytes, ...]  # one digest a rank: layers, shapes, strides, dtypes, packing
    key_seed: bytes  # what the engine's hash chain starts from
    key_algorithm: str
    tensor_parallel: int
    pipeline_parallel: int
    salt: str | None = None  # keeps tenants apart where the engine's own salt does not
    generation: bytes = b""  # of an engine whose cache was reset: its weights may be no file's any more

    def fingerprint(self) -> bytes:
        """32 bytes; equal only for engines whose bytes are interchangeable."""
        return fingerprint(msgspec.structs.asdict(self))


def chunk_blocks(block_bytes: int, chunk_bytes_at_least: int = 1 << 20) -> int:
    """How many blocks make a chunk: the fewest that reach 1 MiB, or one.

    Below 1 MiB a transfer pays more for its start than for its bytes on every tier we know
    (published load bandwidth by size: 64 KB 4 Gb/s, 1 MB 30, 16 MB and up 49, LMCache report).
    """
    return max(1, -(-chunk_bytes_at_least // block_bytes))
