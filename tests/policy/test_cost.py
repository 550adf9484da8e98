"""What the engine's own speed says about waiting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.policy.cost import (
    PRIOR_BYTES_PER_S,
    PRIOR_LATENCY_S,
    PRIOR_TOKENS_PER_S,
    LoadCost,
    PrefillSpeed,
)


def test_before_anything_was_seen_it_is_a_guess() -> None:
    assert PrefillSpeed().seconds(4_000) == 4_000 / PRIOR_TOKENS_PER_S


def test_it_follows_what_the_engine_does_and_forgets() -> None:
    speed = PrefillSpeed()
    for _ in range(100):
        speed.observe(2_048, 0.1)
    assert speed.seconds(4_096) == pytest.approx(0.2)
    for _ in range(31):
        speed.observe(2_048, 0.4)
    assert speed.seconds(4_096) == pytest.approx(0.8)


def test_a_pause_now_and_then_does_not_matter() -> None:
    speed = PrefillSpeed()
    for number in range(31):
        speed.observe(1_000, 60.0 if number % 3 == 0 else 0.1)
    assert speed.seconds(1_000) == pytest.approx(0.1)


def test_decoding_says_nothing_about_prompts() -> None:
    speed = PrefillSpeed()
    speed.observe(8, 0.02)
    speed.observe(2_048, 0.0)
    assert speed.seconds(100) == 100 / PRIOR_TOKENS_PER_S


def test_before_anything_was_read_a_tier_is_an_ordinary_drive() -> None:
    assert LoadCost().seconds(1_000) == pytest.approx(PRIOR_LATENCY_S + 1_000 / PRIOR_BYTES_PER_S)


@given(
    st.floats(1e-4, 5.0),
    st.floats(1e6, 1e10),
    st.lists(st.integers(1, 1 << 28), min_size=5, max_size=20, unique=True),
)
def test_latency_and_bandwidth_are_told_apart(latency_s: float, bytes_per_s: float, sizes: list[int]) -> None:
    cost = LoadCost()
    for nbytes in sizes:
        cost.observe(nbytes, latency_s + nbytes / bytes_per_s)
    for nbytes in (1, 1 << 20, 1 << 30):
        assert cost.seconds(nbytes) == pytest.approx(latency_s + nbytes / bytes_per_s, rel=0.01)


def test_reads_of_one_size_say_what_that_size_costs() -> None:
    cost = LoadCost()
    for _ in range(9):
        cost.observe(1_000_000, 0.5)
    assert cost.seconds(1_000_000) == pytest.approx(0.5)
    assert cost.seconds(2_000_000) == pytest.approx(1.0)


def test_four_stalls_in_nine_do_not_matter_and_five_do() -> None:
    cost = LoadCost()
    for number in range(9):
        cost.observe(1_000_000, 30.0 if number in (1, 3, 5, 7) else 0.01)
    assert cost.seconds(1_000_000) == pytest.approx(0.01)
    for _ in range(5):
        cost.observe(1_000_000, 30.0)
    assert cost.seconds(1_000_000) == pytest.approx(30.0)
    for _ in range(5):
        cost.observe(1_000_000, 0.01)
    assert cost.seconds(1_000_000) == pytest.approx(0.01), "a tier that has recovered is noticed"


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 100)), max_size=30), st.integers(0, 1 << 30))
def test_a_price_is_never_negative_and_more_bytes_are_never_cheaper(
    reads: list[tuple[int, float]], nbytes: int
) -> None:
    cost = LoadCost()
    for read in reads:
        cost.observe(*read)
    assert 0 <= cost.seconds(nbytes) <= cost.seconds(nbytes + 1)
