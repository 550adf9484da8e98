"""What a cache of so many blocks hits: the server's own index and eviction, without time."""

from collections.abc import Sequence

import msgspec

from stepwell.policy.evict import make_evictor
from stepwell.policy.index import Index
from stepwell.replay.traces.row import Trace
from stepwell.types import ChunkId


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
        _store(index, run, held, capacity_blocks)
    return hits


def _store(index: Index, run: Sequence[ChunkId], held: int, capacity_blocks: int) -> None:
    last = index.get(run[held - 1]) if held else None
    if last is not None:
        index.pin(last)
    for chunk in run[held:]:
        # What was stored for this very request must not make room for the rest of it.
        if len(index) >= capacity_blocks and index.evict() is None:
            break
        parent, last = last, index.insert(chunk, last.chunk if last else None, 0)
        index.pin(last)
        if parent is not None:
            index.unpin(parent)
    if last is not None:
        index.unpin(last)
