"""From names and texts, as people write them, to a `SimSpec`."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from stepwell.replay.facts.config import read_config
from stepwell.replay.facts.tables import FactError, Gpu, Model, TierFact, pick, table
from stepwell.replay.shape import weight_bytes
from stepwell.replay.sim.spec import EngineSpec, SimSpec, TierSpec
from stepwell.sizes import parse_duration, parse_rate, parse_size

_FREE_SHARE = 0.3  # of GPU memory beside the weights, at least, where the number of GPUs is ours to choose


class Hardware(msgspec.Struct, frozen=True):
    """What is asked for."""

    model: str  # a known name, or the path of a config.json
    gpu: str
    gpus: int | None = None  # a replica; None: the fewest (1, 2, 4, ...) that leave room for a cache
    engines: int = 1
    tiers: tuple[str, ...] = ()
    eviction: str = "lru"
    facts: Path | None = None  # a user's own over ours
    peak_share: float | None = None
    bandwidth_share: float | None = None


def build(hardware: Hardware, block_tokens: int) -> SimSpec:
    """Raises FactError for what is not known or cannot be."""
    model = _model(hardware)
    gpu = pick(table(Gpu, hardware.facts), hardware.gpu, "GPU")
    if hardware.engines < 1:
        raise FactError(f"there must be at least 1 engine, not {hardware.engines}")
    if hardware.gpus is not None and hardware.gpus < 1:
        raise FactError(f"a replica needs at least 1 GPU, not {hardware.gpus}")
    shares = {"peak_share": hardware.peak_share, "bandwidth_share": hardware.bandwidth_share}
    for name, share in shares.items():
        if share is not None and not 0 < share <= 1:
            raise FactError(f"{name.replace('_', '-')} is {share}; it must be above 0 and at most 1")
    engine = EngineSpec(
        model=model,
        gpu=gpu,
        gpus=hardware.gpus or _fewest_gpus(model, gpu),
        block_tokens=block_tokens,
        names=(hardware.model, hardware.gpu),
    )
    engine = msgspec.structs.replace(engine, **{name: share for name, share in shares.items() if share})
    if engine.gpu_blocks < 1:
        raise FactError(
            f"{hardware.model} leaves no room for its cache on {engine.gpus} x {hardware.gpu}: "
            f"use more GPUs a replica"
        )
    return SimSpec(engine, hardware.engines, parse_tiers(hardware.tiers, hardware.facts), hardware.eviction)


def parse_tiers(texts: Sequence[str], facts: Path | None) -> tuple[TierSpec, ...]:
    """`NAME=SIZE[@RATE[@LATENCY]]` each: memory first, then slower ones. Raises FactError."""
    known = table(TierFact, facts)
    tiers = tuple(_parse_tier(text, known) for text in texts)
    if tiers and tiers[0].name != "memory":
        raise FactError("the first --tier must be memory: engines load from there, whatever lies below")
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise FactError(f"--tier {name} is given twice")
    return tiers


def _parse_tier(text: str, known: dict[str, TierFact]) -> TierSpec:
    name, equals, rest = text.partition("=")
    parts = rest.split("@")
    if not equals or len(parts) > 3:
        raise FactError(f"--tier {text!r}: write NAME=SIZE, NAME=SIZE@RATE or NAME=SIZE@RATE@LATENCY")
    fact = pick(known, name.strip(), "tier")
    try:
        read = write = parse_rate(parts[1]) if len(parts) > 1 else 0
        return TierSpec(
            name=name.strip().lower(),
            size_bytes=parse_size(parts[0]),
            read_bytes_per_s=read or 1e9 * fact.read_gb_per_s,
            write_bytes_per_s=write or 1e9 * fact.write_gb_per_s,
            latency_s=parse_duration(parts[2]) if len(parts) > 2 else 1e-6 * fact.latency_us,
            usd_per_gib_month=fact.usd_per_gib_month,
        )
    except ValueError as error:
        raise FactError(f"--tier {text!r}: {error}") from error


def _model(hardware: Hardware) -> Model:
    if hardware.model.endswith(".json"):
        return read_config(Path(hardware.model))
    return pick(table(Model, hardware.facts), hardware.model, "model")


def _fewest_gpus(model: Model, gpu: Gpu) -> int:
    gpus = 1
    while weight_bytes(model) > (1 - _FREE_SHARE) * gpu.memory_gib * 2**30 * gpus:
        gpus *= 2
    return gpus
