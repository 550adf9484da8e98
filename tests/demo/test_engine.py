"""How the demo starts vLLM."""

import json
from pathlib import Path

import pytest

from stepwell.demo.engine import command, cpu_ranges


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [({0, 1}, "0-1"), ({3}, "3"), ({0, 1, 2, 8}, "0-2,8"), ({5, 1, 3}, "1,3,5"), ({2, 3, 6, 7}, "2-3,6-7")],
)
def test_cpu_ranges(cpus: set[int], expected: str) -> None:
    assert cpu_ranges(cpus) == expected


def test_only_the_run_with_stepwell_has_a_connector() -> None:
    without = command(Path("/model"), 1, None)
    with_stepwell = command(Path("/model"), 1, Path("/run/s.sock"))
    assert with_stepwell[: len(without)] == without
    flag, value = with_stepwell[len(without) :]
    assert flag == "--kv-transfer-config"
    assert json.loads(value)["kv_connector_extra_config"] == {"socket": "/run/s.sock"}
