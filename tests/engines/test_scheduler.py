"""The scheduler's half, by what the server holds for it after each step."""

import itertools
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_kit import PATIENT_S, Cache, GatedCopier, counts, prompt

from stepwell import wire
from stepwell.client import ArenaClient, Client
from stepwell.embedded import EmbeddedServer
from stepwell.engines.fake import FakeEngine, FakeRequest
from stepwell.engines.geometry import Geometry
from stepwell.engines.jobs import Done
from stepwell.engines.scheduler import SchedulerSide
from stepwell.engines.spaces import Adapter, Spaces
from stepwell.layout import EngineSpace
from stepwell.types import Reason, SpaceId
from support.waiting import wait_until

B = 16


def copier_of(engine: FakeEngine) -> GatedCopier:
    assert engine.worker is not None
    copier = engine.worker._copier
    assert isinstance(copier, GatedCopier)
    return copier


class TestAbort:
    """In every state of a request; the `cache` fixture checks what is left."""

    def test_before_it_is_asked_about(self, cache: Cache) -> None:
        engine = cache.engine()
        engine.abort(engine.add(prompt(80)))
        engine.run()
        cache.check_idle()
        assert cache.memory.chunks == 0

    def test_while_it_is_promised_but_does_not_fit(self, cache: Cache) -> None:
        cache.engine().ask(prompt(80))
        engine = cache.engine(num_blocks=8)
        engine.add(prompt(80, 5000), 20)
        engine.step()
        waiting = engine.add(prompt(80))
        engine.step()
        assert waiting.state == "waiting"
        assert (cache.stats().leases, cache.memory.pinned_chunks) == (1, 5)
        engine.abort(waiting)
        assert (cache.stats().leases, cache.memory.pinned_chunks) == (0, 0)
        engine.run()
        cache.check_idle()

    def test_between_promise_and_load(self, cache: Cache) -> None:
        cache.engine().ask(prompt(80))
        engine = cache.engine()
        asked = engine.add(prompt(80))
        step = engine.schedule()
        assert (cache.stats().leases, cache.memory.pinned_chunks) == (1, 5)
        engine.abort(asked)
        assert cache.stats().leases == 1  # its workers will copy
        engine.execute(step)
        cache.check_idle()

    def test_during_the_load(self, cache: Cache) -> None:
        cache.engine().ask(prompt(80))
        engine = cache.engine(copier=GatedCopier)
        asked = engine.add(prompt(80))
        copier_of(engine).during = lambda: engine.abort(asked)
        engine.step()
        assert asked.state == "aborted"
        engine.run()
        cache.check_idle()
        assert counts(cache.engine().ask(prompt(80))) == (0, 79, 1)

    def test_while_it_is_stored(self, cache: Cache) -> None:
        engine = cache.engine(copier=GatedCopier)
        asked = engine.add(prompt(80), 5)
        engine.step()
        engine.abort(asked)
        assert cache.stats().reservations == 1
        engine.run()
        cache.check_idle()
        assert counts(cache.engine().ask(prompt(80))) == (0, 64, 16)  # a step computed 64

    def test_in_the_tick_it_completes(self, cache: Cache) -> None:
        engine = cache.engine()
        asked = engine.add(prompt(40))
        step = engine.schedule()
        engine.abort(asked)
        engine.execute(step)
        engine.abort(asked)
        cache.check_idle()
        assert cache.memory.chunks == 2

    def test_after_it_completed(self, cache: Cache) -> None:
        engine = cache.engine()
        asked = engine.ask(prompt(40))
        engine.abort(asked)
        assert asked.state == "finished"
        cache.check_idle()

    def test_64_at_once_twenty_times(self, cache: Cache) -> None:
        cache.engine().ask(prompt(48))
        engine = cache.engine(num_blocks=400, step_tokens=512, prefix_caching=False)
        for times in range(20):
            asked = [engine.add(prompt(48) + prompt(10, 10_000 + n)) for n in range(64)]
            step = engine.schedule() if times % 2 else None
            for request in asked:
                engine.abort(request)
            if step is not None:
                engine.execute(step)
            cache.check_idle()
        assert counts(engine.ask([*prompt(48), 1])) == (0, 48, 1)


