"""A server process that is stopped, killed and started under programs that use the public interface.

Nothing they get is ever a wrong byte, no call takes long, nothing leaks, and the cache comes back by itself.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import stepwell
from stepwell import Cache, Space, wire
from stepwell.client import CALL_TIMEOUT_S
from support.chunks import content, key
from support.server import ServerProcess
from support.waiting import wait_until

CHUNK_BYTES = 4096
# A store is at most four calls, and each of them may meet the time-out once at most before all are misses at
# once; two busy cores may add to it.
BOUND_S = 4 * CALL_TIMEOUT_S + 1.0


@pytest.fixture
def cache(server: ServerProcess) -> Iterator[Cache]:
    cache = stepwell.connect(server.socket)
    yield cache
    server.signal(signal.SIGCONT)
    cache.close()


@pytest.fixture
def space(cache: Cache) -> Space:
    return cache.space("a model", 16, CHUNK_BYTES)


def fill(space: Space, keys: list[bytes]) -> int:
    with space.reserve(keys) as new:
        for chunk_key, view in new.items():
            view[:] = content(chunk_key, CHUNK_BYTES)
    return len(new)


def check(space: Space, keys: list[bytes]) -> int:
    """Load, look at every byte; how many chunks there were."""
    with space.load(keys) as lease:
        for chunk_key, view in zip(keys, lease.views, strict=False):
            assert bytes(view) == content(chunk_key, CHUNK_BYTES)
        return lease.chunks


def used_again(space: Space, cache: Cache) -> None:
    wait_until(lambda: space.store(key("again"), content(key("again"), CHUNK_BYTES)), of="the cache's return")
    stats = cache.stats()
    assert (stats["leases"], stats["reservations"]) == (0, 0)
    assert stats["tiers"]["memory"]["pinned_chunks"] == 0


def took_s(call: object) -> float:
    start_s = time.monotonic()
    assert callable(call)
    call()
    return time.monotonic() - start_s


def test_a_stopped_server_is_a_miss_once_slow_then_at_once(
    server: ServerProcess, cache: Cache, space: Space
) -> None:
    keys = space.keys(range(80))
    assert fill(space, keys) == 5
    server.signal(signal.SIGSTOP)
    assert took_s(lambda: check(space, keys)) < BOUND_S
    for call in (
        lambda: check(space, keys),
        lambda: fill(space, keys),
        lambda: space.lookup(keys),
        lambda: space.store(key(1), bytes(CHUNK_BYTES)),
        lambda: space.fetch(keys[0]),
        cache.stats,
        cache.clear,
        cache.flush,
    ):
        assert took_s(call) < 0.05
    assert space.lookup(keys).chunks == 0
    server.signal(signal.SIGCONT)
    used_again(space, cache)
    assert check(space, keys) == 5, "it is warm still"


@pytest.mark.parametrize("used_before", ["nothing", "a look-up", "all"])
def test_the_first_call_to_a_stopped_server_is_bounded_whatever_went_before(
    server: ServerProcess, cache: Cache, space: Space, used_before: str
) -> None:
    keys = space.keys(range(80))
    if used_before == "a look-up":
        assert space.lookup(keys).chunks == 0
    if used_before == "all":
        assert fill(space, keys) == 5
    server.signal(signal.SIGSTOP)
    assert took_s(lambda: check(space, keys)) < 2 * CALL_TIMEOUT_S + 0.5
    server.signal(signal.SIGCONT)
    used_again(space, cache)


def test_a_server_that_stops_inside_a_lease_and_a_reservation(
    server: ServerProcess, cache: Cache, space: Space
) -> None:
    keys = space.keys(range(80))
    fill(space, keys[:3])
    with space.load(keys) as lease, space.reserve(keys) as new:
        assert (lease.chunks, len(new)) == (3, 2)
        server.signal(signal.SIGSTOP)
        space.lookup(keys)
        assert [bytes(view) for view in lease.views] == [content(k, CHUNK_BYTES) for k in keys[:3]]
        for chunk_key, view in new.items():
            view[:] = content(chunk_key, CHUNK_BYTES)
    server.signal(signal.SIGCONT)
    used_again(space, cache)
    assert check(space, keys) == 5, "what was written while it was stopped was committed when it woke"


def test_a_server_killed_inside_a_lease_and_a_reservation(
    server: ServerProcess, cache: Cache, space: Space
) -> None:
    keys = space.keys(range(80))
    fill(space, keys[:3])
    with space.load(keys) as lease, space.reserve(keys) as new:
        server.kill()
        server.start()
        wait_until(lambda: bool(cache.stats()))
        assert fill(space, space.keys(range(4096), "other")) <= 256
        assert [bytes(view) for view in lease.views] == [content(k, CHUNK_BYTES) for k in keys[:3]]
        for view in new.values():
            view[:] = b"\xee" * CHUNK_BYTES
    used_again(space, cache)
    assert check(space, keys) == 0, "nothing of the old reservation reaches the new server"
    wait_until(lambda: fill(space, keys) == 5)
    assert check(space, keys) == 5


@pytest.mark.parametrize("ask", ["load", "reserve"])
def test_a_connection_that_breaks_between_an_answer_and_its_use(
    server: ServerProcess, cache: Cache, space: Space, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    """As when another thread's call times out just then: what was granted is given back, not used."""
    keys = space.keys(range(80))
    fill(space, keys[:3])
    call = cache._client.call

    def call_and_break(request: wire.Message, reply_type: type[wire.Message]) -> wire.Message | None:
        reply = call(request, reply_type)
        if isinstance(request, wire.Load | wire.Reserve):
            assert reply is not None
            server.signal(signal.SIGSTOP)
            assert call(wire.Ping(), wire.Pong) is None
        return reply

    monkeypatch.setattr(cache._client, "call", call_and_break)
    if ask == "load":
        assert check(space, keys) == 0
    else:
        assert fill(space, keys) == 0
    monkeypatch.undo()
    server.signal(signal.SIGCONT)
    used_again(space, cache)
    assert check(space, keys) == 3, "nothing that nobody wrote is visible"
    assert fill(space, keys) == 2


