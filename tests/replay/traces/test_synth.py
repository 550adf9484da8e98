"""Made-up traces have what their parameters say."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from stepwell.cli import main
from stepwell.replay.traces.load import load
from stepwell.replay.traces.row import Trace
from stepwell.replay.traces.summary import ceiling
from stepwell.replay.traces.synth import Spec, synthesize


def test_equal_parameters_equal_traces() -> None:
    assert synthesize(Spec(requests=50)) == synthesize(Spec(requests=50))
    assert synthesize(Spec(requests=50)) != synthesize(Spec(requests=50, seed=1))


def prompts_by_session(trace: Trace) -> list[list[tuple[int, ...]]]:
    sessions: dict[int, list[tuple[int, ...]]] = {}
    for row in trace.rows:
        sessions.setdefault(row.session, []).append(row.blocks)
    return list(sessions.values())


def test_chat() -> None:
    spec = Spec(requests=4_000, system_tokens=1_024, system_prompts=3, turns=4.0, user_tokens=100)
    trace = synthesize(spec)
    assert len(trace.rows) == 4_000
    assert [row.arrival_s for row in trace.rows] == sorted(row.arrival_s for row in trace.rows)
    sessions = prompts_by_session(trace)
    assert len({prompts[0][:64] for prompts in sessions}) == 3  # the system prompts, 64 blocks each
    assert 3.5 < 4_000 / len(sessions) < 4.5  # turns
    for prompts in sessions:
        for before, after in pairwise(prompts):
            assert after[: len(before)] == before  # a turn has all of the last one in its prompt
    first = [row.input_tokens - 1_024 for row in trace.rows if len(row.blocks) * 16 < 1_024 + 400]
    assert 60 < fmean(first) < 200
    assert all(len(row.blocks) == row.input_tokens // 16 for row in trace.rows)


def test_agents_start_sub_agents() -> None:
    without = synthesize(Spec(workload="agents", requests=2_000, sub_agents=0.0, system_prompts=1))
    with_them = synthesize(Spec(workload="agents", requests=2_000, sub_agents=0.5, system_prompts=1))
    assert {prompt[0] for prompts in prompts_by_session(without) for prompt in prompts} == {0}
    firsts = {prompt[0] for prompts in prompts_by_session(with_them) for prompt in prompts}
    assert len(firsts) == 2  # the agents' prompt and the sub-agents'
    assert any(len({prompt[0] for prompt in prompts}) == 2 for prompts in prompts_by_session(with_them))


def test_rag_shares_documents_only_from_the_start() -> None:
    few = Spec(workload="rag", requests=1_000, documents=5, documents_per_prompt=2, turns=1.0)
    many = msgspec.structs.replace(few, documents=100_000)
    assert ceiling(synthesize(few)) > ceiling(synthesize(many)) + 0.1


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, figures = tmp_path / "made.jsonl", tmp_path / "made.json"
    assert main(["trace", "synth", "-o", str(file), "--requests", "40", "--block-tokens", "32"]) == 0
    assert load([file]).rows == synthesize(Spec(requests=40, block_tokens=32)).rows
    assert main(["trace", "info", str(file), "--json", str(figures)]) == 0
    assert "requests                      40" in capsys.readouterr().out
    assert json.loads(figures.read_text())["block_tokens"] == 32
    again = tmp_path / "again.jsonl"
    assert main(["trace", "convert", str(file), "--output", str(again)]) == 0
    assert again.read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["synth", "-o", "/dev/null", "--turns", "0.5"], 1, "`float` >= 1.0 - at `$.turns`"),
        (["synth", "-o", "/no/such/file"], 1, "cannot write /no/such/file: No such file"),
        (["info"], 1, "name at least one trace file"),
        (["info", "/no/such/trace"], 1, "/no/such/trace: cannot be read"),
        (["info", "x", "--block-tokens", "0"], 1, "--block-tokens is 0"),
        (
            ["info", "x", "--blok-tokens", "16"],
            2,
            "--blok-tokens; did you mean --block-tokens?",
        ),
        (["info", "x", "--format", "csv"], 2, "format"),
    ],
)
def test_command_errors(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *arguments]) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
