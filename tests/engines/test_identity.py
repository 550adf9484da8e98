"""Whose bytes are these: what may be shared, and what may not, with counts for both.

Each "no hit" stands beside a "hit" of the same prompt, and every page read is checked by the engine.
"""

from typing import Any

import pytest
from engine_kit import Cache, counts, prompt

from stepwell.engines.fake import FakeEngine

B = 16
TOKENS = prompt(5 * B)
HIT = (0, 5 * B - 1, 1)  # all but the token that must be computed
MISS = (0, 0, 5 * B)


@pytest.mark.parametrize(
    ("stored", "others"),
    [
        ({}, [{"salt": ""}, {"salt": "None"}, {"salt": "X"}, {"adapter": "X"}]),
        ({"salt": "X"}, [{}, {"salt": "x"}, {"adapter": "X"}, {"salt": "X", "adapter": "X"}]),
        ({"adapter": "X"}, [{}, {"adapter": "x"}, {"salt": "X"}, {"salt": "X", "adapter": "X"}]),
        ({"salt": "ab", "adapter": "c"}, [{"salt": "a", "adapter": "bc"}, {"salt": "abc"}]),
        ({"salt": "é"}, [{"salt": "e\u0301"}, {"salt": "../é"}, {"salt": "é\0"}, {"salt": "é" * 300}]),
    ],
)
def test_salts_and_adapters(cache: Cache, stored: dict[str, Any], others: list[dict[str, Any]]) -> None:
    answer = cache.engine().ask(TOKENS, **stored)
    assert counts(answer) == MISS
    for other in others:
        assert counts(cache.engine().ask(TOKENS, **other)) == MISS, other
    again = cache.engine().ask(TOKENS, **stored)
    assert counts(again) == HIT
    assert again.new_tokens == answer.new_tokens
    assert cache.memory.stored_chunks == 5 * (1 + len(others))


