"""An engine whose cache lost its memory: what lies on disk comes up while its requests wait."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Cache, counts, prompt

from stepwell import wire
from stepwell.server.below import DiskBelow, DriveLimits
from stepwell.server.host import DiskSetting
from stepwell.tiers.base import Put
from stepwell.types import Reason
from support.waiting import wait_until

B = 16
MIB = 1 << 20
NO_LIMITS = DriveLimits()


def patient() -> float:
    """A clock that stands still: an engine with it waits for whatever is on its way."""
    return 0.0


class OnDisk:
    """Caches one after the other in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache: Cache | None = None

    def start(self, memory_bytes: int = MIB, limits: DriveLimits = NO_LIMITS) -> Cache:
        self.stop()
        self.cache = Cache(memory_bytes, disk=DiskSetting(self.folder, 16 * MIB, limits))
        cache = self.cache
        wait_until(lambda: cache.stats().tiers["disk"].health == "ok")
        return cache

    def stop(self) -> None:
        if self.cache is not None:
            written(self.cache)
            self.cache.close(clear=False)
            self.cache = None


def written(cache: Cache) -> None:
    wait_until(lambda: cache.stats().tiers["disk"].queued_chunks == 0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[OnDisk]:
    disk = OnDisk(tmp_path / "disk")
    yield disk
    disk.stop()


def test_a_restarted_cache_serves_from_disk(disk: OnDisk) -> None:
    disk.start().engine(clock=patient).ask(prompt(80), 3)
    cache = disk.start()
    assert cache.memory.chunks == 0
    asked = cache.engine(clock=patient).ask(prompt(80), 3)
    assert counts(asked) == (0, 79, 1)
    stats = cache.stats()
    assert stats.tiers["disk"].loaded_chunks == 5
    assert (stats.hit_chunks, stats.missed[Reason.TOO_SLOW]) == (5, 0)
    cache.check_idle()


def test_what_memory_evicted_comes_back_from_disk(disk: OnDisk) -> None:
    cache = disk.start(memory_bytes=8 * 4096)
    engine = cache.engine(clock=patient, prefix_caching=False)
    for start in range(0, 10_000, 1_000):
        engine.ask(prompt(80, start))
        written(cache)
    for start in range(0, 10_000, 1_000):
        assert counts(engine.ask(prompt(80, start))) == (0, 79, 1)
    cache.check_idle()


def test_many_requests_with_one_prefix_share_one_read(disk: OnDisk) -> None:
    disk.start().engine(clock=patient).ask(prompt(160))
    cache = disk.start()
    engine = cache.engine(clock=patient, num_blocks=400, prefix_caching=False, step_tokens=512)
    asked = [engine.add([*prompt(160), number]) for number in range(20)]
    engine.run()
    assert [counts(request) for request in asked] == [(0, 160, 1)] * 20
    assert cache.stats().tiers["disk"].loaded_chunks == 10
    cache.check_idle()


def test_a_drive_that_is_slower_than_computing_is_not_waited_for(disk: OnDisk) -> None:
    disk.start().engine().ask(prompt(80))
    cache = disk.start(limits=DriveLimits(read_latency_s=3.0))
    engine = cache.engine()
    asked = engine.ask(prompt(80))  # a prior of 2,000 tokens a second: worth 40 ms
    assert counts(asked) == (0, 0, 80)
    assert cache.stats().missed[Reason.TOO_SLOW] == 5
    # What came late is kept for the next request.
    wait_until(lambda: cache.stats().tiers["disk"].loaded_chunks == 5)
    assert counts(cache.engine().ask(prompt(80))) == (0, 79, 1)
    cache.check_idle()


def test_an_abort_while_it_comes_up_leaves_nothing_behind(disk: OnDisk) -> None:
    disk.start().engine(clock=patient).ask(prompt(80))
    cache = disk.start(limits=DriveLimits(read_latency_s=0.3))
    engine = cache.engine(clock=patient)
    asked = engine.add(prompt(80))
    engine.step()
    assert (asked.state, cache.stats().leases) == ("waiting", 1)
    engine.abort(asked)
    assert cache.stats().leases == 0
    wait_until(lambda: cache.stats().tiers["disk"].loaded_chunks == 5)
    cache.check_idle()


def test_a_drive_that_cannot_keep_up_drops_and_says_so(disk: OnDisk) -> None:
    cache = disk.start(memory_bytes=64 * 4096)
    below = cache.server._host.core.below
    assert isinstance(below, DiskBelow)
    works, put = threading.Event(), below._throttled.put

    async def gated(items: Sequence[Put]) -> list[Reason | None]:
        while not works.is_set():
            await asyncio.sleep(0.002)
        return await put(items)

    below._throttled.put = gated  # type: ignore[method-assign]
    engine = cache.engine(clock=patient, prefix_caching=False)
    for start in range(0, 100_000, 1_000):
        engine.ask(prompt(80, start))
    stats = cache.stats()
    waiting = stats.tiers["disk"].queued_chunks
    assert stats.tiers["memory"].stored_chunks == 500
    assert 64 < waiting <= 128 + 2 * 32  # half of memory waits, two eighths are being written
    assert stats.dropped[Reason.TOO_SLOW] == 500 - waiting
    works.set()
    written(cache)
    stats = cache.stats()
    assert stats.tiers["disk"].stored_chunks + stats.dropped[Reason.TOO_SLOW] == 500


def test_clear_forgets_the_disk_too_for_good(disk: OnDisk) -> None:
    cache = disk.start()
    cache.engine(clock=patient).ask(prompt(80))
    written(cache)
    assert cache.clear() == 5
    assert cache.stats().tiers["disk"].chunks == 0
    assert counts(cache.engine(clock=patient).ask(prompt(80))) == (0, 0, 80)
    written(cache)
    cache.clear()
    cache = disk.start()
    assert counts(cache.engine(clock=patient).ask(prompt(80))) == (0, 0, 80)


def test_a_reset_engine_never_finds_its_old_chunks_on_disk(disk: OnDisk) -> None:
    cache = disk.start()
    engine = cache.engine(clock=patient, prefix_caching=False)
    engine.ask(prompt(80))
    written(cache)
    assert engine.scheduler is not None
    engine.scheduler.reset()
    wait_until(lambda: cache.stats().tiers["disk"].chunks == 0)
    assert counts(engine.ask(prompt(80))) == (0, 0, 80)


def test_two_engines_one_promotion_and_pages_that_are_right(disk: OnDisk) -> None:
    first = disk.start()
    first.engine(clock=patient).ask(prompt(400), 40)
    cache = disk.start(memory_bytes=20 * 4096)  # less than the prompt
    engines = [cache.engine(clock=patient), cache.engine(clock=patient)]
    for engine in engines:
        asked = engine.ask(prompt(400), 40)
        own, found, computed = counts(asked)
        assert own == 0
        assert found + computed == 400
        assert found >= 16 * B
    cache.check_idle()


def test_a_long_queue_does_not_fetch_more_than_memory_can_keep(disk: OnDisk) -> None:
    first = disk.start(memory_bytes=400 * 4096)
    engine = first.engine(clock=patient, num_blocks=400, prefix_caching=False)
    for start in range(0, 40_000, 1_000):
        engine.ask(prompt(80, start))
    cache = disk.start(memory_bytes=40 * 4096, limits=DriveLimits(read_latency_s=0.05))
    engine = cache.engine(clock=patient, num_blocks=8, prefix_caching=False)
    engine.ask(prompt(20, 90_000))  # the engine knows its space
    for start in range(0, 40_000, 1_000):
        engine.add(prompt(80, start))
    cache.stats()
    core = cache.server._host.core
    assert isinstance(core.below, DiskBelow)
    assert core.below._promotion.queued_chunks * 1024 <= 40 * 4096 // 4 + 5 * 1024
    engine.run()
    assert all(request.state == "finished" for request in engine.requests)
    cache.check_idle()


def test_an_error_in_the_tiers_own_code_shows_and_costs_no_request(
    disk: OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.start().engine().ask(prompt(80))
    cache = disk.start()

    async def broken(_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(cache.server._host.core.below._promotion, "_bring", broken)  # type: ignore[attr-defined]
    asked = cache.engine().ask(prompt(80))
    assert counts(asked) == (0, 0, 80)
    wait_until(lambda: "ZeroDivisionError" in cache.stats().tiers["disk"].health)
    assert counts(cache.engine(clock=patient).ask(prompt(80))) == (0, 79, 1), "from memory, and nobody waits"


def test_a_slow_drive_is_waited_for_once_and_again_when_it_has_recovered(disk: OnDisk) -> None:
    first = disk.start()
    for start in range(0, 20_000, 1_000):
        first.engine().ask(prompt(80, start))
    cache = disk.start(limits=DriveLimits(read_latency_s=0.3))
    below = cache.server._host.core.below
    assert isinstance(below, DiskBelow)
    starts = iter(range(0, 20_000, 1_000))

    def come_up() -> None:
        wait_until(lambda: below._promotion.queued_chunks == 0)

    asked = cache.engine().ask(prompt(80, next(starts)))  # worth 40 ms to an engine that is not known yet
    assert counts(asked) == (0, 0, 80)
    come_up()
    assert cache.stats().tiers["disk"].read_latency_s + 5 * 1024 / below.stats().read_bytes_per_s > 0.2
    for _ in range(3):  # an engine whose clock stands still would wait for ever
        assert counts(cache.engine(clock=patient).ask(prompt(80, next(starts)))) == (0, 0, 80)
        come_up()
    below._throttled._read_latency_s = 0.0
    asks = 0
    while counts(cache.engine(clock=patient).ask(prompt(80, next(starts)))) == (0, 0, 80):
        come_up()
        asks += 1
    assert asks <= 9, "what is read beside the requests tells"
    cache.check_idle()


def test_many_that_wait_cost_the_scheduler_a_few_questions_a_step(
    disk: OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.start().engine().ask(prompt(160))
    cache = disk.start(limits=DriveLimits(read_latency_s=0.5))
    engine = cache.engine(clock=patient, num_blocks=2_000, prefix_caching=False, step_tokens=4_096)
    engine.ask(prompt(20, 90_000))
    assert engine.client is not None
    asked: list[type[wire.Message]] = []
    call = engine.client.call

    def counted(request: wire.Message, reply_type: Any) -> Any:
        asked.append(type(request))
        return call(request, reply_type)

    monkeypatch.setattr(engine.client, "call", counted)
    requests = [engine.add([*prompt(160), number]) for number in range(100)]
    engine.step()
    assert asked.count(wire.Load) == 100
    for _ in range(20):
        asked.clear()
        engine.step()
        if engine.running:
            break
        assert asked.count(wire.More) <= 20
    engine.run()
    assert [counts(request) for request in requests] == [(0, 160, 1)] * 100
    cache.check_idle()
