"""The published traces, whole."""

from pathlib import Path

import pytest
from replay_kit import recorded

from stepwell.replay.traces import native
from stepwell.replay.traces.load import load
from stepwell.replay.traces.row import Trace
from stepwell.replay.traces.summary import summarize


def test_conversation(conversation: Trace) -> None:
    summary = summarize(conversation)
    assert (summary.requests, summary.block_tokens) == (12_031, 512)
    assert (summary.asked_blocks, summary.different_blocks) == (288_500, 182_790)
    assert summary.ceiling_hit_rate_blocks == pytest.approx(0.3664, abs=1e-4)
    assert summary.span_s == pytest.approx(3_537, abs=1)
    assert summary.input_tokens / summary.requests == pytest.approx(12_035, abs=1)
    assert summary.output_tokens / summary.requests == pytest.approx(343, abs=1)


def test_agent_sessions(agents: Trace) -> None:
    summary = summarize(agents)
    assert (summary.requests, summary.sessions, summary.block_tokens) == (1_359, 25, 64)
    assert summary.ceiling_hit_rate_blocks == pytest.approx(0.967, abs=1e-3)


def test_azure_has_no_prefixes() -> None:
    summary = summarize(load([recorded("azure2023_code.csv")]))
    assert summary.requests == 8_819
    assert summary.ceiling_hit_rate_blocks is None
    assert "reuse cannot be studied" in summary.warnings[0]


def test_conversion_loses_nothing(agents: Trace, tmp_path: Path) -> None:
    file = tmp_path / "agents.jsonl"
    with file.open("wb") as stream:
        native.write(agents, stream)
    assert load([file]).rows == agents.rows
