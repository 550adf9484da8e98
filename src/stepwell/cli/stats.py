"""`stepwell stats`: the server's counters as tables, or as JSON."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from stepwell import wire
from stepwell.cli.ask import ask
from stepwell.types import CacheStats, Reason, RequestStats, TierStats

_GIB = 1 << 30


def print_stats(socket: Path, as_json: bool) -> int:
    """Print the counters of the server on `socket`. Raises CommandError where none answers."""
    stats = ask(socket, wire.GetStats(), wire.Stats).stats
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(stats)).decode())
    else:
        print_tables(stats, Console())
    return 0


def print_tables(stats: CacheStats, console: Console) -> None:
    """Tiers, what became of chunks, and where prompt tokens came from."""
    console.print(
        f"stepwell {stats.version}, up {stats.uptime_s:,.0f} s: {stats.sessions} sessions, "
        f"{stats.spaces} spaces, {stats.leases} leases, {stats.reservations} reservations",
        highlight=False,
    )
    console.print(_tiers(stats.tiers))
    if len(stats.tiers) > 1:
        console.print(_slower(stats.tiers))
    console.print(_chunks(stats))
    console.print(_tokens(stats.requests))


def _tiers(tiers: Mapping[str, TierStats]) -> Table:
    counted = ("chunks", "pinned", "loaded", "stored", "evicted")
    table = _table("tier", "GiB used", "GiB limit", "% used", *counted)
    for name, tier in tiers.items():
        counts = (
            tier.chunks, tier.pinned_chunks, tier.loaded_chunks, tier.stored_chunks, tier.evicted_chunks
        )  # fmt: skip
        table.add_row(
            name,
            f"{tier.used_bytes / _GIB:.2f}",
            f"{tier.limit_bytes / _GIB:.2f}",
            _percent(tier.used_bytes, tier.limit_bytes),
            *(f"{count:,}" for count in counts),
        )
    return table


def _slower(tiers: Mapping[str, TierStats]) -> Table:
    table = _table("tier", "chunks waiting", "chunks damaged", "health")
    for name, tier in tiers.items():
        if name != "memory":
            table.add_row(name, f"{tier.queued_chunks:,}", f"{tier.damaged_chunks:,}", tier.health)
    return table


def _chunks(stats: CacheStats) -> Table:
    table = _table(f"chunks in {stats.lookups:,} look-ups", "count", "%")
    served = stats.hit_chunks
    asked = served + sum(stats.missed.values())
    table.add_row("hit", f"{served:,}", _percent(served, asked))
    for reason, count in _occurred(stats.missed):
        table.add_row(f"missed: {reason}", f"{count:,}", _percent(count, asked))
    for reason, count in _occurred(stats.dropped):
        table.add_row(f"not stored: {reason}", f"{count:,}", "")
    return table


def _tokens(requests: RequestStats) -> Table:
    table = _table(f"prompt tokens of {requests.requests:,} requests", "count", "%")
    for source, count in (
        ("hit in the engine", requests.engine_hit_tokens),
        ("hit in Stepwell", requests.stepwell_hit_tokens),
        ("computed", requests.computed_tokens),
    ):
        table.add_row(source, f"{count:,}", _percent(count, requests.prompt_tokens))
    return table


def _occurred(counts: Mapping[Reason, int]) -> list[tuple[str, int]]:
    return [(reason.value, counts[reason]) for reason in Reason if counts.get(reason)]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for title in others:
        table.add_column(title, justify="right")
    return table
