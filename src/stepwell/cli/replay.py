"""`stepwell replay`: what caches of given sizes hit on recorded traffic.

The file is imported for this command alone, so it may import what it needs at the top.
"""

from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from stepwell.cli.errors import CommandError
from stepwell.cli.trace import JsonFile, Reading, Traces, load_traces, write_json
from stepwell.config import ConfigError
from stepwell.replay.capacities import POLICIES, Policy, hits_over_capacities
from stepwell.replay.hits import Hits
from stepwell.replay.traces.row import Trace
from stepwell.replay.traces.summary import ceiling


class Result(msgspec.Struct, frozen=True):
    """What `--json` has."""

    sources: tuple[str, ...]
    requests: int
    block_tokens: int
    asked_blocks: int
    different_blocks: int
    ceiling_hit_rate_blocks: float  # of an infinite cache
    sample: float  # share of the blocks that lru was estimated from; 1: exact
    warnings: tuple[str, ...]
    results: list[Hits]


def replay(
    *traces: Traces,
    policy: Annotated[
        Policy | Literal["all"],
        Parameter(
            show_default=False,
            help=(
                "lru, fifo and s3fifo are the cache server's own; belady knows the future of each block, "
                "optimum that of prefixes: no cache hits more. Default: lru."
            ),
        ),
    ] = "lru",
    capacity_blocks: Annotated[
        str, Parameter(help="Blocks that the cache holds: N, or N,N,... for several.")
    ],
    sample: Annotated[
        float,
        Parameter(
            show_default=False,
            help="Estimate lru from this share of the blocks, as 0.01, for huge traces. Default: all, exact.",
        ),
    ] = 1.0,
    reading: Reading | None = None,
    json: JsonFile = None,
) -> int:
    """Replay traces through caches of given sizes: the share of blocks that each hits.

    A request's hits are its leading blocks that are held. No time is modelled here.
    """
    capacities = _capacities(capacity_blocks)
    if not 0 < sample <= 1:
        raise ConfigError(f"--sample is {sample}; it must be above 0 and at most 1")
    if sample != 1 and policy != "lru":
        raise ConfigError(f"--sample works for --policy lru alone, not {policy}")
    trace = load_traces(traces, reading)
    result = replay_capacities(trace, POLICIES if policy == "all" else (policy,), capacities, sample)
    _print(result)
    write_json(json, result)
    return 0


def replay_capacities(
    trace: Trace, policies: tuple[Policy, ...], capacities: list[int], sample: float
) -> Result:
    """Every policy at every capacity. Raises CommandError for a trace without prefixes."""
    if trace.block_tokens is None and trace.rows:
        raise CommandError(
            "this trace has no prefix information: what a cache would hit cannot be told from it"
        )
    results = [
        hits for policy in policies for hits in hits_over_capacities(trace, policy, capacities, sample)
    ]
    return Result(
        sources=trace.sources,
        requests=len(trace.rows),
        block_tokens=trace.block_tokens or 0,
        asked_blocks=trace.asked_blocks,
        different_blocks=trace.blocks,
        ceiling_hit_rate_blocks=ceiling(trace),
        sample=sample,
        warnings=trace.warnings,
        results=results,
    )


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
    print(f"{'policy':8} {'blocks':>12} {'hit blocks':>12} {'hit rate':>9}")
    for hits in result.results:
        print(
            f"{hits.policy:8} {hits.capacity_blocks:12,} {hits.hit_blocks:12,} "
            f"{100 * hits.hit_rate_blocks:8.2f}%"
        )
