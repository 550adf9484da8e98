"""Which space an engine's chunks live in, on a real server."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from engine_kit import PATIENT_S, Cache

from stepwell import wire
from stepwell.client import ArenaClient, Client
from stepwell.engines.fake import FakeAdapter
from stepwell.engines.geometry import Geometry
from stepwell.engines.spaces import Adapter, Spaces
from stepwell.layout import EngineSpace
from stepwell.types import Reason, SpaceId
from support.waiting import wait_until

IDENTITY = EngineSpace("fake", "1", "m", b"w", None, "uint8", 16, 1, (), b"", "sha256", 2, 1)
Find = Callable[..., SpaceId | Reason]


@pytest.fixture
def find(cache: Cache) -> Iterator[Find]:
    """The space of an engine whose two workers have these layouts."""
    clients: list[Client | ArenaClient] = []

    def find(
        layouts: tuple[bytes, ...] = (b"a", b"b"),
        identity: EngineSpace | Reason = IDENTITY,
        adapter: bytes | Reason | None = None,
        geometry: Geometry = Geometry(16, 512, 1, 2),  # noqa: B008
    ) -> SpaceId | Reason:
        session = f"engine-{len(clients)}"
        client = Client(cache.server.dial, session, PATIENT_S)
        assert client.connect()
        clients.append(client)
        for rank, layout in enumerate(layouts):
            arenas = ArenaClient(cache.server.dial, session, rank, layout)
            assert arenas.connect()
            clients.append(arenas)

        def digest(_: Adapter) -> bytes | Reason:
            assert adapter is not None
            return adapter

        spaces = Spaces(client, geometry, lambda: identity, digest)
        asked = None if adapter is None else FakeAdapter("X")
        found = spaces.find(asked)
        assert spaces.find(asked) == found
        used = [] if isinstance(found, Reason) else [found]
        assert list(spaces.renew()) == used
        assert isinstance(found, Reason) or spaces.find(asked) not in (found, *Reason)
        return found

    yield find
    for client in clients:
        client.close()
    wait_until(lambda: cache.stats().sessions == 1)


def test_equal_engines_share_one(find: Find) -> None:
    assert find() == find()
    assert find(adapter=b"1") == find(adapter=b"1")


def test_whatever_differs_makes_another(find: Find) -> None:
    found = [
        find(),
        find((b"b", b"a")),  # as many bytes, but each rank holds what the other did
        find((b"a", b"a")),
        find((b"ab", b"")),
        find(identity=msgspec.structs.replace(IDENTITY, model_config="n")),
        find(identity=msgspec.structs.replace(IDENTITY, salt="")),
        find(identity=msgspec.structs.replace(IDENTITY, salt="None")),
        find(identity=msgspec.structs.replace(IDENTITY, kv_dtype="int8")),
        find(adapter=b""),
        find(adapter=b"1"),
        find(adapter=b"2"),
        find(geometry=Geometry(16, 1024, 1, 2)),
        find(geometry=Geometry(32, 512, 1, 2)),
    ]
    assert not any(isinstance(space, Reason) for space in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("layouts", [(), (b"a",), (b"a", b"b", b"c")])
def test_none_unless_exactly_its_workers_are_there(find: Find, layouts: tuple[bytes, ...]) -> None:
    assert find(layouts) == Reason.NO_WORKER


@pytest.mark.parametrize("reason", [Reason.IN_DOUBT, Reason.NO_WORKER])
def test_none_while_the_engine_or_the_adapter_is_in_doubt(find: Find, reason: Reason) -> None:
    assert find(identity=reason) == reason
    assert find(adapter=reason) == reason


def test_none_without_a_server() -> None:
    def dial() -> None:
        raise ConnectionRefusedError

    client = Client(dial, "alone")  # type: ignore[arg-type]
    spaces = Spaces(client, Geometry(16, 512, 1, 2), lambda: IDENTITY, lambda _: b"")
    assert spaces.find(None) == Reason.NO_SERVER


def test_the_server_is_not_asked_for_missing_workers_at_every_step(cache: Cache) -> None:
    client = Client(cache.server.dial, "lonely", PATIENT_S)
    assert client.connect()
    asked = []
    call = client.call

    def counting(request: wire.Message, reply_type: Any) -> Any:
        asked.append(type(request))
        return call(request, reply_type)

    client.call = counting  # type: ignore[method-assign]
    spaces = Spaces(client, Geometry(16, 512, 1, 2), lambda: IDENTITY, lambda _: b"")
    begun_s = time.monotonic()
    for _ in range(1_000):
        assert spaces.find(None) is Reason.NO_WORKER
    took_s = time.monotonic() - begun_s
    assert 1 <= asked.count(wire.Workers) <= 1 + took_s / 0.1
    client.close()
