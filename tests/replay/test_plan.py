"""The planner's choice is the cheapest of what it tried, and says so."""

import json
from pathlib import Path

import pytest

from stepwell.cli import main
from stepwell.replay.planning import make_plan
from stepwell.replay.report.scale import denser
from stepwell.replay.report.target import Target
from stepwell.replay.sim.build import Hardware, build, parse_tiers
from stepwell.replay.traces.synth import Spec, synthesize

# Long prompts, few GPU blocks: the model fills a GPU, so that tiers can matter.
SPEC = build(Hardware("Qwen3-32B", "H100", 1, tiers=("memory=1GiB",)), 64)
DISK = parse_tiers(["memory=1GiB", "disk=1GiB"], None)[1:]
TRACE = denser(
    synthesize(Spec(requests=150, block_tokens=64, turns=8.0, user_tokens=2_000, sessions_per_s=0.5)), 1.0
)


def test_the_cheapest_comes_first() -> None:
    plan = make_plan(TRACE, SPEC, DISK, Target("p90", 8.0), None)
    assert plan.tried == 13
    assert plan.candidates
    prices = [each.usd_per_hour for each in plan.candidates]
    assert prices == sorted(prices)
    plain = next(each for each in plan.candidates if not each.tiers)
    assert plan.candidates[0].engines <= plain.engines
    assert plan.candidates[0].usd_per_hour == pytest.approx(
        plan.candidates[0].gpus * SPEC.engine.gpu.usd_per_hour + plan.candidates[0].tiers_usd_per_hour
    )


def test_a_budget_leaves_out_what_costs_more() -> None:
    free = make_plan(TRACE, SPEC, (), Target("p90", 3.0), None)
    cheapest = free.candidates[0].usd_per_hour
    tight = make_plan(TRACE, SPEC, (), Target("p90", 3.0), cheapest)
    assert tight.candidates
    assert all(each.usd_per_hour == cheapest for each in tight.candidates)
    assert len(tight.candidates) + tight.over_budget == len(free.candidates)
    assert make_plan(TRACE, SPEC, (), Target("p90", 3.0), cheapest / 2).candidates == []


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, figures = tmp_path / "made.jsonl", tmp_path / "out.json"
    assert main(["trace", "synth", "-o", str(made), "--requests", "60", "--block-tokens", "64"]) == 0
    machines = ["--model", "Llama-3.1-8B", "--gpu", "H100", "--json", str(figures)]
    assert main(["plan", str(made), *machines, "--target", "ttft_p95=5s"]) == 0
    shown = capsys.readouterr().out
    assert "cheapest       2.50 USD an hour: 1 engines, no tiers (1 GPUs 2.50, tiers 0.00)" in shown
    assert "no tier saves an engine here" in shown
    assert json.loads(figures.read_text())["candidates"][0]["engines"] == 1
    assert main(["plan", str(made), *machines, "--target", "ttft_p95=1us"]) == 1
    assert "none meets the target" in capsys.readouterr().out
    assert main(["plan", str(made), *machines, "--target", "soon"]) == 2
