"""Every figure of the report, section by section."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from stepwell.replay.capacities import Policy, hits_over_capacities
from stepwell.replay.facts.tables import Price, table
from stepwell.replay.hits import Hits
from stepwell.replay.report.scale import denser, head
from stepwell.replay.report.target import Target, fewest_engines
from stepwell.replay.report.truncate import Truncated, truncation
from stepwell.replay.report.verdict import Verdict, decide
from stepwell.replay.shape import break_even_bytes_per_s
from stepwell.replay.sim.compare import Comparison, compare
from stepwell.replay.sim.simulate import simulate
from stepwell.replay.sim.spec import SimSpec
from stepwell.replay.traces.row import Trace
from stepwell.replay.traces.summary import Summary, summarize

CONTEXTS = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
WINDOWS = (131_072, 65_536, 32_768, 16_384, 8_192, 4_096)
ENGINES_ON_A_LINK = (1, 2, 4, 8)
LRU_CAPACITIES = 20
_HOURS_A_MONTH = 730.0


class Ceiling(msgspec.Struct, frozen=True):
    """1. What an infinite cache hits."""

    hit_rate_blocks: float
    hit_rate_tokens: float
    throughput_bound: float | None  # 1 / (1 - hit rate) where prefill limits; None: no bound
    verdicts: list[Verdict]


class Curves(msgspec.Struct, frozen=True):
    """2. Hit rate against capacity."""

    hits: list[Hits]
    tier_blocks: dict[str, int]  # capacity of each tier, the GPU's included
    verdicts: list[Verdict]


class Sources(msgspec.Struct, frozen=True):
    """3. Where each hit came from."""

    comparison: Comparison
    verdicts: list[Verdict]


class BreakEven(msgspec.Struct, frozen=True):
    """4. The bandwidth an engine needs, so that loading a prompt beats computing it."""

    context_tokens: list[int]
    bytes_per_s: list[float]
    tier_bytes_per_s: dict[str, float]
    pays_from_tokens: dict[str, int | None]  # None: at none of these contexts
    verdicts: list[Verdict]


class Truncation(msgspec.Struct, frozen=True):
    """5. What is lost when clients keep the newest tokens only."""

    windows: list[Truncated]
    verdicts: list[Verdict]


class Congested(msgspec.Struct, frozen=True):
    """So many engines on one set of tiers, each with the same load."""

    engines: int
    ttft_mean_s: float
    ttft_mean_without_s: float
    read_busy_share: dict[str, float]


class Congestion(msgspec.Struct, frozen=True):
    """6. Many engines on one link."""

    requests: int
    points: list[Congested]
    verdicts: list[Verdict]


class EngineCount(msgspec.Struct, frozen=True):
    """Engines that meet the target with some of the tiers."""

    tiers: list[str]
    engines: int | None


class Needed(msgspec.Struct, frozen=True):
    """7. GPUs for the same latency."""

    target: Target
    requests: int
    gpus_per_engine: int
    counts: list[EngineCount]  # none, then one tier more each
    computed_ratio: float | None  # prompt tokens computed without / with
    bound: float | None  # 1 / (1 - h), of the tokens hit with the tiers
    verdicts: list[Verdict]


class Money(msgspec.Struct, frozen=True):
    """8. What it costs."""

    gpu_usd_per_hour_without: float | None
    gpu_usd_per_hour_with: float | None
    tiers_usd_per_hour: dict[str, float]
    usd_per_million_without: float | None  # prompt tokens
    usd_per_million_with: float | None
    cached_cost_factor: (
        float | None
    )  # a token's cost from the tiers over one's computed; None: no such tokens
    discounts: dict[str, float]  # what providers ask for a cached token, as a factor
    verdicts: list[Verdict]


class Swing(msgspec.Struct, frozen=True):
    """One input halved and doubled."""

    name: str
    ttft_ratio_halved: float
    ttft_ratio_doubled: float


class Sensitivity(msgspec.Struct, frozen=True):
    """9. What the verdicts hang on."""

    requests: int
    ttft_ratio: float  # mean without tiers / with
    swings: list[Swing]  # the widest first
    verdicts: list[Verdict]


class Report(msgspec.Struct, frozen=True):
    """Everything; `--json` writes it as it is."""

    summary: Summary
    model: str
    gpu: str
    engines: int
    gpus_per_engine: int
    facts: dict[str, str]
    ceiling: Ceiling
    curves: Curves
    sources: Sources
    break_even: BreakEven
    truncation: Truncation
    congestion: Congestion
    needed: Needed
    money: Money
    sensitivity: Sensitivity


SECTIONS = (
    "ceiling",
    "curves",
    "sources",
    "break_even",
    "truncation",
    "congestion",
    "needed",
    "money",
    "sensitivity",
)
"""The report's fields that end in verdicts, in order."""