@pytest.mark.parametrize(
    "other",
    [
        {"model": "another"},
        {"model": "fake "},
        {"layers": 3},
        {"chunk_blocks": 2},
        {"block_tokens": 8},
        {"block_tokens": 8, "layers": 4},  # as many bytes a block
    ],
)
def test_engines_of_unlike_models_or_layouts_never_meet(cache: Cache, other: dict[str, Any]) -> None:
    cache.engine().ask(TOKENS)
    assert counts(cache.engine(**other).ask(TOKENS)) == MISS
    chunk = other.get("block_tokens", B) * other.get("chunk_blocks", 1)
    held = min(5 * B - 1, 5 * B // chunk * chunk)
    assert counts(cache.engine(**other).ask(TOKENS)) == (0, held, 5 * B - held)
    assert counts(cache.engine().ask(TOKENS)) == HIT
    cache.check_idle()


def test_adapter_files_swapped_under_one_name(cache: Cache) -> None:
    assert counts(cache.engine(adapter_files=b"1").ask(TOKENS, adapter="X")) == MISS
    assert counts(cache.engine(adapter_files=b"2").ask(TOKENS, adapter="X")) == MISS
    assert counts(cache.engine(adapter_files=b"1").ask(TOKENS, adapter="X")) == HIT
    assert counts(cache.engine(adapter_files=b"2").ask(TOKENS, adapter="X")) == HIT


@pytest.mark.parametrize("chunk_blocks", [1, 2])
@pytest.mark.parametrize("position", [0, 1, B, 3 * B - 1, 3 * B, 5 * B - 1])
def test_another_image_is_shared_up_to_the_chunk_it_is_in(
    cache: Cache, position: int, chunk_blocks: int
) -> None:
    chunk = B * chunk_blocks
    tokens = prompt(4 * chunk + 3)
    cache.engine(chunk_blocks=chunk_blocks).ask(tokens, image=(position, b"cat"))
    shared = position // chunk * chunk
    for image in ((position, b"dog"), None):
        asked = cache.engine(chunk_blocks=chunk_blocks).ask(tokens, image=image)
        assert counts(asked) == (0, shared, len(tokens) - shared)
    again = cache.engine(chunk_blocks=chunk_blocks).ask(tokens, image=(position, b"cat"))
    assert counts(again) == (0, 4 * chunk, 3)


@pytest.mark.parametrize("position", [0, B - 1, B, 2 * B, 3 * B - 1])
def test_one_other_token_is_shared_up_to_the_chunk_it_is_in(cache: Cache, position: int) -> None:
    tokens = prompt(4 * B + 1)
    cache.engine().ask(tokens)
    other = [*tokens[:position], 7, *tokens[position + 1 :]]
    shared = position // B * B
    assert counts(cache.engine().ask(other)) == (0, shared, len(other) - shared)


@pytest.mark.parametrize("chunk_blocks", [1, 2, 4])
@pytest.mark.parametrize(("steps", "step_tokens"), [(1, 48), (2, 48), (3, 48), (1, 40), (2, 41), (3, 47)])
def test_a_prompt_aborted_half_way_is_hit_exactly_as_far_as_it_got(
    cache: Cache, chunk_blocks: int, steps: int, step_tokens: int
) -> None:
    engine = cache.engine(chunk_blocks=chunk_blocks, step_tokens=step_tokens)
    tokens = prompt(10 * B)
    asked = engine.add(tokens)
    for _ in range(steps):
        engine.step()
    engine.abort(asked)
    chunks = step_tokens * steps // (B * chunk_blocks)
    assert cache.memory.chunks == chunks
    held = chunks * B * chunk_blocks
    assert counts(cache.engine(chunk_blocks=chunk_blocks).ask(tokens)) == (0, held, len(tokens) - held)


@pytest.mark.parametrize("chunk_blocks", [1, 2, 4])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("tokens", [1, B - 1, B, B + 1, 4 * B, 8 * B, 8 * B + 1])
def test_every_length_three_times(cache: Cache, tokens: int, prefix_caching: bool, chunk_blocks: int) -> None:
    engine = cache.engine(prefix_caching=prefix_caching, chunk_blocks=chunk_blocks)
    expected = FakeEngine(None).ask(prompt(tokens), 3).new_tokens
    chunk = B * chunk_blocks
    stored = tokens // chunk * chunk
    # Its own cache gives whole blocks only; the last block of a prompt is read from Stepwell when held.
    own = (tokens - 1) // B * B if prefix_caching else 0
    ours = max(0, min(stored, tokens - 1) - own)
    for times in range(3):
        asked = engine.ask(prompt(tokens), 3)
        assert asked.new_tokens == expected
        cold = (0, 0, tokens)
        assert counts(asked) == (cold if times == 0 else (own, ours, tokens - own - ours))
    stats = cache.stats()
    # The last of three new tokens is never computed, so it is in no chunk.
    assert stats.tiers["memory"].stored_chunks == (tokens + 2) // chunk
    assert stats.requests.requests == 3
    assert stats.requests.prompt_tokens == 3 * tokens
    assert stats.requests.engine_hit_tokens == 2 * own
    assert stats.requests.stepwell_hit_tokens == 2 * ours
    assert stats.requests.computed_tokens == 3 * tokens - 2 * (own + ours)
    cache.check_idle(-(-1024 * chunk_blocks // 4096) * 4096)


def test_answers_are_stored_as_they_grow(cache: Cache) -> None:
    first = cache.engine().ask(prompt(B + 3), 3 * B)
    history = first.tokens
    second = cache.engine().ask([*history, 5, 6, 7])
    whole = (len(history) - 1) // B * B
    assert counts(second) == (0, whole, len(history) + 3 - whole)


@pytest.mark.parametrize("chunk_blocks", [1, 2, 4])
@pytest.mark.parametrize("own_blocks", [1, 2, 3, 5])
def test_the_engine_holds_the_beginning_itself(cache: Cache, own_blocks: int, chunk_blocks: int) -> None:
    tokens = prompt(8 * B + 5)
    cache.engine(chunk_blocks=chunk_blocks).ask(tokens)
    engine = cache.engine(chunk_blocks=chunk_blocks)
    engine.ask([*tokens[: own_blocks * B], 9])
    own = own_blocks * B
    assert counts(engine.ask(tokens)) == (own, 8 * B - own, 5)


def test_a_request_that_bypasses_the_cache(cache: Cache) -> None:
    engine = cache.engine()
    cold = engine.ask(TOKENS, 3)
    before = cache.stats()
    bypass = engine.add(TOKENS, 3, bypass=True)
    while bypass.state in ("waiting", "running"):
        engine.step()
        assert cache.stats().leases == 0
    after = cache.stats()
    assert bypass.new_tokens == cold.new_tokens
    assert counts(bypass) == MISS
    assert after.missed == before.missed
    assert after.lookups == before.lookups
    assert after.tiers["memory"].stored_chunks == before.tiers["memory"].stored_chunks
    assert after.tiers["memory"].loaded_chunks == 0
    assert counts(cache.engine().ask(TOKENS)) == HIT


def test_a_bypassing_request_stores_what_it_computes(cache: Cache) -> None:
    cache.engine().ask(TOKENS, bypass=True)
    assert cache.memory.stored_chunks == 5
    assert counts(cache.engine().ask(TOKENS)) == HIT


def test_every_miss_has_a_reason(cache: Cache) -> None:
    engine = cache.engine()
    engine.ask(prompt(B - 1, 1))
    engine.ask(prompt(2 * B + 1, 500))
    missed = {reason.value: count for reason, count in cache.stats().missed.items() if count}
    assert missed == {"too_short": 1, "not_held": 2}
