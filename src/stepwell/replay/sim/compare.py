"""The same trace on the same engines, with the tiers and without."""

import msgspec

from stepwell.replay.sim.result import SimResult
from stepwell.replay.sim.simulate import simulate
from stepwell.replay.sim.spec import SimSpec, TierSpec
from stepwell.replay.traces.row import Trace


class Comparison(msgspec.Struct, frozen=True):
    """Both sides, and what they ran on."""

    model: str
    gpu: str
    gpus_per_engine: int
    gpu_blocks: int  # cache of one engine
    block_bytes: float
    engines: int
    tiers: tuple[TierSpec, ...]
    eviction: str
    sources: dict[str, str]  # of the facts
    without: SimResult
    with_tiers: SimResult | None  # None: no tiers were named
    ttft_ratio: float | None  # mean without / mean with
    computed_ratio: float | None  # prompt tokens computed without / with


def compare(trace: Trace, spec: SimSpec) -> Comparison:
    """Raises SimError."""
    without = simulate(trace, msgspec.structs.replace(spec, tiers=()))
    with_tiers = simulate(trace, spec) if spec.tiers else None
    engine = spec.engine
    ttft_ratio = computed_ratio = None
    if with_tiers is not None and with_tiers.requests:
        ttft_ratio = without.ttft_s["mean"] / with_tiers.ttft_s["mean"]
        computed_ratio = without.computed_tokens / with_tiers.computed_tokens
    return Comparison(
        model=engine.names[0],
        gpu=engine.names[1],
        gpus_per_engine=engine.gpus,
        gpu_blocks=engine.gpu_blocks,
        block_bytes=engine.block_bytes,
        engines=spec.engines,
        tiers=spec.tiers,
        eviction=spec.eviction,
        sources={
            "model": f"{engine.model.source}, {engine.model.date}",
            "gpu": f"{engine.gpu.source}, {engine.gpu.date}",
        },
        without=without,
        with_tiers=with_tiers,
        ttft_ratio=ttft_ratio,
        computed_ratio=computed_ratio,
    )
