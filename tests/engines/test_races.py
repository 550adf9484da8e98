"""Copies that take time, and what happens meanwhile. The gate decides when they run."""

from collections.abc import Iterator

import pytest
from engine_kit import Cache, GatedCopier, counts, prompt

from stepwell.engines.fake import FakeEngine, FakeRequest

B = 16


def gated(engine: FakeEngine) -> GatedCopier:
    assert engine.worker is not None
    copier = engine.worker._copier
    assert isinstance(copier, GatedCopier)
    return copier


@pytest.fixture
def four() -> Iterator[Cache]:
    """Room for four chunks."""
    cache = Cache(4 * 4096)
    yield cache
    cache.close()


def test_nothing_is_visible_before_it_is_copied(cache: Cache) -> None:
    engine = cache.engine(copier=GatedCopier)
    engine.add(prompt(40), 8)
    engine.step()
    assert gated(engine).queued == 1
    assert (cache.memory.chunks, cache.stats().reservations) == (0, 1)
    assert counts(cache.engine().ask(prompt(40))) == (0, 0, 40)
    engine.run()
    assert counts(cache.engine().ask(prompt(40))) == (0, 32, 8)
    assert cache.memory.stored_chunks == 2
    cache.check_idle()


def test_preempted_while_its_stores_are_under_way_and_back_before_they_end(cache: Cache) -> None:
    engine = cache.engine(num_blocks=9, copier=GatedCopier, prefix_caching=False)
    expected = [FakeEngine(None).ask(prompt(48, start), 40).new_tokens for start in (1, 1000)]
    asked = [engine.add(prompt(48, start), 40) for start in (1, 1000)]
    copies_at_preemption = []
    while any(request.state in ("waiting", "running") for request in asked):
        before = sum(request.preemptions for request in asked)
        queued = gated(engine).queued
        engine.step()
        if sum(request.preemptions for request in asked) > before:
            copies_at_preemption.append(queued)
    engine.run()
    assert copies_at_preemption
    stats = cache.stats().requests
    assert (stats.requests, stats.prompt_tokens, stats.computed_tokens) == (2, 96, 96)
    assert [request.new_tokens for request in asked] == expected
    whole = sum((request.num_tokens - 1) // B for request in asked)
    assert cache.memory.stored_chunks == cache.memory.chunks == whole
    reader = cache.engine(num_blocks=64)
    for request in asked:
        assert counts(reader.ask(request.tokens))[1] == (request.num_tokens - 1) // B * B
    cache.check_idle()


def test_preempted_by_hand_with_stores_in_the_queue(cache: Cache) -> None:
    engine = cache.engine(copier=GatedCopier, prefix_caching=False)
    asked = engine.add(prompt(60), 4)
    engine.step()
    assert gated(engine).queued == 1
    engine._preempt(asked)
    engine.add(prompt(60, 5000), 2)  # takes the blocks that are still to be copied
    engine.waiting.reverse()
    engine.free.move_to_end(next(iter(engine.free)))
    engine.run()
    assert asked.preemptions == 1
    assert cache.memory.stored_chunks == 3 + 3
    for start in (1000, 5000):
        assert counts(cache.engine().ask(prompt(60, start))) == (0, 48, 12)


def test_blocks_are_used_again_at_once(cache: Cache) -> None:
    """Six blocks, and each prompt takes five: a copy without a fence reads the next prompt's pages."""
    engine = cache.engine(num_blocks=7, copier=GatedCopier, prefix_caching=False, step_tokens=128)
    for start in range(1, 1000, 100):
        request = engine.add(prompt(80, start))
        engine.step()
        assert request.state == "finished"
        assert gated(engine).queued == 1
    engine.run()
    assert cache.memory.stored_chunks == 50
    assert gated(engine).fences > 9
    for start in range(1, 1000, 100):
        assert counts(cache.engine().ask(prompt(80, start))) == (0, 79, 1)


def test_aborted_with_stores_under_way_and_its_blocks_taken(cache: Cache) -> None:
    engine = cache.engine(num_blocks=7, copier=GatedCopier, step_tokens=128)
    asked = engine.add(prompt(80), 9)
    engine.step()
    engine.abort(asked)
    assert engine.ask(prompt(80, 5000)).state == "finished"
    for start in (1000, 5000):
        assert counts(cache.engine().ask(prompt(80, start))) == (0, 79, 1)


def test_a_slot_is_not_given_away_while_a_copy_into_it_is_under_way(four: Cache) -> None:
    slow = four.engine(copier=GatedCopier, step_tokens=128)
    slow.add(prompt(4 * B + 1), 2)
    slow.step()
    assert gated(slow).queued == 1
    assert four.memory.used_bytes == 4 * 4096
    four.clear()  # forgets what is being written, too
    next_owner = four.engine()
    next_owner.ask(prompt(4 * B + 1, 5000))
    assert four.memory.chunks == 0  # every slot may still be written to
    gated(slow).open()
    slow.run()
    next_owner.ask(prompt(4 * B + 1, 9000))
    assert counts(four.engine().ask(prompt(4 * B + 1, 9000))) == (0, 4 * B, 1)
    four.check_idle()


def test_a_slot_that_is_being_loaded_is_not_given_away(four: Cache) -> None:
    four.engine().ask(prompt(4 * B + 1))
    reader, writer = four.engine(copier=GatedCopier), four.engine()
    wanted = [reader.add(prompt(4 * B + 1)), reader.add(prompt(4 * B + 1))]

    def evict() -> None:
        four.clear()
        writer.ask(prompt(4 * B + 1, 5000))

    gated(reader).during = evict
    reader.run()  # raises WrongBytes, if the second half was another's
    assert counts(wanted[0]) == (0, 4 * B, 1)
    gated(reader).during = lambda: None
    four.check_idle()


def test_what_a_waiting_request_was_promised_stays() -> None:
    eight = Cache(8 * 4096)
    try:
        eight.engine().ask(prompt(4 * B + 1))
        engine, other = eight.engine(num_blocks=8), eight.engine()
        engine.add(prompt(70, 5000), 4)  # four chunks more
        engine.step()
        waiting = engine.add(prompt(4 * B + 1))
        engine.step()
        assert waiting.state == "waiting"  # it was promised four chunks, but there was no room
        assert eight.memory.evicted_chunks == 0
        other.ask(prompt(6 * B + 1, 9000))
        assert eight.memory.evicted_chunks == 4  # the others
        engine.run()
        assert counts(waiting) == (0, 4 * B, 1)
        eight.check_idle()
    finally:
        eight.close()


@pytest.mark.parametrize("copier", [None, GatedCopier])
def test_a_hundred_requests_with_one_cold_prefix(cache: Cache, copier: type[GatedCopier] | None) -> None:
    options = {} if copier is None else {"copier": copier}
    engine = cache.engine(num_blocks=900, step_tokens=1000, prefix_caching=False, **options)
    shared = prompt(6 * B)
    asked = [engine.add([*shared, n], 2) for n in range(100)]
    engine.run()
    assert all(request.state == "finished" for request in asked)
    assert cache.memory.stored_chunks == cache.memory.chunks == 6
    assert counts(engine.ask([*shared, 7])) == (0, 6 * B, 1)
    stats = cache.stats()
    assert stats.requests.requests == 101
    assert stats.requests.prompt_tokens == 101 * (6 * B + 1)
    assert stats.requests.computed_tokens == sum(r.prompt_computed_tokens for r in engine.requests)
    cache.check_idle()


class TestTwoEngines:
    """Both compute the same cold prefix at once; the first to ask writes it."""

    @pytest.fixture
    def pair(self, cache: Cache) -> tuple[FakeEngine, FakeEngine, FakeRequest]:
        leader, follower = cache.engine(copier=GatedCopier), cache.engine()
        leader.add(prompt(60), 3)
        leader.step()
        asked = follower.add(prompt(60), 6)
        follower.step()
        assert counts(asked) == (0, 0, 60)
        assert (cache.memory.chunks, cache.stats().reservations) == (0, 1)
        return leader, follower, asked

    def test_one_copy_is_stored(self, cache: Cache, pair: tuple[FakeEngine, FakeEngine, FakeRequest]) -> None:
        leader, follower, _ = pair
        leader.run()
        follower.run()
        assert cache.memory.stored_chunks == cache.memory.chunks == 4  # 60 + 5 tokens
        cache.check_idle()

    def test_the_follower_takes_over_when_the_leader_dies(
        self, cache: Cache, pair: tuple[FakeEngine, FakeEngine, FakeRequest]
    ) -> None:
        leader, follower, asked = pair
        cache.stop(leader)
        assert cache.memory.used_bytes == 0
        follower.run()
        assert cache.memory.stored_chunks == cache.memory.chunks == 4
        assert counts(cache.engine().ask(asked.tokens)) == (0, 64, 2)
        cache.check_idle()

    def test_the_leaders_request_is_aborted(
        self, cache: Cache, pair: tuple[FakeEngine, FakeEngine, FakeRequest]
    ) -> None:
        leader, follower, _ = pair
        leader.abort(leader.running[0])
        leader.run()
        follower.run()
        assert cache.memory.stored_chunks == 4
        cache.check_idle()

    def test_the_follower_is_ahead_when_the_leader_dies(self, cache: Cache) -> None:
        leader = cache.engine(copier=GatedCopier, step_tokens=2 * B)
        leader.add(prompt(80), 3)
        leader.step()
        follower = cache.engine(step_tokens=128)
        asked = follower.add(prompt(80), 3)
        follower.step()  # writes chunks 2 to 4, whose parents the leader is still writing
        assert cache.memory.chunks == 0
        cache.stop(leader)
        follower.run()
        assert cache.memory.chunks == 5
        assert counts(cache.engine().ask(asked.tokens)) == (0, 80, 3)
        cache.check_idle()
