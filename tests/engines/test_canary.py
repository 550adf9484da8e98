"""Wrong bytes that were stored with a right checksum: found by computing them again."""

from pathlib import Path

import numpy as np
import pytest
from engine_kit import Cache, GatedCopier, counts, prompt

from stepwell import wire
from stepwell.engines.compare import difference
from stepwell.engines.fake import FakeEngine, WrongBytes
from stepwell.policy.canary import Canary
from stepwell.server.core import DIFFERING_MOST
from stepwell.server.host import DiskSetting
from stepwell.types import Reason
from support.waiting import wait_until

B = 16


def test_one_in_so_many_is_due() -> None:
    canary = Canary(10)
    assert [canary.due(chunks) for chunks in (4, 4, 4, 4, 4, 10, 3, 4)] == [
        False, False, True, False, True, True, False, False,
    ]  # fmt: skip
    assert not any(Canary(0).due(1_000_000) for _ in range(5))


def spoil(cache: Cache, chunk: int) -> None:
    """Write other bytes over the chunk that was stored in this place."""
    assert cache.memory.chunks > chunk
    core = cache.server._host.core
    slot = list(core.memory._slots.values())[chunk]
    view = core.memory.view(slot)
    view[:] = bytes(byte ^ 0xFF for byte in view)


@pytest.mark.parametrize("copier", [None, GatedCopier])
def test_what_is_held_and_right_is_found_so(cache: Cache, copier: type[GatedCopier] | None) -> None:
    options = {} if copier is None else {"copier": copier}
    cache.engine().ask(prompt(80))
    engine = cache.engine(canary_chunks=1, **options)
    asked = engine.ask(prompt(80))
    assert counts(asked) == (0, 64, 16), "the last chunk of the five is computed"
    stats = cache.stats()
    assert (stats.checked_chunks, stats.differing_chunks) == (1, 0)
    assert cache.memory.chunks == 5
    cache.check_idle()


def test_without_a_sample_nothing_is_computed_again(cache: Cache) -> None:
    cache.engine().ask(prompt(80))
    engine = cache.engine(canary_chunks=1_000)
    assert counts(engine.ask(prompt(80))) == (0, 79, 1)
    assert cache.stats().checked_chunks == 0


def test_a_prompt_of_one_chunk(cache: Cache) -> None:
    cache.engine().ask(prompt(B + 3))
    engine = cache.engine(canary_chunks=1)
    assert counts(engine.ask(prompt(B + 3))) == (0, 0, B + 3)
    assert cache.stats().checked_chunks == 1
    cache.check_idle()


def test_wrong_bytes_are_found_and_go(cache: Cache) -> None:
    cache.engine().ask(prompt(80))
    spoil(cache, 4)
    with pytest.raises(WrongBytes):
        cache.engine(canary_chunks=0).ask(prompt(81))
    assert counts(cache.engine(canary_chunks=1).ask(prompt(80))) == (0, 64, 16)
    stats = cache.stats()
    assert (stats.checked_chunks, stats.differing_chunks, stats.closed_spaces) == (1, 1, 0)
    assert cache.memory.chunks == 4
    assert counts(cache.engine(canary_chunks=0).ask(prompt(80))) == (0, 64, 16)


def test_too_many_and_the_space_is_closed(cache: Cache) -> None:
    engine = cache.engine(canary_chunks=1, prefix_caching=False)
    for number in range(DIFFERING_MOST):
        cache.clear()
        cache.engine().ask(prompt(80, 10_000 * number))
        spoil(cache, 4)
        engine.ask(prompt(80, 10_000 * number))
        assert cache.stats().differing_chunks == number + 1
    assert cache.stats().closed_spaces == 1
    assert counts(engine.ask(prompt(80))) == (0, 0, 80)
    assert counts(engine.ask(prompt(80))) == (0, 0, 80)
    assert counts(cache.engine().ask(prompt(80))) == (0, 0, 80), "for all engines"
    assert counts(cache.engine(model="another").ask(prompt(80))) == (0, 0, 80)
    assert counts(cache.engine(model="another").ask(prompt(80))) == (0, 79, 1), "but in no other space"
    assert cache.stats().missed[Reason.IN_DOUBT] == 15
    cache.check_idle()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_abort_before_it_is_compared_leaves_nothing_behind(cache: Cache, steps: int) -> None:
    cache.engine().ask(prompt(200))
    engine = cache.engine(canary_chunks=1, step_tokens=4)
    asked = engine.add(prompt(200))
    for _ in range(steps):
        engine.step()
    scheduled = engine.schedule() if steps == 0 else None
    engine.abort(asked)
    if scheduled is not None:
        engine.execute(scheduled)
    engine.run()
    cache.check_idle()
    assert cache.stats().checked_chunks == 0


