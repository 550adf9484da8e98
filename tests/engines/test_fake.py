"""The engine of the other tests must itself be right, and able to see what is wrong."""

import numpy as np
import pytest
from engine_kit import Cache, GatedCopier, counts, prompt

from stepwell.engines.fake import FakeEngine, WrongBytes


def test_answers_depend_on_all_tokens_salts_adapters_and_images() -> None:
    engine = FakeEngine(None)
    tokens = prompt(40)
    answers = [
        engine.ask(tokens, 4),
        engine.ask([tokens[0] + 1, *tokens[1:]], 4),
        engine.ask(tokens, 4, salt="X"),
        engine.ask(tokens, 4, adapter="X"),
        engine.ask(tokens, 4, image=(20, b"cat")),
        engine.ask(tokens, 4, image=(20, b"dog")),
    ]
    assert len({tuple(answer.new_tokens) for answer in answers}) == len(answers)
    assert engine.ask(tokens, 4).new_tokens == answers[0].new_tokens


def test_its_own_cache_counts_what_it_finds() -> None:
    engine = FakeEngine(None, block_tokens=16)
    assert counts(engine.ask(prompt(40))) == (0, 0, 40)
    assert counts(engine.ask(prompt(40))) == (32, 0, 8)
    assert counts(engine.ask(prompt(32))) == (16, 0, 16)  # one token must be computed


def test_a_small_engine_preempts_and_answers_the_same() -> None:
    large, small = FakeEngine(None, num_blocks=200), FakeEngine(None, num_blocks=8, block_tokens=8)
    asked = [small.add(prompt(20, start), 12) for start in (1, 2, 3)]
    small.run()
    assert sum(request.preemptions for request in asked) > 0
    assert [r.new_tokens for r in asked] == [large.ask(prompt(20, s), 12).new_tokens for s in (1, 2, 3)]
    assert len(small.free) == 7


@pytest.mark.parametrize("layer", [0, 1])
def test_one_wrong_bit_in_a_loaded_page_is_seen(cache: Cache, layer: int) -> None:
    cache.engine().ask(prompt(40))
    engine = cache.engine(copier=GatedCopier)
    copier = engine.worker._copier  # type: ignore[union-attr]
    assert isinstance(copier, GatedCopier)

    def flip() -> None:
        engine.layers[layer][1, 7] ^= 1

    copier.during = flip
    with pytest.raises(WrongBytes, match=f"layer {layer}"):
        engine.ask(prompt(40))


def test_pages_of_other_tokens_are_seen() -> None:
    engine = FakeEngine(None)
    request = engine.add(prompt(40), 2)
    engine.step()
    engine.layers[0][request.blocks[0]] = np.roll(engine.layers[0][request.blocks[0]], 32)
    with pytest.raises(WrongBytes):
        engine.step()
