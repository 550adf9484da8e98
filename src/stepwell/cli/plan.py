"""`stepwell plan`: the cheapest tiers and engines for recorded traffic.

The file is imported for this command alone, so it may import what it needs at the top.
"""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from stepwell.cli.errors import CommandError
from stepwell.cli.trace import JsonFile, Reading, Traces, load_traces, write_json
from stepwell.config import ConfigError
from stepwell.replay.facts.tables import FactError
from stepwell.replay.planning import Plan, make_plan
from stepwell.replay.report.scale import head
from stepwell.replay.report.target import parse_target
from stepwell.replay.sim.build import Hardware, build, parse_tiers
from stepwell.replay.sim.simulate import SimError


def plan(
    *traces: Traces,
    model: Annotated[str, Parameter(help="A known model, or the path of its config.json.")],
    gpu: Annotated[str, Parameter(help="A known GPU, as H100.")],
    target: Annotated[str, Parameter(help="What has to be met, as ttft_p95=2s.")],
    budget: Annotated[
        float | None, Parameter(show_default=False, help="At most so many USD an hour. Default: any.")
    ] = None,
    gpus: Annotated[
        int | None,
        Parameter(show_default=False, help="GPUs of one engine. Default: the fewest that leave it a cache."),
    ] = None,
    below: Annotated[
        tuple[Literal["cxl", "disk", "redis", "mooncake", "object"], ...],
        Parameter(show_default=False, help="Tiers to try below memory, one at a time. Default: disk."),
    ] = ("disk",),
    sample_requests: Annotated[
        int, Parameter(show_default=False, help="Requests to simulate, from the first on. Default: 1000.")
    ] = 1_000,
    facts: Annotated[
        Path | None,
        Parameter(show_default=False, help="TOML file of your own facts, over those of docs/replay.md."),
    ] = None,
    reading: Reading | None = None,
    json: JsonFile = None,
) -> int:
    """Find the cheapest number of engines and sizes of tiers that meet a target, and the runner-up.

    Exits with 1 where nothing that was tried does.
    """
    try:
        aim = parse_target(target)
    except ValueError as error:
        raise ConfigError(f"--target: {error}") from error
    trace = load_traces(traces, reading)
    if not trace.rows:
        raise CommandError("the trace has no requests to plan for")
    try:
        spec = build(Hardware(model, gpu, gpus, tiers=("memory=1GiB",), facts=facts), trace.block_tokens or 1)
        others = parse_tiers(["memory=1GiB", *(f"{name}=1GiB" for name in below)], facts)[1:]
        found = make_plan(head(trace, sample_requests), spec, others, aim, budget)
    except (FactError, SimError) as error:
        raise ConfigError(str(error)) from error
    _print(found)
    write_json(json, found)
    return 0 if found.candidates else 1


def _print(found: Plan) -> None:
    aim = f"{found.target.percentile} of the time to the first token at most {found.target.seconds:g} s"
    print(f"{found.tried} choices tried on {found.requests:,} requests: {aim}")
    if not found.candidates:
        print(
            f"{found.over_budget} meet the target and cost more than the budget"
            if found.over_budget
            else "none meets the target"
        )
        return
    for place, each in zip(("cheapest", "runner-up"), found.candidates, strict=False):
        print(
            f"{place:9}  {each.usd_per_hour:8.2f} USD an hour: {each.name} "
            f"({each.gpus} GPUs {each.gpus_usd_per_hour:.2f}, tiers {each.tiers_usd_per_hour:.2f})"
        )
    print(f"because   {_why(found)}")


def _why(found: Plan) -> str:
    best = found.candidates[0]
    plain = next((each for each in found.candidates if not each.tiers), None)
    if plain is best:
        return "no tier saves an engine here"
    if plain is None:
        return "without tiers the target or the budget is not met"
    saved = plain.engines - best.engines
    return (
        f"the tiers save {saved} of {plain.engines} engines, "
        f"{plain.usd_per_hour - best.usd_per_hour:.2f} USD an hour"
    )
