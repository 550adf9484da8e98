"""The cheapest tiers and engines that meet a target, among sizes that are sold."""

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from stepwell.replay.report.target import Target, fewest_engines
from stepwell.replay.sim.spec import SimSpec, TierSpec
from stepwell.replay.traces.row import Trace

_GIB = 1 << 30
MEMORY_BYTES = tuple(size * _GIB for size in (64, 256, 1_024))
BELOW_BYTES = tuple(size * _GIB for size in (1_024, 4_096, 16_384))
_HOURS_A_MONTH = 730.0


class Candidate(msgspec.Struct, frozen=True):
    """Engines and tiers that meet the target, and their price."""

    tiers: tuple[TierSpec, ...]
    engines: int
    gpus: int
    gpus_usd_per_hour: float
    tiers_usd_per_hour: float

    @property
    def usd_per_hour(self) -> float:
        return self.gpus_usd_per_hour + self.tiers_usd_per_hour

    @property
    def name(self) -> str:
        """As in "2 engines, memory 256 GiB, disk 4096 GiB"."""
        sizes = [f"{tier.name} {tier.size_bytes / _GIB:g} GiB" for tier in self.tiers]
        return ", ".join([f"{self.engines} engines", *(sizes or ["no tiers"])])


class Plan(msgspec.Struct, frozen=True):
    """What was found, the cheapest first."""

    target: Target
    requests: int
    budget_usd_per_hour: float | None
    candidates: list[Candidate]  # that meet target and budget
    over_budget: int  # met the target, and cost more
    tried: int


def make_plan(
    trace: Trace, spec: SimSpec, below: Sequence[TierSpec], target: Target, budget_usd_per_hour: float | None
) -> Plan:
    """Tries no tiers, memory alone, and memory with each of `below`, in several sizes of each.

    `spec.tiers[0]` is memory: its rates are kept, its size is not. At equal prices fewer tiers come first.
    """
    engine = spec.engine
    found: list[Candidate] = []
    tried = 0
    for tiers in _choices(spec.tiers[0], below):
        tried += 1
        engines = fewest_engines(trace, msgspec.structs.replace(spec, tiers=tiers), target)
        if engines is None:
            continue
        usd = sum(tier.size_bytes / _GIB * tier.usd_per_gib_month / _HOURS_A_MONTH for tier in tiers)
        gpus = engines * engine.gpus
        found.append(Candidate(tiers, engines, gpus, gpus * engine.gpu.usd_per_hour, usd))
    found.sort(key=lambda each: (each.usd_per_hour, len(each.tiers)))
    within = [
        each for each in found if budget_usd_per_hour is None or each.usd_per_hour <= budget_usd_per_hour
    ]
    return Plan(target, len(trace.rows), budget_usd_per_hour, within, len(found) - len(within), tried)


def _choices(memory: TierSpec, below: Sequence[TierSpec]) -> Iterator[tuple[TierSpec, ...]]:
    yield ()
    for memory_bytes in MEMORY_BYTES:
        first = msgspec.structs.replace(memory, size_bytes=memory_bytes)
        yield (first,)
        for tier, size_bytes in itertools.product(below, BELOW_BYTES):
            yield first, msgspec.structs.replace(tier, size_bytes=size_bytes)
