"""Small engines, tiers and traces with figures that are easy to compute by hand."""

from collections.abc import Sequence

from stepwell.replay.facts.tables import Gpu, Model
from stepwell.replay.sim.spec import EngineSpec, TierSpec
from stepwell.replay.traces.prefixes import Prefixes
from stepwell.replay.traces.row import Row, Trace

BLOCK_TOKENS = 16
# 1e9 parameters, attention for free (no dimension to speak of): 2e9 operations a token; 1 KiB of KV a token.
MODEL = Model(
    layers=1,
    attention="gqa",
    attention_dim=1,
    kv_heads=1,
    kv_head_dim=256,
    parameters_billion=1,
    active_billion=1,
    source="made up",
    date="2026",
)
GPU = Gpu(
    bf16_tflop_per_s=4,
    memory_gib=4,
    memory_gb_per_s=100,
    host_gb_per_s=1,
    usd_per_hour=1,
    source="made up",
    date="2026",
)
# A token of a prompt takes 1 ms, weights take 20 ms to read: a step of fewer than 20 tokens takes 20 ms.
TOKEN_S = 1e-3
STEP_S = 20e-3
BLOCK_BYTES = 1024 * BLOCK_TOKENS


def engine(gpu_blocks: int = 10_000, **changes: float) -> EngineSpec:
    """With so much GPU memory that its cache has `gpu_blocks`."""
    memory_gib = (2e9 + (gpu_blocks + 0.5) * BLOCK_BYTES) / 2**30
    fields = {
        "peak_share": 0.5,
        "bandwidth_share": 1.0,
        "step_overhead_s": 0.0,
        "memory_share": 1.0,
    } | changes
    gpu = Gpu(**{name: getattr(GPU, name) for name in GPU.__struct_fields__} | {"memory_gib": memory_gib})
    return EngineSpec(MODEL, gpu, 1, BLOCK_TOKENS, **fields)


def tier(name: str, blocks: int, bytes_per_s: float = 1e12, latency_s: float = 0.0) -> TierSpec:
    return TierSpec(name, blocks * BLOCK_BYTES, bytes_per_s, bytes_per_s, latency_s)


def trace_of(
    requests: Sequence[tuple[float, Sequence[int]]], output_tokens: int = 1, tail_tokens: int = 0
) -> Trace:
    """From (arrival, ids of whole blocks)."""
    prefixes = Prefixes()
    rows = tuple(
        Row(at, BLOCK_TOKENS * len(ids) + tail_tokens, output_tokens, number, prefixes.path("", ids))
        for number, (at, ids) in enumerate(requests)
    )
    return Trace(rows, BLOCK_TOKENS, len(prefixes), (), 0, ())
