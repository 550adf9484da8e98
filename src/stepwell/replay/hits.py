"""What a cache of so many blocks hits: the server's own index and eviction, without time."""

import msgspec

from stepwell.policy.evict import make_evictor
from stepwell.policy.index import Index
from stepwell.replay.store import insert_run
from stepwell.replay.traces.row import Trace


class Hits(msgspec.Struct, frozen=True):
    """One policy at one capacity."""

    policy: str
    capacity_blocks: int
    asked_blocks: int
    hit_blocks: int
    hit_rate_blocks: float  # 0 where nothing was asked for

    @classmethod
    def of(cls, policy: str, capacity_blocks: int, asked_blocks: int, hit_blocks: int) -> "Hits":
        """With their rate."""
        rate = hit_blocks / asked_blocks if asked_blocks else 0.0
        return cls(policy, capacity_blocks, asked_blocks, hit_blocks, rate)


def policy_hits(trace: Trace, policy: str, capacity_blocks: int) -> list[int]:
    """Leading blocks held of each request, in order.

    A request looks up its run, uses what is held, and stores the rest as far as there is room beside
    itself, as the server does it. Raises ValueError for an unknown policy.
    """
    chunks = [block.to_bytes(8, "big") for block in range(trace.blocks)]
    index = Index(make_evictor(policy))
    hits = []
    for row in trace.rows:
        run = [chunks[block] for block in row.blocks]
        held = index.held_run(run)
        hits.append(held)
        index.use(run[:held])
        insert_run(index, run, held, len(run), capacity_blocks=capacity_blocks)
    return hits
