"""The public interface, embedded and through a server process: one suite, the same answers."""

import json
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy
import pytest

import stepwell
from stepwell import Cache, Hit, Reason, Space
from support.chunks import content, key
from support.server import ServerProcess, running_server

CHUNK_BYTES = 4096
ARENA_CHUNKS = 256
KINDS = ["embedded", "connected"]


@pytest.fixture(scope="module")
def one_server() -> Iterator[ServerProcess]:
    with running_server() as server:
        yield server


@contextmanager
def open_cache(kind: str, server: ServerProcess) -> Iterator[Cache]:
    """An empty cache of 1 MiB."""
    if kind == "embedded":
        cache = stepwell.open(memory="1MiB")
    else:
        cache = stepwell.connect(server.socket)
        cache.clear()
    try:
        yield cache
    finally:
        cache.close()


@pytest.fixture(params=KINDS)
def cache(request: pytest.FixtureRequest, one_server: ServerProcess) -> Iterator[Cache]:
    with open_cache(request.param, one_server) as cache:
        assert cache.connected
        yield cache
        assert at_rest(cache), "whatever a test does, nothing stays pinned or reserved"


@pytest.fixture
def space(cache: Cache) -> Space:
    return cache.space("a model", chunk_tokens=16, chunk_bytes=CHUNK_BYTES)


def at_rest(cache: Cache) -> bool:
    stats = cache.stats()
    if not stats:
        return not cache.connected
    return (stats["leases"], stats["reservations"], memory(cache)["pinned_chunks"]) == (0, 0, 0)


def memory(cache: Cache) -> dict[str, int]:
    found: dict[str, int] = cache.stats()["tiers"]["memory"]
    return found


def fill(space: Space, keys: list[bytes]) -> int:
    """Store what is not held; how many chunks were written."""
    with space.reserve(keys) as new:
        for chunk_key, view in new.items():
            view[:] = content(chunk_key, space.chunk_bytes)
    return len(new)


def right(space: Space, keys: list[bytes]) -> list[bytes]:
    return [content(chunk_key, space.chunk_bytes) for chunk_key in keys]


def loaded(space: Space, keys: list[bytes]) -> list[bytes]:
    with space.load(keys) as lease:
        assert lease.chunks == len(lease.views)
        return [bytes(view) for view in lease.views]


def test_what_is_reserved_and_written_is_found_and_loaded(cache: Cache, space: Space) -> None:
    keys = space.keys(range(100))
    assert len(keys) == 6
    assert space.lookup(keys) == Hit(0, ())
    before = cache.stats()
    with space.reserve(keys) as new:
        assert list(new) == keys
        assert new.stopped is None
        assert [(view.nbytes, view.readonly) for view in new.values()] == [(CHUNK_BYTES, False)] * 6
        for chunk_key, view in new.items():
            view[:] = content(chunk_key, CHUNK_BYTES)
        assert space.lookup(keys) == Hit(0, ()), "not before it is left"
        assert cache.stats()["reservations"] == 1
    assert space.lookup(keys) == Hit(6, ("memory",) * 6)
    assert space.lookup([*keys[:3], key("other"), *keys[3:]]).chunks == 3
    assert loaded(space, keys) == right(space, keys)
    assert loaded(space, [*keys, key("next")]) == right(space, keys)
    after = cache.stats()
    assert after["lookups"] - before["lookups"] == 2, "a look-up is a question: only loads count"
    assert after["hit_chunks"] - before["hit_chunks"] == 12
    assert after["missed"]["not_held"] - before["missed"]["not_held"] == 1


def test_only_what_is_new_is_reserved(space: Space) -> None:
    keys = space.keys(range(96))
    assert fill(space, keys[:2]) == 2
    with space.reserve(keys) as new:
        assert list(new) == keys[2:]
        with space.reserve(keys) as nested:
            assert len(nested) == 0, "somebody writes them"
        for chunk_key, view in new.items():
            view[:] = content(chunk_key, CHUNK_BYTES)
    assert loaded(space, keys) == right(space, keys)
    with space.reserve(keys) as new:
        assert dict(new) == {}