def make_report(
    trace: Trace,
    spec: SimSpec,
    target: Target | None = None,
    *,
    sample_requests: int = 2_000,
    facts: Path | None = None,
) -> Report:
    """Needs a trace with prefixes and requests, and a `spec` with tiers. Raises SimError.

    The target, where none is named, is what the engines of `spec` reach without tiers. What is simulated many
    times (6, 7, 9) is so on the first `sample_requests` requests.
    """
    sample = head(trace, sample_requests)
    comparison = compare(trace, spec)
    if target is None:
        without = simulate(sample, msgspec.structs.replace(spec, tiers=()))
        target = Target("p95", without.ttft_s["p95"])
    needed = _needed(sample, spec, target)
    return Report(
        summary=summarize(trace),
        model=comparison.model,
        gpu=comparison.gpu,
        engines=spec.engines,
        gpus_per_engine=spec.engine.gpus,
        facts=comparison.sources,
        ceiling=_ceiling(trace),
        curves=_curves(trace, spec),
        sources=_sources(comparison),
        break_even=_break_even(spec),
        truncation=_truncation(trace),
        congestion=_congestion(sample, spec),
        needed=needed,
        money=_money(comparison, spec, needed, facts),
        sensitivity=_sensitivity(sample, spec),
    )


def _ceiling(trace: Trace) -> Ceiling:
    summary = summarize(trace)
    rate = truncation(trace, ())[0].hit_rate_tokens
    bound = 1 / (1 - rate) if rate < 1 else None
    return Ceiling(
        hit_rate_blocks=summary.ceiling_hit_rate_blocks or 0.0,
        hit_rate_tokens=rate,
        throughput_bound=bound,
        verdicts=[
            decide(
                "Caching gives 15 times the throughput",
                # Reaching the bound also takes a cache that costs nothing: this alone cannot confirm it.
                None if rate >= 14 / 15 else False,
                f"even an infinite, free cache hits {rate:.1%} of the tokens: at most {_times(bound)}",
                "possible from a hit rate of 93.3% on, where prefill is all that limits",
            )
        ],
    )


def _curves(trace: Trace, spec: SimSpec) -> Curves:
    most = max(trace.blocks, 2)
    capacities = sorted({round(most ** (step / LRU_CAPACITIES)) for step in range(8, LRU_CAPACITIES + 1)})
    few = capacities[4::4]
    hits = hits_over_capacities(trace, "lru", capacities)
    others: tuple[Policy, ...] = ("s3fifo", "fifo", "optimum")
    for policy in others:
        hits += hits_over_capacities(trace, policy, few)
    block_bytes = spec.engine.block_bytes
    tier_blocks = {"gpu": spec.engine.gpu_blocks * spec.engines}
    tier_blocks |= {tier.name: int(tier.size_bytes / block_bytes) for tier in spec.tiers}
    best = {each.capacity_blocks: each.hit_rate_blocks for each in hits if each.policy == "optimum"}
    lru = {each.capacity_blocks: each.hit_rate_blocks for each in hits if each.policy == "lru"}
    gap, where = max((best[capacity] - lru[capacity], capacity) for capacity in few)
    return Curves(
        hits=hits,
        tier_blocks=tier_blocks,
        verdicts=[
            decide(
                "LRU is good enough: no policy could gain more than 3 points",
                gap <= 0.03,
                f"the optimum is {100 * gap:.1f} points above LRU at {where:,} blocks",
                "turns where the largest gap over these capacities passes 3 points",
            )
        ],
    )


def _sources(comparison: Comparison) -> Sources:
    side = comparison.with_tiers
    verdicts = []
    if side is not None:
        for tier in comparison.tiers:
            tokens = side.hit_tokens.get(tier.name, 0)
            share = tokens / max(1, side.prompt_tokens)
            verdicts.append(
                decide(
                    f"The tier {tier.name} is worth having: it gives 1% of all prompt tokens or more",
                    share >= 0.01,
                    f"{share:.1%} of all prompt tokens came from it",
                    "turns at 1%",
                )
            )
    return Sources(comparison, verdicts)


