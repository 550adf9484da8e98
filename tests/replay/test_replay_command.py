"""`stepwell replay` for given capacities: its figures, its JSON, its errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from replay_kit import recorded

from stepwell.cli import main

MADE = "\n".join(
    f'{{"timestamp": {at}, "input_length": 1536, "output_length": 5, "hash_ids": {ids}}}'
    for at, ids in enumerate([[0, 1, 2], [0, 1, 3], [4, 5, 6], [0, 1, 2]])
)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    file = tmp_path / "made.jsonl"
    file.write_text(MADE)
    return file


def test_one_entry_a_capacity(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "out.json"
    arguments = [
        "replay",
        str(made),
        "--policy",
        "lru",
        "--capacity-blocks",
        "0,3,6,7",
        "--json",
        str(figures),
    ]
    assert main(arguments) == 0
    result = json.loads(figures.read_text())
    assert [(each["capacity_blocks"], each["hit_blocks"]) for each in result["results"]] == [
        (0, 0),
        (3, 2),
        (6, 4),
        (7, 5),
    ]
    assert result["results"][3]["hit_rate_blocks"] == result["ceiling_hit_rate_blocks"] == 5 / 12
    assert "lru                 7            5    41.67%" in capsys.readouterr().out


def test_all_policies(made: Path, tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    arguments = ["replay", str(made), "--policy", "all", "--capacity-blocks", "5", "--json", str(figures)]
    assert main(arguments) == 0
    hits = {each["policy"]: each["hit_blocks"] for each in json.loads(figures.read_text())["results"]}
    assert hits == {"lru": 4, "fifo": 4, "s3fifo": 4, "belady": 5, "optimum": 5}


def test_no_requests_are_valid_json(tmp_path: Path) -> None:
    empty, figures = tmp_path / "empty", tmp_path / "out.json"
    empty.write_text("")
    assert main(["replay", str(empty), "--capacity-blocks", "5", "--json", str(figures)]) == 0
    result = json.loads(figures.read_text())
    assert (result["requests"], result["results"][0]["hit_rate_blocks"]) == (0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--capacity-blocks", "5,x"], 2, "--capacity-blocks: 'x' is not a number of blocks"),
        (["--capacity-blocks", "-5"], 2, "--capacity-blocks"),
        (["--capacity-blocks", "5", "--policy", "lfu"], 2, "policy"),
        (["--capacity-blocks", "5", "--sample", "0"], 2, "--sample is 0.0"),
        (["--capacity-blocks", "5", "--sample", "nan"], 2, "--sample is nan"),
        (
            ["--capacity-blocks", "5", "--sample", "0.5", "--policy", "fifo"],
            2,
            "works for --policy lru alone",
        ),
        (["--capacity-blocks", "5", "--json", "/no/such/out"], 1, "cannot write /no/such/out"),
    ],
)
def test_errors(
    made: Path, arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(made), *arguments]) == status
    assert message in capsys.readouterr().err


def test_a_trace_without_prefixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n")
    assert main(["replay", str(file), "--capacity-blocks", "5"]) == 1
    assert "no prefix information" in capsys.readouterr().err


def test_conversation_trace(tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    trace = str(recorded("mooncake_conversation.jsonl"))
    assert main(["replay", trace, "--capacity-blocks", "5900,20000", "--json", str(figures)]) == 0
    result = json.loads(figures.read_text())
    assert [round(100 * each["hit_rate_blocks"], 2) for each in result["results"]] == [13.70, 28.78]
    assert round(100 * result["ceiling_hit_rate_blocks"], 1) == 36.6


def test_other_commands_do_not_load_the_replay() -> None:
    code = (
        "import sys; from stepwell.cli import main; main(['config']); main(['--help']); "
        "assert not any(name.startswith('stepwell.replay') for name in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
