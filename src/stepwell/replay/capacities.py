"""Hits of policies over capacities: each by the cheapest way that is exact."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from stepwell.replay.belady import belady_hits
from stepwell.replay.hits import Hits, policy_hits
from stepwell.replay.optimum import optimal_hits
from stepwell.replay.stack import lru_curve, sampled_lru_curve
from stepwell.replay.traces.row import Trace

Policy: TypeAlias = Literal["lru", "fifo", "s3fifo", "belady", "optimum"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


def hits_over_capacities(
    trace: Trace, policy: Policy, capacities: Sequence[int], sample: float = 1.0
) -> list[Hits]:
    """One entry a capacity, in their order. `sample` below 1 estimates, for lru alone: ValueError else."""
    if sample != 1 and policy != "lru":
        raise ValueError(f"{policy} cannot be sampled, only lru: its blocks do not act on each other")
    asked = trace.asked_blocks
    if policy == "lru":
        curve = lru_curve(trace) if sample == 1 else sampled_lru_curve(trace, sample)
        return [Hits.of(policy, capacity, asked, curve.hit_blocks(capacity)) for capacity in capacities]
    found = []
    for capacity in capacities:
        if policy == "belady":
            hits = belady_hits(trace, capacity)
        elif policy == "optimum":
            hits = optimal_hits(trace, capacity)
        else:
            hits = policy_hits(trace, policy, capacity)
        found.append(Hits.of(policy, capacity, asked, sum(hits)))
    return found