def _break_even(spec: SimSpec) -> BreakEven:
    engine = spec.engine
    needs = [break_even_bytes_per_s(engine.model, context, engine.flop_per_s) for context in CONTEXTS]
    rates = {tier.name: min(tier.read_bytes_per_s, engine.host_bytes_per_s) for tier in spec.tiers}
    pays = {
        name: next((context for context, need in zip(CONTEXTS, needs, strict=True) if rate >= need), None)
        for name, rate in rates.items()
    }
    at_8k = dict(zip(CONTEXTS, needs, strict=True))[8_192]
    verdicts = [
        decide(
            f"Loading 8,192 tokens from {name} beats computing them, for one engine alone",
            rate >= at_8k,
            f"{name} gives {rate / 1e9:.2f} GB/s, {at_8k / 1e9:.2f} are needed",
            f"turns at {at_8k / 1e9:.2f} GB/s; at {rate / 1e9:.2f} GB/s it pays "
            + (f"from {pays[name]:,} tokens on" if pays[name] else "at none of these contexts"),
        )
        for name, rate in rates.items()
    ]
    return BreakEven(list(CONTEXTS), needs, rates, pays, verdicts)


def _truncation(trace: Trace) -> Truncation:
    windows = truncation(trace, WINDOWS)
    whole = windows[0].hit_rate_tokens
    halved = [each for each in windows[1:] if each.hit_rate_tokens <= whole / 2]
    largest = max((each.kept_tokens or 0 for each in halved), default=0)
    touched = max(each.truncated_requests for each in windows)
    return Truncation(
        windows,
        [
            decide(
                "Truncation halves the hit rate: keeping the newest 32,768 tokens",
                None if not touched or not whole else largest >= 32_768,
                f"{whole:.1%} untruncated, {_rate_at(windows, 32_768):.1%} with 32,768 tokens kept",
                f"halved when {largest:,} tokens or fewer are kept"
                if largest
                else "at none of these windows",
            )
        ],
    )


def _rate_at(windows: Iterable[Truncated], tokens: int) -> float:
    return next(each.hit_rate_tokens for each in windows if each.kept_tokens == tokens)


def _congestion(sample: Trace, spec: SimSpec) -> Congestion:
    points = []
    for engines in ENGINES_ON_A_LINK:
        traffic = denser(sample, engines / spec.engines)
        both = compare(traffic, msgspec.structs.replace(spec, engines=engines))
        side = both.with_tiers or both.without
        points.append(
            Congested(
                engines=engines,
                ttft_mean_s=side.ttft_s.get("mean", 0.0),
                ttft_mean_without_s=both.without.ttft_s.get("mean", 0.0),
                read_busy_share={
                    tier.name: tier.read_busy_s / side.span_s if side.span_s else 0.0 for tier in side.tiers
                },
            )
        )
    slower = [point.engines for point in points if point.ttft_mean_s > point.ttft_mean_without_s]
    verdict = decide(
        "The tiers never slow engines down, however many share them",
        not slower,
        "; ".join(
            f"{each.engines} engines: {each.ttft_mean_s:.2f} s with, {each.ttft_mean_without_s:.2f} s without"
            for each in points
        ),
        f"turns at {slower[0]} engines" if slower else f"does not turn up to {ENGINES_ON_A_LINK[-1]} engines",
    )
    return Congestion(len(sample.rows), points, [verdict])


def _needed(sample: Trace, spec: SimSpec, target: Target) -> Needed:
    counts = [
        EngineCount(
            [tier.name for tier in spec.tiers[:used]],
            fewest_engines(sample, msgspec.structs.replace(spec, tiers=spec.tiers[:used]), target),
        )
        for used in range(len(spec.tiers) + 1)
    ]
    both = compare(sample, spec)
    side = both.with_tiers or both.without
    bound = 1 / (1 - side.hit_rate_tokens) if side.hit_rate_tokens < 1 else None
    without, best = counts[0].engines, counts[-1].engines
    saved = None if without is None or best is None else 1 - best / without
    return Needed(
        target=target,
        requests=len(sample.rows),
        gpus_per_engine=spec.engine.gpus,
        counts=counts,
        computed_ratio=both.computed_ratio,
        bound=bound,
        verdicts=[
            decide(
                "87% fewer GPUs serve the same traffic at the same latency",
                None if saved is None else saved >= 0.87,
                "the target cannot be met"
                if saved is None
                else f"{saved:.0%} fewer: {without} to {best} engines",
                "takes a hit rate of 87% or more beyond the GPU's own cache, and prefill as all that limits",
            )
        ],
    )