def test_an_exception_inside_a_reservation_makes_nothing_visible(cache: Cache, space: Space) -> None:
    keys = space.keys(range(48))
    dropped = cache.stats()["dropped"]["abandoned"]
    with pytest.raises(ZeroDivisionError), space.reserve(keys) as new:
        new[keys[0]][:] = b"x" * CHUNK_BYTES
        _ = 1 / 0
    assert space.lookup(keys).chunks == 0
    assert memory(cache)["used_bytes"] == 0
    assert cache.stats()["dropped"]["abandoned"] - dropped == 3
    assert fill(space, keys) == 3, "and they can be stored after all"
    assert loaded(space, keys) == right(space, keys)


def test_views_are_over_when_their_block_is(space: Space) -> None:
    keys = space.keys(range(16))
    with space.reserve(keys) as new:
        writable = new[keys[0]]
        writable[:] = content(keys[0], CHUNK_BYTES)
    with pytest.raises(ValueError, match="released"):
        writable[0] = 1
    with space.load(keys) as lease:
        (view,) = lease.views
    with pytest.raises(ValueError, match="released"):
        bytes(view)


def test_loaded_views_are_read_only(space: Space) -> None:
    keys = space.keys(range(16))
    fill(space, keys)
    with space.load(keys) as lease:
        assert lease.views[0].readonly
        with pytest.raises(TypeError, match="read-only"):
            lease.views[0][0] = 1
        assert not numpy.frombuffer(lease.views[0], dtype="uint8").flags.writeable


def test_what_holds_a_view_may_outlive_the_block(space: Space) -> None:
    keys = space.keys(range(16))
    with space.reserve(keys) as new:
        new[keys[0]][:] = content(keys[0], CHUNK_BYTES)
        holder = pickle.PickleBuffer(new[keys[0]])  # the view cannot be released
    assert bytes(holder.raw()) == content(keys[0], CHUNK_BYTES)
    assert loaded(space, keys) == right(space, keys)


def test_a_lease_keeps_its_chunks_while_others_fill_the_arena(cache: Cache, space: Space) -> None:
    keys = space.keys(range(160))
    fill(space, keys)
    with space.load(keys) as lease:
        assert memory(cache)["pinned_chunks"] == 10
        for turn in range(3):
            others = space.keys(range(16 * ARENA_CHUNKS), salt=str(turn))
            assert fill(space, others) == ARENA_CHUNKS - 10
        assert [bytes(view) for view in lease.views] == right(space, keys)
    assert memory(cache)["chunks"] == ARENA_CHUNKS
    assert fill(space, space.keys(range(16 * ARENA_CHUNKS), salt="after")) == ARENA_CHUNKS
    assert space.lookup(keys).chunks == 0


def test_a_prompt_longer_than_the_arena_is_kept_as_far_as_there_is_room(cache: Cache, space: Space) -> None:
    keys = space.keys(range(16 * (ARENA_CHUNKS + 50)))
    evicted = memory(cache)["evicted_chunks"]
    for _ in range(3):
        with space.reserve(keys) as new:
            for chunk_key, view in new.items():
                view[:] = content(chunk_key, CHUNK_BYTES)
        assert new.stopped is Reason.NO_ROOM
        assert space.lookup(keys).chunks == ARENA_CHUNKS
    assert memory(cache)["evicted_chunks"] == evicted, "never its own beginning"
    assert loaded(space, keys) == right(space, keys[:ARENA_CHUNKS])


def test_a_chunk_larger_than_the_arena_has_no_room(cache: Cache) -> None:
    space = cache.space("large", 16, 2 << 20)
    with space.reserve([key("large")]) as new:
        assert (len(new), new.stopped) == (0, Reason.NO_ROOM)
    assert space.store(key("large"), bytes(2 << 20)) is False
    assert space.fetch(key("large")) is None


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: memoryview(b).cast("I")])
def test_store_and_fetch_one_chunk(space: Space, kind: type) -> None:
    data = content(key(1), CHUNK_BYTES)
    assert space.fetch(key(1)) is None
    assert space.store(key(1), kind(data)) is True
    assert space.fetch(key(1)) == data
    assert space.store(key(1), bytes(CHUNK_BYTES)) is True, "it is held, as it was"
    assert space.fetch(key(1)) == data


