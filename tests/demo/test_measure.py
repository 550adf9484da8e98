"""Counts from the metrics of a real vLLM 0.32 (data/vllm-0.32-metrics.txt: lines of one run of it)."""

from pathlib import Path

import pytest

from stepwell.demo.measure import MetricsError, PromptTokens, parse

CAPTURED = (Path(__file__).parent / "data" / "vllm-0.32-metrics.txt").read_text()


def test_sources_of_prompt_tokens_in_a_real_engines_metrics() -> None:
    assert parse(CAPTURED) == PromptTokens(computed=14342, engine_hit=3968, stepwell_hit=0)


def test_external_hits_are_stepwells_and_engines_add_up() -> None:
    line = (
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="demo",source="external_kv_transfer"} 0.0'
    )
    assert line in CAPTURED
    hits = line[:-3] + "256.0"
    of_another_engine = hits.replace('engine="0"', 'engine="1"')
    text = CAPTURED.replace(line, f"{hits}\n{of_another_engine}")
    assert parse(text).stepwell_hit == 512


def test_a_phase_is_the_difference_of_two_readings() -> None:
    assert PromptTokens(10, 20, 30) - PromptTokens(1, 2, 3) == PromptTokens(9, 18, 27)


def test_metrics_without_the_counts_name_what_is_missing() -> None:
    text = "\n".join(line for line in CAPTURED.splitlines() if "local_cache_hit" not in line)
    with pytest.raises(MetricsError, match="local_cache_hit"):
        parse(text)


def test_something_else_than_metrics_is_an_error() -> None:
    with pytest.raises(MetricsError, match="cannot be read"):
        parse("<html>not { metrics</html>")
