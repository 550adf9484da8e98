"""What the engine's own speed says about waiting."""

import pytest

from stepwell.policy.cost import PRIOR_TOKENS_PER_S, PrefillSpeed


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
