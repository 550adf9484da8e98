"""The tiers below memory: bounded, and they keep what their policies keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_kit import BLOCK_BYTES, engine, tier

from stepwell.replay.sim.cache import Cache
from stepwell.replay.sim.link import Link
from stepwell.replay.sim.slow import IndexStore, LogStore
from stepwell.replay.sim.spec import SimSpec


def chunks(start: int, count: int) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in range(start, start + count)]


@given(runs=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 30)), max_size=40))
def test_a_log_never_holds_more_than_its_size(runs: list[tuple[int, int]]) -> None:
    log = LogStore(160 * BLOCK_BYTES, BLOCK_BYTES, lambda chunk: chunk[-1] % 3 == 0)
    for start, count in runs:
        run = chunks(start, count)
        new = log.store(run, 0, len(run))
        assert all(chunk in log for chunk in run[-10:])  # a segment's worth is always there
        assert len(set(new)) == len(new)
        assert len(log) <= 150  # of 16 segments one is spare


def test_a_log_keeps_what_was_used_and_drops_the_rest() -> None:
    log = LogStore(160 * BLOCK_BYTES, BLOCK_BYTES, lambda _: False)
    first = chunks(0, 10)
    log.store(first, 0, 10)
    log.use(first, 0, 3)
    run = chunks(1_000, 145)
    log.store(run, 0, len(run))
    assert [chunk in log for chunk in first] == [True] * 3 + [False] * 7
    more = chunks(2_000, 150)
    log.store(more, 0, len(more))
    assert not any(chunk in log for chunk in first)  # used once, kept once


def test_a_log_too_small_for_a_block_holds_nothing() -> None:
    log = LogStore(BLOCK_BYTES, BLOCK_BYTES, lambda _: False)
    assert log.store(chunks(0, 5), 0, 5) == []
    assert len(log) == 0


def test_an_index_store_evicts_leaves_least_recently_used_first() -> None:
    store = IndexStore(10)
    old, new = chunks(0, 6), chunks(100, 8)
    assert store.store(old, 0, 6) == old
    assert store.store(new, 0, 8) == new
    assert [chunk in store for chunk in old] == [True, True, False, False, False, False]


def test_what_waits_to_be_written_is_bounded() -> None:
    slow = tier("redis", 1_000, bytes_per_s=BLOCK_BYTES)  # one block a second
    cache = Cache(SimSpec(engine(), 1, (tier("memory", 100), slow)))
    cache.store(chunks(0, 60), now_s=0.0)
    assert (len(cache.slow[0].store), cache.slow[0].dropped_blocks) == (50, 10)  # half of memory
    cache.store(chunks(100, 60), now_s=10.0)
    assert (len(cache.slow[0].store), cache.slow[0].dropped_blocks) == (60, 60)


def test_a_link_serves_one_after_the_other() -> None:
    link = Link(bytes_per_s=10.0, latency_s=1.0)
    assert link.transfer(0.0, 20) == 3.0
    assert link.transfer(0.5, 10) == 4.0  # waits for the first; its latency passes meanwhile
    assert link.backlog_bytes(1.0) == pytest.approx(20)
    assert link.transfer(10.0, 10) == 12.0
    assert (link.busy_s, link.moved_bytes) == (4.0, 40)