def test_chunks_stored_one_by_one_are_a_run(space: Space) -> None:
    keys = space.keys(range(16 * 8))
    for chunk_key in keys[1:]:
        space.store(chunk_key, content(chunk_key, CHUNK_BYTES))
    assert space.lookup(keys) == Hit(0, ()), "the first is missing"
    assert loaded(space, keys) == []
    assert space.store(keys[0], content(keys[0], CHUNK_BYTES)) is True
    assert space.lookup(keys) == Hit(8, ("memory",) * 8)
    assert loaded(space, keys) == right(space, keys)


def test_salts_and_spaces_never_meet(cache: Cache, space: Space) -> None:
    prompt = range(64)
    fill(space, space.keys(prompt, salt="tenant"))
    assert space.lookup(space.keys(prompt, salt="tenant")).chunks == 4
    for salt in (None, "", "Tenant", "tenant\0", b"tenant"):
        assert space.lookup(space.keys(prompt, salt=salt)).chunks == 0
    keys = space.keys(prompt, salt="tenant")
    others = [("b model", 16, 4096), ("a model", 32, 4096), ("a model", 16, 8192), (b"a model", 16, 4096)]
    for other in others:
        assert cache.space(*other).lookup(keys).chunks == 0
        assert cache.space(*other).fetch(keys[0]) is None
    assert cache.space("a model", 16, 4096).lookup(keys).chunks == 4
    assert len({(s.chunk_tokens, s.chunk_bytes) for s in (cache.space(*other) for other in others)}) == 3


def test_wrong_sizes_are_errors(cache: Cache, space: Space) -> None:
    for data in (b"", bytes(CHUNK_BYTES - 1), bytes(CHUNK_BYTES + 1)):
        with pytest.raises(ValueError, match=f"a chunk of this space has 4096 bytes, not {len(data)}"):
            space.store(key(1), data)
    for bad in (b"", b"short", key(1) + b"x"):
        for call in (
            space.lookup,
            lambda keys: space.load(keys).__enter__(),
            lambda keys: space.reserve(keys).__enter__(),
        ):
            with pytest.raises(ValueError, match=f"a key has 32 bytes, not {len(bad)}"):
                call([key(1), bad])
        with pytest.raises(ValueError, match="a key has 32 bytes"):
            space.fetch(bad)
    for chunk_tokens, chunk_bytes in ((0, 4096), (16, 0), (-1, 4096)):
        with pytest.raises(ValueError, match="a chunk needs at least 1 token and 1 byte"):
            cache.space("a model", chunk_tokens, chunk_bytes)
    with pytest.raises(ValueError, match="token ids"):
        space.keys([-1] * 16)
    assert cache.connected, "no error reaches the server"


def test_nothing_asked_is_nothing_found(space: Space) -> None:
    assert space.lookup([]) == Hit(0, ())
    with space.load([]) as lease:
        assert lease.views == []
    with space.reserve([]) as new:
        assert (dict(new), new.stopped) == ({}, None)
    assert space.keys(range(15)) == []


def test_the_same_key_twice_is_reserved_once(space: Space) -> None:
    assert fill(space, [key(1), key(1), key(2)]) == 2
    assert loaded(space, [key(1)]) == right(space, [key(1)])


def test_chunks_of_two_sizes_share_the_arena(cache: Cache, space: Space) -> None:
    large = cache.space("a large model", 16, 3 * CHUNK_BYTES)
    for turn in range(5):
        small_keys, large_keys = space.keys(range(800), str(turn)), large.keys(range(800), str(turn))
        assert (fill(space, small_keys), fill(large, large_keys)) == (50, 50)
        assert loaded(space, small_keys) == right(space, small_keys)
        assert loaded(large, large_keys) == right(large, large_keys)
    assert memory(cache)["used_bytes"] <= memory(cache)["limit_bytes"] == 1 << 20


def test_clear_forgets_all_and_a_lease_keeps_its_bytes(cache: Cache, space: Space) -> None:
    keys = space.keys(range(48))
    fill(space, keys)
    with space.load(keys) as lease:
        assert cache.clear() == 3
        assert space.lookup(keys).chunks == 0
        assert fill(space, space.keys(range(16 * 300), "other")) == ARENA_CHUNKS - 3
        assert [bytes(view) for view in lease.views] == right(space, keys)
    assert cache.clear() == ARENA_CHUNKS - 3
    assert memory(cache)["used_bytes"] == 0