def test_killed_and_started_under_load(server: ServerProcess, cache: Cache, space: Space) -> None:
    """Four threads, three kills and three stops; every call bounded, every byte right."""
    stop = threading.Event()
    slowest_s = [0.0] * 4

    def work(thread: int) -> int:
        hits = turn = 0
        while not stop.is_set():
            turn += 1
            keys = space.keys([*range(64), *[(thread + turn) % 7] * 128])
            slowest_s[thread] = max(slowest_s[thread], took_s(lambda keys=keys: fill(space, keys)))
            start_s = time.monotonic()
            hits += check(space, keys)
            slowest_s[thread] = max(slowest_s[thread], time.monotonic() - start_s)
        return hits

    def hits() -> int:
        return int(cache.stats().get("hit_chunks", 0))

    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(work, thread) for thread in range(4)]
        try:
            for turn in range(6):
                before = hits()
                wait_until(lambda before=before: hits() > before + 20, 20, "hits")
                if turn % 2:
                    server.kill()
                    server.start()
                else:
                    server.signal(signal.SIGSTOP)
                    wait_until(lambda: not cache.connected)
                    server.signal(signal.SIGCONT)
                wait_until(lambda: hits() > 0, 20, "the cache's return")
        finally:
            stop.set()
            server.signal(signal.SIGCONT)
        assert all(worker.result(30) > 0 for worker in workers)
    # Every call of a store or load may wait for the time-out of another thread, then meet one of its own.
    assert max(slowest_s) < 2 * BOUND_S
    used_again(space, cache)
    stats = cache.stats()["tiers"]["memory"]
    assert stats["used_bytes"] == stats["chunks"] * CHUNK_BYTES


PROGRAM = """
import sys
sys.path[:0] = {path!r}
import stepwell
cache = stepwell.connect(sys.argv[1])
space = cache.space("a model", 16, 4096)
keys = space.keys(range(160))
with space.load(keys) as lease, space.reserve(keys) as new:
    print(lease.chunks, len(new), flush=True)
    sys.stdin.readline()
"""


def test_a_program_that_is_killed_leaves_its_chunks_and_nothing_else(
    server: ServerProcess, cache: Cache, space: Space
) -> None:
    keys = space.keys(range(160))
    fill(space, keys[:4])
    files = len(os.listdir(f"/proc/{server.pid}/fd"))
    for _ in range(3):
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(path=sys.path), str(server.socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert program.stdout is not None
        assert program.stdout.readline() == b"4 6\n"
        stats = cache.stats()
        assert (stats["sessions"], stats["leases"], stats["reservations"]) == (2, 1, 1)
        program.kill()
        program.communicate()
        wait_until(lambda: cache.stats()["sessions"] == 1)
        stats = cache.stats()
        assert (stats["leases"], stats["reservations"], stats["tiers"]["memory"]["pinned_chunks"]) == (
            0,
            0,
            0,
        )
        assert stats["tiers"]["memory"]["used_bytes"] == 4 * CHUNK_BYTES
    assert len(os.listdir(f"/proc/{server.pid}/fd")) == files
    assert check(space, keys) == 4


def test_a_program_that_starts_before_its_server(server: ServerProcess) -> None:
    server.stop()
    with stepwell.connect(server.socket) as cache:
        space = cache.space("a model", 16, CHUNK_BYTES)
        keys = space.keys(range(80))
        assert cache.connected is False
        assert took_s(lambda: fill(space, keys)) < 0.05
        assert (check(space, keys), cache.stats(), space.store(keys[0], bytes(CHUNK_BYTES))) == (0, {}, False)
        server.start()
        used_again(space, cache)
        assert fill(space, keys) == 5
        assert check(space, keys) == 5