def test_a_preempted_request_is_compared_when_it_has_come_again(cache: Cache) -> None:
    cache.engine().ask(prompt(100))
    engine = cache.engine(canary_chunks=1, num_blocks=12, step_tokens=8)
    asked = [engine.add(prompt(100)), engine.add(prompt(60, 9_000), 60)]
    engine.run()
    assert [request.state for request in asked] == ["finished"] * 2
    assert cache.stats().checked_chunks >= 1
    assert cache.stats().differing_chunks == 0
    cache.check_idle()


def test_the_answers_are_those_of_an_engine_without_cache(cache: Cache) -> None:
    alone, sampled = FakeEngine(None), cache.engine(canary_chunks=7, prefix_caching=False)
    for number in range(30):
        tokens = prompt(100 + number % 5)
        assert sampled.ask(tokens, 5).new_tokens == alone.ask(tokens, 5).new_tokens
    assert cache.stats().checked_chunks >= 20
    assert cache.stats().differing_chunks == 0


@pytest.mark.parametrize("element", ["float16", "float32", "float64", "bfloat16"])
def test_the_difference_of_floating_types(element: str) -> None:
    numbers = np.random.default_rng(1).normal(size=4_096).astype(np.float32)

    def as_bytes(values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        if element == "bfloat16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(element).view(np.uint8)

    noise = np.random.default_rng(2).normal(size=4_096).astype(np.float32)
    assert difference(as_bytes(numbers), as_bytes(numbers), element) == 0.0
    assert difference(as_bytes(numbers), as_bytes(numbers + 0.02 * noise), element) == pytest.approx(
        0.02, rel=0.2
    )
    assert difference(as_bytes(numbers), as_bytes(noise), element) == pytest.approx(2**0.5, rel=0.1)
    broken = as_bytes(numbers).copy()
    broken[:8] = 0xFF  # not a number
    assert difference(broken, as_bytes(numbers), element) == float("inf")


def test_other_types_are_compared_exactly() -> None:
    stored = np.arange(16, dtype=np.uint8)
    assert difference(stored, stored.copy(), "float8_e4m3fn") == 0.0
    assert difference(stored, stored ^ 1, "float8_e4m3fn") == float("inf")
    assert difference(np.zeros(16, np.uint8), stored, "float32") == float("inf")


def test_a_report_of_an_unknown_chunk_harms_nobody(cache: Cache) -> None:
    engine = cache.engine()
    engine.ask(prompt(80))
    assert engine.client is not None
    engine.client.note(wire.Checked(b"?" * 16, b"k" * 32, float("nan"), False))
    assert cache.stats().differing_chunks == 1
    assert cache.memory.chunks == 5


def test_a_wrong_chunk_does_not_come_back_from_disk(tmp_path: Path) -> None:
    cache = Cache(disk=DiskSetting(tmp_path, 16 << 20))
    cache.engine().ask(prompt(80))
    spoil(cache, 4)  # before it is written, or the disk has the right one
    wait_until(lambda: cache.stats().tiers["disk"].queued_chunks == 0)
    assert cache.stats().tiers["disk"].chunks == 5
    cache.engine(canary_chunks=1).ask(prompt(80))
    assert cache.stats().differing_chunks == 1
    wait_until(lambda: cache.stats().tiers["disk"].chunks == 4)
    assert counts(cache.engine(canary_chunks=0).ask(prompt(80))) == (0, 64, 16)
    cache.close()