def test_stats_are_plain_data(cache: Cache, space: Space) -> None:
    fill(space, space.keys(range(32)))
    stats = cache.stats()
    assert json.loads(json.dumps(stats)) == stats
    assert set(stats) == {
        *("version", "server_id", "uptime_s", "sessions", "spaces", "leases", "reservations"),
        *("lookups", "hit_chunks", "missed", "dropped", "requests", "tiers"),
        *("checked_chunks", "differing_chunks", "closed_spaces"),
    }
    assert set(stats["missed"]) == set(stats["dropped"]) == {reason.value for reason in Reason}
    assert stats["requests"]["requests"] == stats["requests"]["prompt_tokens"] == 0
    tier = stats["tiers"]["memory"]
    assert (tier["chunks"], tier["used_bytes"], tier["limit_bytes"]) == (2, 2 * CHUNK_BYTES, 1 << 20)


def test_flush_returns(cache: Cache) -> None:
    cache.flush()


def test_after_close_everything_is_a_miss_at_once(cache: Cache, space: Space) -> None:
    keys = space.keys(range(48))
    fill(space, keys)
    cache.close()
    cache.close()
    assert cache.connected is False
    assert space.lookup(keys) == Hit(0, ())
    assert loaded(space, keys) == []
    with space.reserve(keys) as new:
        assert (dict(new), new.stopped) == ({}, Reason.NO_SERVER)
    assert space.store(keys[0], bytes(CHUNK_BYTES)) is False
    assert space.fetch(keys[0]) is None
    assert (cache.stats(), cache.clear()) == ({}, 0)
    cache.flush()


def test_closing_inside_a_block_ends_it_quietly(cache: Cache, space: Space) -> None:
    keys = space.keys(range(48))
    fill(space, keys)
    with space.load(keys) as lease, space.reserve([key("new")]) as new:
        cache.close()
        assert [bytes(view) for view in lease.views] == right(space, keys)
        new[key("new")][:] = bytes(CHUNK_BYTES)


def test_a_cache_is_a_context_manager(one_server: ServerProcess) -> None:
    for made in (stepwell.open(memory="1MiB"), stepwell.connect(one_server.socket)):
        with made as cache:
            assert cache is made
            assert cache.connected
        assert not made.connected


def test_eight_threads_store_and_load_at_once(cache: Cache, space: Space) -> None:
    """Prompts share beginnings, the arena is too small for all: any wrong byte shows."""
    started = threading.Barrier(8)

    def work(thread: int) -> int:
        started.wait(10)
        hits = 0
        for turn in range(25):
            keys = space.keys([*range(160), *[(thread + turn) % 5] * 320])
            fill(space, keys)
            with space.load(keys) as lease:
                hits += lease.chunks
                for chunk_key, view in zip(keys, lease.views, strict=False):
                    assert bytes(view) == content(chunk_key, CHUNK_BYTES)
            assert space.lookup(keys).chunks <= len(keys)
            single = key((thread, turn))
            assert space.store(single, content(single, CHUNK_BYTES))
            assert space.fetch(single) in (None, content(single, CHUNK_BYTES))
        return hits

    with ThreadPoolExecutor(8) as pool:
        hits = list(pool.map(work, range(8)))
    assert all(each > 0 for each in hits)
    stats = cache.stats()
    assert stats["tiers"]["memory"]["used_bytes"] == stats["tiers"]["memory"]["chunks"] * CHUNK_BYTES


def test_several_caches_of_one_server_share_its_chunks(one_server: ServerProcess) -> None:
    with open_cache("connected", one_server) as one, stepwell.connect(one_server.socket) as other:
        mine, yours = (cache.space("a model", 16, CHUNK_BYTES) for cache in (one, other))
        keys = mine.keys(range(48))
        fill(mine, keys)
        assert loaded(yours, keys) == right(yours, keys)
        with yours.load(keys) as lease:
            one.clear()
            fill(mine, mine.keys(range(16 * 300), "other"))
            assert [bytes(view) for view in lease.views] == right(mine, keys)


def test_two_embedded_caches_are_two() -> None:
    with stepwell.open(memory="1MiB") as one, stepwell.open(memory=1 << 20, eviction="s3fifo") as other:
        fill(one.space("a model", 16, CHUNK_BYTES), [key(1)])
        assert other.space("a model", 16, CHUNK_BYTES).lookup([key(1)]).chunks == 0
        assert one.stats()["server_id"] != other.stats()["server_id"]