def test_asked_at_every_step_counts_once(cache: Cache) -> None:
    cache.engine().ask(prompt(80))
    before = cache.stats()
    engine = cache.engine(num_blocks=8)
    engine.add(prompt(80, 5000), 20)
    engine.step()
    engine.step()
    waiting = engine.add(prompt(80))
    for _ in range(10):
        engine.step()
        assert waiting.state == "waiting"
    engine.run()
    stats = cache.stats()
    assert counts(waiting) == (0, 79, 1)
    assert stats.lookups - before.lookups == 2
    assert stats.hit_chunks - before.hit_chunks == 5
    assert stats.missed[Reason.NOT_HELD] - before.missed[Reason.NOT_HELD] == 5
    assert stats.requests.requests - before.requests.requests == 2


def calls_of(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[type[wire.Message]]:
    """What the engine asks its server from now on."""
    calls: list[type[wire.Message]] = []
    client = engine.client
    assert client is not None
    call = client.call

    def counted(request: wire.Message, reply_type: Any) -> Any:
        calls.append(type(request))
        return call(request, reply_type)

    monkeypatch.setattr(client, "call", counted)
    return calls


def test_a_step_without_news_asks_the_server_nothing(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = cache.engine()
    engine.add(prompt(B), 3 * B)
    engine.step()
    engine.step()
    calls = calls_of(engine, monkeypatch)
    for _ in range(B - 3):
        engine.step()
    assert calls == []
    engine.run()
    # One for each chunk that the answer fills.
    assert calls == [wire.Reserve] * 2


def test_reset_forgets_what_is_held(cache: Cache) -> None:
    engine = cache.engine(prefix_caching=False)
    engine.ask(prompt(80))
    engine.ask(prompt(80), adapter="A")
    assert engine.scheduler is not None
    engine.scheduler.reset()
    assert cache.memory.chunks == 0
    assert counts(engine.ask(prompt(80))) == (0, 0, 80)
    assert counts(engine.ask(prompt(80))) == (0, 79, 1)


def test_after_a_reset_nothing_is_shared_with_engines_that_were_not(cache: Cache) -> None:
    replaced, other = cache.engine(prefix_caching=False), cache.engine(prefix_caching=False)
    replaced.ask(prompt(80))
    assert counts(other.ask(prompt(80))) == (0, 79, 1)
    assert replaced.scheduler is not None
    replaced.scheduler.reset()  # as after new weights: what it computes now belongs to no file's space
    replaced.ask(prompt(80))
    assert counts(other.ask(prompt(80))) == (0, 0, 80)
    assert counts(replaced.ask(prompt(80))) == (0, 79, 1)
    assert counts(other.ask(prompt(80))) == (0, 79, 1)


def test_a_request_under_way_at_a_reset_stores_nothing_more(cache: Cache) -> None:
    engine = cache.engine(prefix_caching=False)
    engine.add(prompt(80), 40)
    engine.step()
    assert engine.scheduler is not None
    engine.scheduler.reset()
    engine.run()
    assert cache.memory.chunks == 0


@pytest.fixture
def small() -> Iterator[Cache]:
    """Room for three chunks."""
    small = Cache(3 * 4096)
    yield small
    small.close()


def test_a_full_arena_keeps_what_fits(small: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small.engine(prefix_caching=False)
    expected = FakeEngine(None).ask(prompt(100), 3).new_tokens
    assert engine.ask(prompt(100), 3).new_tokens == expected
    assert small.memory.chunks == 3
    assert small.stats().dropped[Reason.NO_ROOM] == 1  # of the four in the first step; then no more
    calls = calls_of(engine, monkeypatch)
    for _ in range(3):
        asked = engine.ask(prompt(100), 3 * B)
        assert counts(asked) == (0, 48, 52)
        assert asked.new_tokens[:3] == expected
    # Asked once, and not at each of the 48 steps that follow.
    assert calls.count(wire.Reserve) == 3
    small.check_idle()


def test_evicted_between_two_steps_is_stored_again(cache: Cache) -> None:
    engine = cache.engine()
    asked = engine.add(prompt(B), 5 * B)
    for _ in range(2 * B + 2):
        engine.step()
    cache.clear()
    engine.run()
    held = (asked.num_tokens - 1) // B
    assert cache.memory.chunks == held
    assert counts(cache.engine().ask(asked.tokens))[1] == held * B


# -- several ranks, driven by hand ------------------------------------------------------------------------


class TwoRanks:
    """The scheduler of an engine with two workers, which the test plays itself."""

    def __init__(self, cache: Cache) -> None:
        self.client = Client(cache.server.dial, "two", PATIENT_S)
        assert self.client.connect()
        self.arenas = [ArenaClient(cache.server.dial, "two", rank, bytes([rank])) for rank in (0, 1)]
        geometry = Geometry(B, 512, 1, ranks=2)
        identity = EngineSpace("fake", "1", "m", b"", None, "uint8", B, 1, (), b"", "sha256", 2, 1)
        spaces = Spaces(self.client, geometry, lambda: identity, lambda _: b"")
        self.scheduler = SchedulerSide(self.client, spaces, geometry)

    def start(self, request: FakeRequest, tokens: int) -> Any:
        matched = self.scheduler.matched_tokens(request, 0)
        blocks = list(range(1, 10))
        self.scheduler.allocated(request, blocks, matched)
        return self.scheduler.step({request.request_id: (True, blocks)}, {request.request_id: tokens})

    def close(self) -> None:
        self.client.close()
        for arena in self.arenas:
            arena.close()


def request_of(tokens: list[int], name: str = "r") -> FakeRequest:
    request = FakeRequest(name, tokens, len(tokens), 1, None, None, False, B)
    request.extend()
    return request


@pytest.fixture
def two(cache: Cache) -> Any:
    two = TwoRanks(cache)
    yield two
    two.close()


def test_no_chunks_before_every_worker_is_there(cache: Cache, two: TwoRanks) -> None:
    assert not two.start(request_of(prompt(40)), 40).stores
    two.arenas[1].connect()
    assert not two.start(request_of(prompt(40), "s"), 40).stores
    assert cache.stats().missed[Reason.NO_WORKER] == 2 * 2
    two.arenas[0].connect()
    names = map(str, itertools.count())  # the workers are asked after now and then
    wait_until(lambda: two.start(request_of(prompt(40), next(names)), 40).stores != [])


@pytest.fixture
def stored(two: TwoRanks) -> int:
    for arena in two.arenas:
        arena.connect()
    (job,) = two.start(request_of(prompt(40)), 40).stores
    assert len(job.blocks) == 2
    return int(job.number)


def ping(two: TwoRanks) -> None:
    assert two.client.call(wire.Ping(), wire.Pong) is not None


def done(stores: dict[int, int], failed: set[int]) -> Done:
    result = Done(failed_stores=failed)
    result.stores.update(stores)
    return result


def test_a_chunk_is_visible_when_the_last_rank_has_written(cache: Cache, two: TwoRanks, stored: int) -> None:
    two.scheduler.copied(done({stored: 1}, set()))
    ping(two)
    assert (cache.memory.chunks, cache.stats().reservations) == (0, 1)
    assert two.scheduler.copying
    two.scheduler.copied(done({stored: 1}, set()))
    ping(two)
    assert (cache.memory.chunks, cache.stats().reservations) == (2, 0)
    assert not two.scheduler.copying


@pytest.mark.parametrize("failed_first", [True, False])
def test_slots_are_kept_until_the_last_rank_is_done_though_another_failed(
    cache: Cache, two: TwoRanks, stored: int, failed_first: bool
) -> None:
    two.scheduler.copied(done({stored: 1}, {stored} if failed_first else set()))
    ping(two)
    assert (cache.stats().reservations, cache.memory.used_bytes) == (1, 2 * 4096)  # rank 1 still copies
    two.scheduler.copied(done({stored: 1}, set() if failed_first else {stored}))
    ping(two)
    assert (cache.stats().reservations, cache.memory.chunks, cache.memory.used_bytes) == (0, 0, 0)
    assert not two.scheduler.copying


def test_a_lease_ends_with_the_last_rank(cache: Cache, two: TwoRanks, stored: int) -> None:
    two.scheduler.copied(done({stored: 2}, set()))
    (job,) = two.start(request_of(prompt(40), "again"), 40).loads
    for left in (1, 0):
        result = Done()
        result.loads[job.number] = 1
        two.scheduler.copied(result)
        ping(two)
        assert cache.stats().leases == left


# -- another server between two calls ---------------------------------------------------------------------


class Swapped:
    """Spaces that are found, and then, before they are used, the server is replaced by another."""

    def __init__(self, spaces: Spaces, swap: Callable[[], None]) -> None:
        self._spaces = spaces
        self._swap = swap

    def find(self, adapter: Adapter | None) -> SpaceId | Reason:
        space = self._spaces.find(adapter)
        self._swap()
        return space


@pytest.mark.parametrize("swap_at", [1, 2])
def test_what_another_server_granted_meanwhile_is_given_back(swap_at: int) -> None:
    old, new = EmbeddedServer(1 << 20, "lru"), EmbeddedServer(1 << 20, "lru")
    servers = [old]

    def dial() -> socket.socket:
        return servers[-1].dial()

    engine = FakeEngine(dial, call_timeout_s=PATIENT_S)
    other = FakeEngine(new.dial, call_timeout_s=PATIENT_S)
    watch = Client(new.dial, "watch", PATIENT_S)
    try:
        other.ask(prompt(40))
        assert watch.connect()
        engine.ask(prompt(20, 9))
        client, scheduler = engine.client, engine.scheduler
        assert client is not None
        assert scheduler is not None
        finds = 0
        before = client.server_id
        call = client.call

        def swap() -> None:
            nonlocal finds
            finds += 1
            if finds == swap_at:
                servers.append(new)

        def swapping(request: wire.Message, reply_type: Any) -> Any:
            # As if the connection had been replaced between the reading of `server_id` and the call.
            if len(servers) == 2 and client.server_id == before:
                channel = client._channel
                assert channel is not None
                channel.sock.shutdown(2)
                assert call(wire.Ping(), wire.Pong) is None
                wait_until(lambda: client.server_id not in (None, before))
            return call(request, reply_type)

        client.call = swapping  # type: ignore[method-assign]
        scheduler._spaces = Swapped(scheduler._spaces, swap)  # type: ignore[assignment]
        asked = engine.add(prompt(40) if swap_at == 1 else prompt(50, 70))
        engine.run()
        assert asked.state == "finished"
        engine.run()
        assert client.call(wire.Ping(), wire.Pong) is not None
        reply = watch.call(wire.GetStats(), wire.Stats)
        assert reply is not None
        stats = reply.stats
        assert (stats.leases, stats.reservations) == (0, 0)
        assert stats.tiers["memory"].pinned_chunks == 0
    finally:
        for one in (engine, other, watch):
            one.close()
        for server in (old, new):
            server.close()


def test_requests_that_need_more_than_there_is_do_not_evict_each_other_for_ever() -> None:
    """Eight of them, 12 chunks in and 20 out each, in an arena that holds a little more than the prompts."""
    cache = Cache(100 * 4096)
    engine = cache.engine(num_blocks=8 * 33 + 1, step_tokens=256)
    requests = [engine.add(prompt(12 * B, 10_000 * number), 20 * B) for number in range(1, 9)]
    engine.run()
    assert [len(request.new_tokens) for request in requests] == [20 * B] * 8
    # The prompts and the answers, and once more for each request what it found evicted.
    assert cache.memory.stored_chunks <= 2 * 8 * (12 + 20)
    cache.close()
