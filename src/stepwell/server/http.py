"""`/metrics` for Prometheus, `/stats` as JSON and `/healthz`, in the server's own event loop."""

import ipaddress
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from stepwell.config import HttpAddress
from stepwell.types import CacheStats, Reason, TierStats

_Family: TypeAlias = type[GaugeMetricFamily] | type[CounterMetricFamily]

log = logging.getLogger(__name__)

# How long close() waits for a scrape under way; the server's stop must not hang on a slow reader.
CLOSE_TIMEOUT_S = 1.0


class HttpServer:
    """A listening HTTP server; `port` is the one it got where it asked for port 0."""

    def __init__(self, runner: web.AppRunner, port: int) -> None:
        self._runner = runner
        self.port = port

    async def close(self) -> None:
        """Stop listening and end open connections."""
        await self._runner.cleanup()


async def start_http(
    address: HttpAddress, get_stats: Callable[[], CacheStats], get_health: Callable[[], Mapping[str, str]]
) -> HttpServer:
    """Listen on `address` in the running event loop. `get_stats` is called in it, once a request.

    `get_health` gives "ok", or what is wrong, of each tier. Should one of them raise, that request is
    answered with 500, and nothing else happens.
    Raises OSError, saying what to do, where the address cannot be listened on.
    """
    registry = CollectorRegistry()
    registry.register(_StatsCollector(get_stats))

    async def healthz(_: web.Request) -> web.Response:
        # 200 all the same: without a slower tier the server serves what lies in memory.
        health = get_health()
        degraded = any(word != "ok" for word in health.values())
        return web.json_response({"status": "degraded" if degraded else "ok", "tiers": health})

    async def stats(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(get_stats()), content_type="application/json")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/stats", stats), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_TIMEOUT_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, address.host, address.port).start()
    except OSError as error:
        await runner.cleanup()
        raise OSError(
            error.errno,
            f"cannot listen for HTTP on {address}: {error.strerror}; "
            "choose another address with --http HOST:PORT, or none with --http off",
        ) from error
    if not _is_loopback(address.host):
        log.warning("metrics and stats on %s can be read by anybody who reaches this address", address)
    return HttpServer(runner, port=runner.addresses[0][1])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _StatsCollector(Collector):
    """Reads the counters at scrape time: nothing is counted twice, and serving pays nothing for it."""

    def __init__(self, get_stats: Callable[[], CacheStats]) -> None:
        self._get_stats = get_stats

    def describe(self) -> Iterable[Metric]:
        # Without it, registering would collect once, before the server has anything to tell.
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self._get_stats()
        yield InfoMetricFamily(
            "stepwell", "The server that answers.", {"version": stats.version, "server_id": stats.server_id}
        )
        yield _gauge("uptime_seconds", "Seconds since the server started.", stats.uptime_s)
        yield _gauge("sessions", "Connected clients.", stats.sessions)
        yield _gauge("spaces", "Spaces in which chunks can be shared.", stats.spaces)
        yield _gauge("leases", "Leases that pin chunks in memory.", stats.leases)
        yield _gauge("reservations", "Reservations not yet committed.", stats.reservations)
        yield _counter("lookups", "Look-ups of a prompt's keys.", stats.lookups)
        yield _counter("hit_chunks", "Chunks asked for and held.", stats.hit_chunks)
        yield _counter_by(
            "reason", "missed_chunks", "Chunks asked for and not served.", _every_reason(stats.missed)
        )
        yield _counter_by(
            "reason", "dropped_chunks", "Chunks offered and not stored.", _every_reason(stats.dropped)
        )

        requests = stats.requests
        yield _counter("requests", "Requests of engines that have their first token.", requests.requests)
        yield _counter_by(
            "source",
            "prompt_tokens",
            "Prompt tokens of engines' requests, by where their attention state came from.",
            {
                "engine_hit": requests.engine_hit_tokens,
                "stepwell_hit": requests.stepwell_hit_tokens,
                "computed": requests.computed_tokens,
            },
        )

        for name, help_text, kind, read in _TIER_METRICS:
            metric = kind(f"stepwell_tier_{name}", help_text, labels=["tier"])
            for tier_name, tier in stats.tiers.items():
                metric.add_metric([tier_name], read(tier))
            yield metric


_TIER_METRICS: tuple[tuple[str, str, _Family, Callable[[TierStats], float]], ...] = (
    ("chunks", "Chunks held.", GaugeMetricFamily, lambda tier: tier.chunks),
    ("used_bytes", "Bytes in use.", GaugeMetricFamily, lambda tier: tier.used_bytes),
    ("limit_bytes", "Most bytes to use.", GaugeMetricFamily, lambda tier: tier.limit_bytes),
    ("pinned_chunks", "Chunks that leases pin.", GaugeMetricFamily, lambda tier: tier.pinned_chunks),
    ("loaded_chunks", "Chunks served.", CounterMetricFamily, lambda tier: tier.loaded_chunks),
    ("stored_chunks", "Chunks written.", CounterMetricFamily, lambda tier: tier.stored_chunks),
    ("evicted_chunks", "Chunks evicted for room.", CounterMetricFamily, lambda tier: tier.evicted_chunks),
    ("queued_chunks", "Chunks waiting to be written.", GaugeMetricFamily, lambda tier: tier.queued_chunks),
    ("damaged_chunks", "Chunks that failed a check.", CounterMetricFamily, lambda tier: tier.damaged_chunks),
    ("in_service", "1 while it works, else 0.", GaugeMetricFamily, lambda tier: tier.health == "ok"),
)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"stepwell_{name}", help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"stepwell_{name}", help_text, value=value)


def _counter_by(label: str, name: str, help_text: str, values: Mapping[str, int]) -> Metric:
    metric = CounterMetricFamily(f"stepwell_{name}", help_text, labels=[label])
    for word, value in values.items():
        metric.add_metric([word], value)
    return metric


def _every_reason(counts: Mapping[Reason, int]) -> dict[str, int]:
    """All reasons, so that a rate over one that has not occurred yet is 0 and not absent."""
    return {reason.value: counts.get(reason, 0) for reason in Reason}
