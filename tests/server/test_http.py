import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stepwell.config import HttpAddress
from stepwell.server.http import HttpServer, start_http
from stepwell.types import CacheStats, Reason, RequestStats, TierStats

HEALTHY = {"memory": "ok"}
ANY_PORT = HttpAddress("127.0.0.1", 0)
STATS = CacheStats(
    version="1.2.3",
    server_id="abcd",
    uptime_s=12.5,
    sessions=1,
    spaces=2,
    leases=3,
    reservations=4,
    lookups=5,
    hit_chunks=6,
    missed={Reason.NOT_HELD: 7},
    dropped={Reason.NO_ROOM: 8},
    requests=RequestStats(
        requests=9, prompt_tokens=60, engine_hit_tokens=10, stepwell_hit_tokens=20, computed_tokens=30
    ),
    tiers={
        "memory": TierStats(
            chunks=11,
            used_bytes=12,
            limit_bytes=13,
            pinned_chunks=14,
            loaded_chunks=15,
            stored_chunks=16,
            evicted_chunks=17,
        )
    },
)


def with_server(
    use: Callable[[aiohttp.ClientSession, HttpServer], Awaitable[None]],
    get_stats: Callable[[], CacheStats] = lambda: STATS,
    health: dict[str, str] | None = None,
) -> None:
    health = health or HEALTHY

    async def scenario() -> None:
        server = await start_http(ANY_PORT, get_stats, lambda: health)
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
                await use(session, server)
        finally:
            await server.close()

    asyncio.run(scenario())


async def samples(session: aiohttp.ClientSession) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    async with session.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        families = text_string_to_metric_families(await response.text())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_tell_every_counter() -> None:
    async def use(session: aiohttp.ClientSession, _: HttpServer) -> None:
        values = await samples(session)
        for name, value in {
            "stepwell_uptime_seconds": 12.5,
            "stepwell_sessions": 1,
            "stepwell_spaces": 2,
            "stepwell_leases": 3,
            "stepwell_reservations": 4,
            "stepwell_lookups_total": 5,
            "stepwell_hit_chunks_total": 6,
            "stepwell_requests_total": 9,
        }.items():
            assert values[name, ()] == value, name
        for source, value in {"engine_hit": 10, "stepwell_hit": 20, "computed": 30}.items():
            assert values["stepwell_prompt_tokens_total", (("source", source),)] == value
        for name, value in {
            "chunks": 11,
            "used_bytes": 12,
            "limit_bytes": 13,
            "pinned_chunks": 14,
            "loaded_chunks_total": 15,
            "stored_chunks_total": 16,
            "evicted_chunks_total": 17,
        }.items():
            assert values[f"stepwell_tier_{name}", (("tier", "memory"),)] == value, name
        assert values["stepwell_info", (("server_id", "abcd"), ("version", "1.2.3"))] == 1

    with_server(use)


def test_every_reason_is_there_zero_as_zero() -> None:
    async def use(session: aiohttp.ClientSession, _: HttpServer) -> None:
        values = await samples(session)
        for reason in Reason:
            label = (("reason", reason.value),)
            assert values["stepwell_missed_chunks_total", label] == (7 if reason is Reason.NOT_HELD else 0)
            assert values["stepwell_dropped_chunks_total", label] == (8 if reason is Reason.NO_ROOM else 0)

    with_server(use)


def test_metrics_are_only_ours() -> None:
    async def use(session: aiohttp.ClientSession, _: HttpServer) -> None:
        assert all(name.startswith("stepwell_") for name, _ in await samples(session))

    with_server(use)


def test_stats_are_the_struct_as_json() -> None:
    async def use(session: aiohttp.ClientSession, _: HttpServer) -> None:
        async with session.get("/stats") as response:
            assert response.content_type == "application/json"
            data = await response.json()
        assert data["tiers"]["memory"]["used_bytes"] == 12
        assert data["missed"] == {"not_held": 7}
        assert data["requests"]["prompt_tokens"] == 60

    with_server(use)


def test_counters_are_read_at_scrape_time_only() -> None:
    calls = []

    def get_stats() -> CacheStats:
        calls.append(1)
        return STATS

    async def use(session: aiohttp.ClientSession, _: HttpServer) -> None:
        assert len(calls) == 0
        async with session.get("/healthz") as response:
            assert (response.status, await response.json()) == (
                200,
                {"status": "ok", "tiers": HEALTHY},
            )
        assert len(calls) == 0
        await samples(session)
        await samples(session)
        assert len(calls) == 2

    with_server(use, get_stats)


def test_a_tier_out_of_service_shows_and_is_no_reason_to_kill_the_server() -> None:
    health = {"memory": "ok", "disk": "writing has not ended after 5 s"}

    async def use(session: aiohttp.ClientSession, _: HttpServer) -> None:
        async with session.get("/healthz") as response:
            assert (response.status, await response.json()) == (200, {"status": "degraded", "tiers": health})

    with_server(use, health=health)


def test_an_error_in_the_counters_fails_that_request_only(caplog: pytest.LogCaptureFixture) -> None:
    broken = [True]

    def get_stats() -> CacheStats:
        if broken[0]:
            raise ZeroDivisionError("no counters today")
        return STATS

    async def use(session: aiohttp.ClientSession, _: HttpServer) -> None:
        for path in ("/metrics", "/stats"):
            async with session.get(path) as response:
                assert response.status == 500
                assert "no counters today" not in await response.text()
        async with session.get("/healthz") as response:
            assert response.status == 200
        broken[0] = False
        assert (await samples(session))["stepwell_lookups_total", ()] == 5

    with_server(use, get_stats)
    assert "no counters today" in caplog.text


def test_an_address_in_use_says_what_to_do() -> None:
    async def use(_: aiohttp.ClientSession, server: HttpServer) -> None:
        with pytest.raises(
            OSError, match=r"cannot listen for HTTP on 127\.0\.0\.1:\d+: .*--http off"
        ) as caught:
            await start_http(HttpAddress("127.0.0.1", server.port), lambda: STATS, lambda: HEALTHY)
        assert caught.value.errno == errno.EADDRINUSE

    with_server(use)


def test_close_frees_the_port() -> None:
    async def scenario() -> None:
        first = await start_http(ANY_PORT, lambda: STATS, lambda: HEALTHY)
        await first.close()
        second = await start_http(HttpAddress("127.0.0.1", first.port), lambda: STATS, lambda: HEALTHY)
        assert second.port == first.port
        await second.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("host", "warns"), [("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)])
def test_an_address_that_others_reach_is_warned_about(
    host: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        server = await start_http(HttpAddress(host, 0), lambda: STATS, lambda: HEALTHY)
        await server.close()

    with caplog.at_level(logging.WARNING, "stepwell"):
        asyncio.run(scenario())
    assert ("can be read by anybody" in caplog.text) is warns
