"""What only the embedded cache does: its server begins and ends in this process."""

import gc
import os
import threading

import pytest

import stepwell
from stepwell import wire
from stepwell.embedded import EmbeddedServer
from stepwell.tiers.arena import ArenaTooLarge
from support.server import RawClient


def resources() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_a_hundred_caches_opened_and_closed_leave_nothing() -> None:
    with stepwell.open(memory="1MiB"):
        pass  # what is imported and made once
    before = resources()
    for _ in range(100):
        with stepwell.open(memory="1MiB") as cache:
            space = cache.space("a model", 16, 4096)
            assert space.store(b"k" * 32, bytes(4096))
    assert resources() == before


@pytest.mark.parametrize(
    ("memory", "eviction", "error", "message"),
    [
        ("1000TiB", "lru", ArenaTooLarge, "choose a smaller --memory"),
        (0, "lru", ValueError, "memory must be at least 4096 bytes"),
        (4095, "lru", ValueError, "memory must be at least 4096 bytes"),
        ("4G", "lru", ValueError, "'4G' is not a size"),
        (-1, "lru", ValueError, "'-1' is not a size"),
        ("1MiB", "mru", ValueError, "mru"),
    ],
)
def test_a_cache_that_cannot_be_says_why_and_leaves_nothing(
    memory: str | int, eviction: str, error: type[Exception], message: str
) -> None:
    before = resources()
    with pytest.raises(error, match=message):
        stepwell.open(memory=memory, eviction=eviction)
    assert resources() == before


def test_memory_is_the_whole_arena_in_whole_pages() -> None:
    with stepwell.open(memory=10_000) as cache:
        assert cache.stats()["tiers"]["memory"]["limit_bytes"] == 8192


def test_dialling_a_closed_server_is_refused_and_closing_ends_every_connection() -> None:
    before = resources()
    server = EmbeddedServer(1 << 20, "lru")
    clients = [RawClient(server.dial()) for _ in range(3)]
    for client in clients:
        client.hello("one", maps_arena=True)
        assert client.call(wire.Ping()) == wire.Pong()
    assert clients[0].stats().sessions == 1
    server.close()
    server.close()
    for client in clients:
        assert client.ended()
        client.close()
    with pytest.raises(ConnectionRefusedError, match="the embedded cache is closed"):
        server.dial()
    assert resources() == before
