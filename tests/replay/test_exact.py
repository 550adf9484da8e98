"""Every way of counting hits, beside an independent naive cache: the same leading run for every request."""

from collections.abc import Sequence
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_replay import NAIVE, best_by_trying_everything

from stepwell.replay.belady import belady_hits
from stepwell.replay.hits import policy_hits
from stepwell.replay.optimum import optimal_hits
from stepwell.replay.stack import lru_curve, sampled_lru_curve
from stepwell.replay.traces.prefixes import Prefixes
from stepwell.replay.traces.row import Row, Trace

# Prompts over two or three symbols share many prefixes, and hardly repeat whole.
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=25)
FEW_PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=3), max_size=6)


def trace_of(prompts: Sequence[Sequence[int]]) -> Trace:
    prefixes = Prefixes()
    rows = tuple(
        Row(float(at), 16 * len(prompt), 1, at, prefixes.path("", prompt))
        for at, prompt in enumerate(prompts)
    )
    return Trace(rows, 16, len(prefixes), (), 0, ())


def hits_of(trace: Trace, policy: str, capacity: int) -> list[int]:
    if policy == "belady":
        return belady_hits(trace, capacity)
    if policy == "optimum":
        return optimal_hits(trace, capacity)
    return policy_hits(trace, policy, capacity)


def naive_hits(trace: Trace, policy: str, capacity: int) -> list[int]:
    return NAIVE[policy]([row.blocks for row in trace.rows], capacity)


def head(trace: Trace, requests: int) -> Trace:
    rows = trace.rows[:requests]
    return Trace(rows, 512, 1 + max(max(row.blocks) for row in rows), (), 0, ())


@pytest.mark.parametrize("policy", sorted(NAIVE))
@given(prompts=PROMPTS, capacity=st.integers(0, 30))
def test_small_traces(policy: str, prompts: list[list[int]], capacity: int) -> None:
    trace = trace_of(prompts)
    assert hits_of(trace, policy, capacity) == naive_hits(trace, policy, capacity)


@given(prompts=PROMPTS)
def test_the_curve_is_lru_at_every_capacity(prompts: list[list[int]]) -> None:
    trace = trace_of(prompts)
    curve = lru_curve(trace)
    for capacity in range(trace.blocks + 3):
        assert curve.hit_blocks(capacity) == sum(naive_hits(trace, "lru", capacity))


@given(prompts=FEW_PROMPTS, capacity=st.integers(0, 5))
def test_nothing_beats_the_optimum(prompts: list[list[int]], capacity: int) -> None:
    trace = trace_of(prompts)
    best = best_by_trying_everything([row.blocks for row in trace.rows], capacity)
    assert sum(optimal_hits(trace, capacity)) == best


@given(prompts=PROMPTS, capacity=st.integers(0, 30))
def test_order_of_the_policies(prompts: list[list[int]], capacity: int) -> None:
    trace = trace_of(prompts)
    most = sum(optimal_hits(trace, capacity))
    for policy in ("lru", "fifo", "s3fifo", "belady"):
        assert sum(hits_of(trace, policy, capacity)) <= most
    assert most <= trace.asked_blocks - trace.blocks
    assert sum(optimal_hits(trace, capacity + 1)) >= most


# The naive FIFOs search lists: the whole trace would take them hours.
@pytest.mark.parametrize(
    ("policy", "requests", "capacities"),
    [
        ("lru", 12_031, (1_000, 5_900, 10_000, 20_000, 50_000)),
        ("fifo", 250, (500,)),
        ("s3fifo", 250, (500,)),
        ("belady", 800, (1_000, 5_900)),
        ("optimum", 800, (1_000, 5_900)),
    ],
)
def test_conversation_trace(
    conversation: Trace, policy: str, requests: int, capacities: tuple[int, ...]
) -> None:
    trace = head(conversation, requests)
    for capacity in capacities:
        assert hits_of(trace, policy, capacity) == naive_hits(trace, policy, capacity)


def test_conversation_trace_lru_curve(conversation: Trace) -> None:
    curve = lru_curve(conversation)
    for capacity in (0, 1, 1_000, 5_900, 10_000, 20_000, 50_000, 10**9):
        assert curve.hit_blocks(capacity) == sum(naive_hits(conversation, "lru", capacity))


# In percent of 288,500 blocks; the first three agree with figures that others replayed from this trace.
@pytest.mark.parametrize(
    ("policy", "capacity", "percent"),
    [
        ("lru", 5_900, 13.70),
        ("belady", 1_000, 17.96),
        ("belady", 5_900, 35.10),
        ("belady", 10_000, 36.64),
        ("optimum", 1_000, 19.07),
        ("optimum", 5_900, 35.37),
        ("optimum", 10_000, 36.64),
    ],
)
def test_conversation_trace_percent(conversation: Trace, policy: str, capacity: int, percent: float) -> None:
    hits = sum(hits_of(conversation, policy, capacity))
    assert 100 * hits / conversation.asked_blocks == pytest.approx(percent, abs=0.005)


def test_agent_sessions_curve(agents: Trace) -> None:
    curve = lru_curve(agents)
    for capacity in (1_000, 20_000):
        assert curve.hit_blocks(capacity) == sum(naive_hits(agents, "lru", capacity))


def test_a_sampled_curve_is_near_the_exact_one(conversation: Trace) -> None:
    exact = lru_curve(conversation)
    errors = []
    for seed in range(5):
        sampled = sampled_lru_curve(conversation, 0.1, seed)
        for capacity in (1_000, 5_900, 10_000, 20_000, 50_000):
            error = sampled.hit_blocks(capacity) - exact.hit_blocks(capacity)
            errors.append(abs(error) / conversation.asked_blocks)
    assert max(errors) < 0.03
    assert fmean(errors) < 0.01


def test_a_sample_of_everything_is_exact(conversation: Trace) -> None:
    assert sampled_lru_curve(conversation, 1.0).hit_blocks(5_900) == 39_520


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, float("nan")])
def test_a_rate_that_is_none(rate: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 and at most 1"):
        sampled_lru_curve(trace_of([]), rate)
