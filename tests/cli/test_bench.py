"""The measurements run for real, small; their figures are checked against what they must be made of."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from stepwell.cli import bench, measure
from stepwell.cli.bench import print_result, summarize
from stepwell.cli.errors import CommandError
from stepwell.cli.measure import PROMPT_BYTES, CopyTimes, LookupTime, measure_copies, measure_lookups

MIB = 1 << 20


def copies(store_ratio: float, load_ratio: float, prompt_bytes: int = PROMPT_BYTES) -> CopyTimes:
    return CopyTimes(
        2 * MIB, prompt_bytes, 0.01, 0.01 / store_ratio, 0.01 / load_ratio, store_ratio, load_ratio
    )


def test_copies_are_measured() -> None:
    times = measure_copies(2 * MIB, prompt_bytes=8 * MIB)
    assert times.prompt_bytes == 8 * MIB
    # No memory here copies 8 MiB in 10 µs, none takes a second: a copy was made, and nothing waited.
    for seconds in (times.plain_s, times.store_s, times.load_s):
        assert 1e-5 < seconds < 1.0
    assert 0 < times.store_ratio < 10
    assert 0 < times.load_ratio < 10


def test_lookups_are_measured_with_as_many_chunks_held_as_asked_for() -> None:
    small, large = measure_lookups(300, [16, 512])
    assert (small.keys, small.held_chunks) == (16, 300)
    assert (large.keys, large.held_chunks) == (512, 300)
    assert 1e-6 < small.lookup_s < 0.25
    assert 1e-6 < large.lookup_s < 0.25


def test_a_call_that_gives_less_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ensure_server", lambda *_: None)  # as if the server had died
    with pytest.raises(CommandError, match="gave 0 chunks instead of 2"):
        measure_copies(2 * MIB, prompt_bytes=4 * MIB)


@pytest.mark.parametrize(
    ("copy", "lookup_s", "verdicts"),
    [
        (copies(0.85, 0.9), 0.00025, [True, True, True]),
        (copies(0.84, 0.9), 0.00026, [False, True, False]),
        (copies(0.9, 0.1), 0.0001, [True, False, True]),
        (copies(0.1, 0.1, prompt_bytes=2 * MIB), 0.0001, [True, True, True]),
    ],
)
def test_targets(copy: CopyTimes, lookup_s: float, verdicts: list[bool]) -> None:
    result = summarize([copy], [LookupTime(128, 1000, lookup_s)])
    assert [row.passed for row in result.rows] == verdicts


def test_the_table_shows_what_was_missed() -> None:
    console = Console(file=io.StringIO(), width=100)
    result = summarize([copies(0.5, 0.9)], [LookupTime(8192, 1000, 0.0021)])
    print_result(result, console)
    assert isinstance(console.file, io.StringIO)
    shown = [re.sub(" +", " ", line.strip()) for line in console.file.getvalue().splitlines()]
    assert "store 32 x 2 MiB 0.500 of memcpy ≥ 0.85 of memcpy MISS" in shown
    assert "load 32 x 2 MiB 0.900 of memcpy ≥ 0.85 of memcpy pass" in shown
    assert "look up 8,192 keys (1,000 held) 2.100 ms ≤ 4 ms pass" in shown


@pytest.mark.parametrize(("ratio", "status"), [(0.9, 0), (0.5, 1)])
def test_status_and_json(ratio: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure_copies", lambda *_, **__: copies(ratio, 0.9))
    monkeypatch.setattr(bench, "measure_lookups", lambda *_: [LookupTime(128, 1000, 0.0001)])
    file = tmp_path / "bench.json"
    assert bench.run(file) == status
    data = json.loads(file.read_text())
    assert data["rows"][0] == {
        "what": "store 32 x 2 MiB",
        "unit": "of memcpy",
        "value": ratio,
        "target": {"value": 0.85, "is_least": True},
    }