def _money(comparison: Comparison, spec: SimSpec, needed: Needed, facts: Path | None) -> Money:
    engine = spec.engine
    engine_usd = engine.gpus * engine.gpu.usd_per_hour
    without, best = needed.counts[0].engines, needed.counts[-1].engines
    tiers = {
        tier.name: tier.size_bytes / 2**30 * tier.usd_per_gib_month / _HOURS_A_MONTH for tier in spec.tiers
    }
    million_per_hour = comparison.without.prompt_tokens / max(comparison.without.span_s, 1.0) * 3600 / 1e6
    gpu_without = None if without is None else without * engine_usd
    gpu_with = None if best is None else best * engine_usd
    saved = None if gpu_without is None or gpu_with is None else gpu_without - gpu_with
    tiers_usd = sum(tiers.values())
    factor = _cached_cost_factor(comparison, spec.engines * engine_usd, tiers_usd)
    return Money(
        gpu_usd_per_hour_without=gpu_without,
        gpu_usd_per_hour_with=gpu_with,
        tiers_usd_per_hour=tiers,
        usd_per_million_without=None if gpu_without is None else gpu_without / million_per_hour,
        usd_per_million_with=None if gpu_with is None else (gpu_with + tiers_usd) / million_per_hour,
        cached_cost_factor=factor,
        discounts={name: price.cache_read_factor for name, price in table(Price, facts).items()},
        verdicts=[
            decide(
                "The tiers pay for themselves",
                None if saved is None else saved > tiers_usd,
                "the target cannot be met"
                if saved is None
                else f"{saved:.2f} USD an hour of GPUs saved, {tiers_usd:.2f} USD an hour for tiers",
                f"turns where the tiers cost {max(0.0, saved or 0.0):.2f} USD an hour",
            ),
            decide(
                "Cached tokens can be sold at a tenth of the price",
                None if factor is None else factor <= 0.1,
                "nothing came from the tiers"
                if factor is None
                else f"a token from the tiers costs {factor:.3f} of a computed one",
                "turns at a factor of 0.1",
            ),
        ],
    )


def _cached_cost_factor(
    comparison: Comparison, engines_usd_per_hour: float, tiers_usd_per_hour: float
) -> float | None:
    """Both per token, all of an engine's time put down to prompts: where decodes take most, it is higher."""
    side = comparison.with_tiers
    if side is None:
        return None
    loaded = sum(tokens for tier, tokens in side.hit_tokens.items() if tier != "gpu")
    if not loaded:
        return None
    return tiers_usd_per_hour / loaded / (engines_usd_per_hour / side.computed_tokens)


def _sensitivity(sample: Trace, spec: SimSpec) -> Sensitivity:
    def ratio(changed: SimSpec, traffic: Trace = sample) -> float:
        without = simulate(traffic, msgspec.structs.replace(changed, tiers=()))
        with_tiers = simulate(traffic, changed)
        return without.ttft_s["mean"] / with_tiers.ttft_s["mean"]

    def tiers(field: str, factor: float) -> SimSpec:
        changed = tuple(
            msgspec.structs.replace(
                tier, **{field: type(getattr(tier, field))(factor * getattr(tier, field))}
            )
            for tier in spec.tiers
        )
        return msgspec.structs.replace(spec, tiers=changed)

    def engine(field: str, factor: float) -> SimSpec:
        changed = msgspec.structs.replace(spec.engine, **{field: factor * getattr(spec.engine, field)})
        return msgspec.structs.replace(spec, engine=changed)

    swings = [
        Swing("sizes of the tiers", ratio(tiers("size_bytes", 0.5)), ratio(tiers("size_bytes", 2.0))),
        Swing(
            "read bandwidth of the tiers",
            ratio(tiers("read_bytes_per_s", 0.5)),
            ratio(tiers("read_bytes_per_s", 2.0)),
        ),
        Swing(
            "write bandwidth of the tiers",
            ratio(tiers("write_bytes_per_s", 0.5)),
            ratio(tiers("write_bytes_per_s", 2.0)),
        ),
        Swing(
            "share of the peak that prefill reaches",
            ratio(engine("peak_share", 0.5)),
            ratio(engine("peak_share", 2.0)),
        ),
        Swing("arrivals", ratio(spec, denser(sample, 0.5)), ratio(spec, denser(sample, 2.0))),
    ]
    swings.sort(key=lambda swing: abs(swing.ttft_ratio_doubled - swing.ttft_ratio_halved), reverse=True)
    plain = ratio(spec)
    below = [
        swing.name
        for swing in swings
        if (min(swing.ttft_ratio_halved, swing.ttft_ratio_doubled) < 1) != (plain < 1)
    ]
    verdict = decide(
        "The tiers shorten the time to the first token, whichever input is wrong by a factor of two",
        plain > 1 and not below,
        f"{plain:.2f} times as fast as without; {swings[0].name} matters most",
        f"turns with {', '.join(below)}" if below else "with none of these inputs",
    )
    return Sensitivity(len(sample.rows), plain, swings, [verdict])


def _times(bound: float | None) -> str:
    return "no bound" if bound is None else f"{bound:.2f} times the throughput"
