"""`stepwell replay`: what caches would give on recorded traffic.

The file is imported for this command alone, so it may import what it needs at the top.
"""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from cyclopts import Parameter

from stepwell.cli.errors import CommandError
from stepwell.cli.trace import JsonFile, Reading, Traces, load_traces, write_bytes, write_json
from stepwell.config import ConfigError
from stepwell.replay.capacities import POLICIES, Policy, hits_over_capacities
from stepwell.replay.facts.tables import FactError
from stepwell.replay.hits import Hits
from stepwell.replay.report.figures import SECTIONS, Report, make_report
from stepwell.replay.report.page import render
from stepwell.replay.report.target import parse_target
from stepwell.replay.sim.build import Hardware, build
from stepwell.replay.sim.compare import Comparison, compare
from stepwell.replay.sim.simulate import SimError
from stepwell.replay.traces.row import Trace
from stepwell.replay.traces.summary import ceiling

PolicyName: TypeAlias = Annotated[
    Policy | Literal["all"],
    Parameter(
        show_default=False,
        help=(
            "With --capacity-blocks: lru, fifo and s3fifo are the cache server's own; belady knows the "
            "future of each block, optimum that of prefixes: no cache hits more. Default: lru."
        ),
    ),
]
Share: TypeAlias = Annotated[
    float,
    Parameter(
        show_default=False,
        help="Estimate lru from this share of the blocks, as 0.01, for huge traces. Default: all, exact.",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)  # cyclopts knows no msgspec
class Machines:
    """Flags that say what the traffic is simulated on."""

    model: Annotated[
        str | None, Parameter(show_default=False, help="A known model, or the path of its config.json.")
    ] = None
    gpu: Annotated[str | None, Parameter(show_default=False, help="A known GPU, as H100.")] = None
    gpus: Annotated[
        int | None,
        Parameter(show_default=False, help="GPUs of one engine. Default: the fewest that leave it a cache."),
    ] = None
    engines: Annotated[int, Parameter(show_default=False, help="Replicas of the model. Default: 1.")] = 1
    tier: Annotated[
        tuple[str, ...],
        Parameter(
            show_default=False,
            help=(
                "NAME=SIZE[@RATE[@LATENCY]], memory first, as --tier memory=256GiB --tier disk=4TiB@6GB/s. "
                "Default: none; what is left out of one comes from the facts."
            ),
        ),
    ] = ()
    eviction: Annotated[
        Literal["lru", "fifo", "s3fifo"], Parameter(show_default=False, help="In memory. Default: lru.")
    ] = "lru"
    facts: Annotated[
        Path | None,
        Parameter(show_default=False, help="TOML file of your own facts, over those of docs/replay.md."),
    ] = None
    peak_share: Annotated[
        float | None,
        Parameter(show_default=False, help="Of the GPU's peak FLOP/s, what prefill reaches. Default: 0.5."),
    ] = None
    bandwidth_share: Annotated[
        float | None,
        Parameter(show_default=False, help="Of its memory bandwidth, what decode reaches. Default: 0.7."),
    ] = None


class Result(msgspec.Struct, frozen=True):
    """What `--json` has."""

    sources: tuple[str, ...]
    requests: int
    block_tokens: int
    asked_blocks: int
    different_blocks: int
    ceiling_hit_rate_blocks: float  # of an infinite cache
    warnings: tuple[str, ...]
    sample: float  # share of the blocks that lru was estimated from; 1: exact
    results: list[Hits]  # one a policy and capacity
    timed: Comparison | None  # None: no machines were named
    report: Report | None  # None: none was asked for


def replay(
    *traces: Traces,
    policy: PolicyName = "lru",
    capacity_blocks: Annotated[
        str | None,
        Parameter(show_default=False, help="Blocks that the cache holds: N, or N,N,... for several."),
    ] = None,
    sample: Share = 1.0,
    machines: Machines | None = None,
    report: Annotated[
        Path | None,
        Parameter(
            show_default=False,
            help="Write the report with its verdicts here, one HTML file. Needs --tier. Default: nowhere.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        Parameter(
            show_default=False,
            help="For the report, as ttft_p95=2s. Default: what the engines reach without tiers.",
        ),
    ] = None,
    reading: Reading | None = None,
    json: JsonFile = None,
) -> int:
    """Replay traces through caches of given sizes, or through engines and tiers in time.

    With --capacity-blocks: the share of blocks that each policy hits, exactly; a request's hits are its
    leading blocks that are held. With --model and --gpu: times to the first token and hits of each tier,
    with the tiers and without, at the trace's own arrivals.
    """
    capacities = [] if capacity_blocks is None else _capacities(capacity_blocks)
    machines = machines or Machines()
    if report is not None and not machines.tier:
        raise ConfigError("--report compares tiers: say --model, --gpu and at least --tier memory=SIZE")
    hardware = _hardware(machines)
    if not capacities and hardware is None:
        raise ConfigError("say --capacity-blocks N for hits alone, or --model and --gpu for times")
    if not 0 < sample <= 1:
        raise ConfigError(f"--sample is {sample}; it must be above 0 and at most 1")
    if sample != 1 and policy != "lru":
        raise ConfigError(f"--sample works for --policy lru alone, not {policy}")
    trace = load_traces(traces, reading)
    if trace.block_tokens is None and trace.rows:
        raise CommandError(
            "this trace has no prefix information: what a cache would hit cannot be told from it"
        )
    # The trace's rows stay to the end: the collector need not look through them again and again.
    gc.freeze()
    policies = POLICIES if policy == "all" else (policy,)
    result = Result(
        sources=trace.sources,
        requests=len(trace.rows),
        block_tokens=trace.block_tokens or 0,
        asked_blocks=trace.asked_blocks,
        different_blocks=trace.blocks,
        ceiling_hit_rate_blocks=ceiling(trace),
        warnings=trace.warnings,
        sample=sample,
        results=[hits for each in policies for hits in hits_over_capacities(trace, each, capacities, sample)],
        timed=None if hardware is None or report is not None else _timed(trace, hardware),
        report=None if hardware is None or report is None else _report(trace, hardware, target),
    )
    _print(result)
    if report is not None and result.report is not None:
        write_bytes(report, render(result.report).encode())
    write_json(json, result)
    return 0


def _hardware(machines: Machines) -> Hardware | None:
    if machines.model is None and machines.gpu is None:
        if machines.tier:
            raise ConfigError("--tier needs --model and --gpu: it is simulated in time")
        return None
    if machines.model is None or machines.gpu is None:
        raise ConfigError("--model and --gpu belong together")
    return Hardware(
        model=machines.model,
        gpu=machines.gpu,
        gpus=machines.gpus,
        engines=machines.engines,
        tiers=machines.tier,
        eviction=machines.eviction,
        facts=machines.facts,
        peak_share=machines.peak_share,
        bandwidth_share=machines.bandwidth_share,
    )


def _timed(trace: Trace, hardware: Hardware) -> Comparison:
    try:
        return compare(trace, build(hardware, trace.block_tokens or 1))
    except (FactError, SimError) as error:
        raise ConfigError(str(error)) from error


def _report(trace: Trace, hardware: Hardware, target: str | None) -> Report:
    if not trace.rows:
        raise CommandError("the trace has no requests to report on")
    try:
        aim = None if target is None else parse_target(target)
        return make_report(trace, build(hardware, trace.block_tokens or 1), aim, facts=hardware.facts)
    except (FactError, SimError) as error:
        raise ConfigError(str(error)) from error
    except ValueError as error:
        raise ConfigError(f"--target: {error}") from error


def _capacities(text: str) -> list[int]:
    capacities = []
    for part in text.split(","):
        number = part.strip().replace("_", "")
        if not (number.isascii() and number.isdecimal()):
            raise ConfigError(f"--capacity-blocks: {part!r} is not a number of blocks; write N or N,N,...")
        capacities.append(int(number))
    return capacities


def _print(result: Result) -> None:
    print(
        f"{result.requests:,} requests, {result.asked_blocks:,} blocks of {result.block_tokens} tokens, "
        f"{result.different_blocks:,} of them different; an infinite cache hits "
        f"{100 * result.ceiling_hit_rate_blocks:.2f}%"
    )
    if result.results:
        print(f"{'policy':8} {'blocks':>12} {'hit blocks':>12} {'hit rate':>9}")
    for hits in result.results:
        print(
            f"{hits.policy:8} {hits.capacity_blocks:12,} {hits.hit_blocks:12,} "
            f"{100 * hits.hit_rate_blocks:8.2f}%"
        )
    timed = result.timed if result.report is None else result.report.sources.comparison
    if timed is not None:
        _print_timed(timed)
    if result.report is not None:
        for section in SECTIONS:
            for verdict in getattr(result.report, section).verdicts:
                print(f"{verdict.claim}: {verdict.outcome} ({verdict.measured}; {verdict.flips})")


def _print_timed(timed: Comparison) -> None:
    where = f"{timed.engines} x {timed.model} on {timed.gpus_per_engine} x {timed.gpu}"
    print(f"{where}, seconds to the first token:")
    print(f"{'':14} {'mean':>8} {'p50':>8} {'p95':>8} {'hit rate':>9}  from")
    for name, side in (("without tiers", timed.without), ("with tiers", timed.with_tiers)):
        if side is None:
            continue
        times = [f"{side.ttft_s.get(key, 0.0):8.3f}" for key in ("mean", "p50", "p95")]
        shares = ", ".join(
            f"{tier} {100 * tokens / max(1, side.prompt_tokens):.1f}%"
            for tier, tokens in side.hit_tokens.items()
        )
        print(f"{name:14} {' '.join(times)} {100 * side.hit_rate_tokens:8.2f}%  {shares}")
        if side.refused:
            print(f"{side.refused:,} requests are longer than GPU memory and were refused")
