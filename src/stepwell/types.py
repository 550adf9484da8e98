"""Frozen structs that everything passes around, and the words for them.

A *chunk* is the unit of every tier; a *key* names it by all tokens from the start of the prompt; a
*space* holds what makes two engines' bytes interchangeable. See docs/tour.md.
"""

from enum import StrEnum
from typing import TypeAlias

import msgspec

KEY_BYTES = 32

Key: TypeAlias = bytes
"""32 bytes naming a chunk by all the tokens from the start of the prompt to the chunk's end."""

SPACE_ID_BYTES = 16

SpaceId: TypeAlias = bytes
"""16 bytes naming a space: the beginning of the SHA-256 of its `SpaceSpec`."""

ChunkId: TypeAlias = bytes
"""A key inside its space: the space's id, then the key. The same in every server and every tier."""


class Reason(StrEnum):
    """Why a chunk was not served, or not stored. The set is small and fixed: it labels metrics."""

    TOO_SHORT = "too_short"  # the prompt has no whole chunk
    NOT_HELD = "not_held"  # no tier has it
    TOO_SLOW = "too_slow"  # it did not reach memory before the deadline, or the tier cannot keep up
    NO_ROOM = "no_room"  # everything else in the tier is pinned, or it is larger than the tier
    NO_PARENT = "no_parent"  # the chunk before it is not held, so it could never be found
    ABANDONED = "abandoned"  # reserved, but its writer gave up or went away
    CORRUPT = "corrupt"  # its bytes failed their check
    OUT_OF_SERVICE = "out_of_service"  # the tier failed or stalled and is tried again later
    NO_SERVER = "no_server"  # the cache server did not answer in time
    NO_WORKER = "no_worker"  # not every worker of the engine has mapped the arena yet
    UNSUPPORTED = "unsupported"  # this model's cache layout cannot be served yet
    BYPASSED = "bypassed"  # the request asked for no cache (prompt log-probabilities)
    IN_DOUBT = (
        "in_doubt"  # files changed under the running engine, or what it computes differs from what is held
    )


class SpaceSpec(msgspec.Struct, frozen=True):
    """A space as its users describe it; equal specs share chunks, others never meet."""

    fingerprint: bytes  # 32 bytes, see stepwell.layout
    chunk_tokens: int
    chunk_bytes: int


class Hit(msgspec.Struct, frozen=True):
    """How much of a prompt is held."""

    chunks: int  # leading chunks held, in whatever tier
    tiers: tuple[str, ...]  # where each of them is, the fastest tier that has it


class TierStats(msgspec.Struct, frozen=True):
    """What one tier holds and has done since the server started."""

    chunks: int
    used_bytes: int
    limit_bytes: int
    pinned_chunks: int
    loaded_chunks: int
    stored_chunks: int
    evicted_chunks: int
    queued_chunks: int = 0  # waiting to be written to it
    damaged_chunks: int = 0  # dropped because a check of their bytes failed
    health: str = "ok"  # or in a few words why it is out of service
    read_latency_s: float = 0.0  # what its reads cost, as far as the last ones tell; 0: it has no price
    read_bytes_per_s: float = 0.0


class RequestStats(msgspec.Struct, frozen=True):
    """Prompt tokens of engines' requests; engine_hit + stepwell_hit + computed = prompt, always."""

    requests: int = 0
    prompt_tokens: int = 0
    engine_hit_tokens: int = 0
    stepwell_hit_tokens: int = 0
    computed_tokens: int = 0

    def plus(self, other: "RequestStats") -> "RequestStats":
        """Field by field."""
        return RequestStats(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            engine_hit_tokens=self.engine_hit_tokens + other.engine_hit_tokens,
            stepwell_hit_tokens=self.stepwell_hit_tokens + other.stepwell_hit_tokens,
            computed_tokens=self.computed_tokens + other.computed_tokens,
        )


class CacheStats(msgspec.Struct, frozen=True):
    """One server's counters, as `/stats` and `cache.stats()` give them."""

    version: str
    server_id: str
    uptime_s: float
    sessions: int
    spaces: int
    leases: int
    reservations: int
    lookups: int
    hit_chunks: int
    missed: dict[Reason, int]  # chunks asked for and not served
    dropped: dict[Reason, int]  # chunks offered and not stored
    requests: RequestStats
    tiers: dict[str, TierStats]
    checked_chunks: int = 0  # computed again though they were held, and compared
    differing_chunks: int = 0  # of those, the ones that were not what was held
    closed_spaces: int = 0  # in which too many differed
