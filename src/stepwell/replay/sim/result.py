"""What a simulation gives."""

from collections.abc import Sequence

import msgspec

from stepwell.replay.sim.job import Job

PERCENTILES = (50, 90, 95, 99)


class Served(msgspec.Struct, frozen=True):
    """One request that ended. gpu + memory + slow + computed = prompt tokens, always."""

    number: int
    prompt_tokens: int
    gpu_tokens: int
    memory_tokens: int
    slow_tokens: dict[str, int]
    computed_tokens: int
    output_tokens: int
    ttft_s: float
    total_s: float

    @classmethod
    def of(cls, job: Job, block_tokens: int) -> "Served":
        """Of a job that has ended. Where every block is held, the token that is computed is no hit."""
        by_tier = {"gpu": job.gpu_blocks, "memory": job.memory_blocks, **job.slow_blocks}
        tokens = {tier: blocks * block_tokens for tier, blocks in by_tier.items()}
        over = sum(tokens.values()) + job.computed_tokens - job.prompt_tokens
        last = max((tier for tier in tokens if tokens[tier]), default="gpu")
        tokens[last] -= over
        return cls(
            number=job.number,
            prompt_tokens=job.prompt_tokens,
            gpu_tokens=tokens.pop("gpu"),
            memory_tokens=tokens.pop("memory"),
            slow_tokens=tokens,
            computed_tokens=job.computed_tokens,
            output_tokens=job.output_tokens,
            ttft_s=job.first_token_s - job.arrival_s,
            total_s=job.end_s - job.arrival_s,
        )


class TierUse(msgspec.Struct, frozen=True):
    """What one tier did for all engines."""

    name: str
    blocks: int  # held at the end
    read_bytes: float
    read_busy_s: float
    written_bytes: float
    dropped_blocks: int  # not written, for too much was waiting


class SimResult(msgspec.Struct, frozen=True):
    """Figures of all requests."""

    requests: int
    refused: int  # longer than GPU memory
    span_s: float  # to the end of the last
    prompt_tokens: int
    output_tokens: int
    hit_tokens: dict[str, int]  # by where they came from
    computed_tokens: int
    hit_rate_tokens: float
    ttft_s: dict[str, float]  # mean, p50, ...; empty without requests
    total_s: dict[str, float]
    output_tokens_per_s: float
    busy_share: float  # of the span, of engines on average
    tiers: list[TierUse]


def summarize(
    served: Sequence[Served], refused: int, span_s: float, busy_s: float, tiers: list[TierUse]
) -> SimResult:
    """Of all that ended."""
    hits = {"gpu": 0} | {tier.name: 0 for tier in tiers}
    for each in served:
        hits["gpu"] += each.gpu_tokens
        if each.memory_tokens:
            hits["memory"] += each.memory_tokens
        for tier, tokens in each.slow_tokens.items():
            hits[tier] += tokens
    prompt_tokens = sum(each.prompt_tokens for each in served)
    output_tokens = sum(each.output_tokens for each in served)
    return SimResult(
        requests=len(served),
        refused=refused,
        span_s=span_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        hit_tokens=hits,
        computed_tokens=sum(each.computed_tokens for each in served),
        hit_rate_tokens=sum(hits.values()) / prompt_tokens if prompt_tokens else 0.0,
        ttft_s=_spread([each.ttft_s for each in served]),
        total_s=_spread([each.total_s for each in served]),
        output_tokens_per_s=output_tokens / span_s if span_s else 0.0,
        busy_share=busy_s / span_s if span_s else 0.0,
        tiers=tiers,
    )


def _spread(values: list[float]) -> dict[str, float]:
    """Mean, and percentiles by nearest rank."""
    if not values:
        return {}
    values.sort()
    spread = {"mean": sum(values) / len(values)}
    for percent in PERCENTILES:
        spread[f"p{percent}"] = values[-(-percent * len(values) // 100) - 1]
    return spread
