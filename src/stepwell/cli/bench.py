"""`stepwell bench`: the speed targets, what this machine reaches, and whether that is enough."""

import os
import platform
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from stepwell.cli.measure import PROMPT_BYTES, CopyTimes, LookupTime, measure_copies, measure_lookups

_MIB = 1 << 20
CHUNK_BYTES = (2 * _MIB, 32 * _MIB)
HELD_CHUNKS = (1_000, 100_000, 1_000_000)
COPY_RATIO_LEAST = 0.85
LOOKUP_MS_MOST = ((128, 0.25), (8_192, 4.0))  # by keys: prompts of 2,048 and 131,072 tokens


class Target(msgspec.Struct, frozen=True):
    """What is enough."""

    value: float
    is_least: bool  # else it is the most


class Row(msgspec.Struct, frozen=True):
    """What was measured, and its target."""

    what: str
    unit: str
    value: float
    target: Target | None  # None: shown for comparison

    @property
    def passed(self) -> bool:
        """Whether the target, if there is one, is met."""
        if self.target is None:
            return True
        if self.target.is_least:
            return self.value >= self.target.value
        return self.value <= self.target.value


class Result(msgspec.Struct, frozen=True):
    """Everything that one run says."""

    machine: str
    plain_copy_gb_per_s: float
    rows: list[Row]
    copies: list[CopyTimes]
    lookups: list[LookupTime]


def run(json_path: Path | None) -> int:
    """Measure and print; 0 where every target is met, else 1."""
    console = Console()
    with console.status("measuring copies"):
        copies = [measure_copies(chunk_bytes) for chunk_bytes in CHUNK_BYTES]
        # What the calls themselves cost shows where each carries one small chunk.
        copies.append(measure_copies(min(CHUNK_BYTES), prompt_bytes=min(CHUNK_BYTES)))
    with console.status("measuring look-ups"):
        key_counts = [keys for keys, _ in LOOKUP_MS_MOST]
        lookups = [time for held in HELD_CHUNKS for time in measure_lookups(held, key_counts)]
    result = summarize(copies, lookups)
    print_result(result, console)
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    return 0 if all(row.passed for row in result.rows) else 1


def summarize(copies: list[CopyTimes], lookups: list[LookupTime]) -> Result:
    """Each measurement against its target."""
    rows = []
    for copy in copies:
        target = Target(COPY_RATIO_LEAST, is_least=True) if copy.prompt_bytes == PROMPT_BYTES else None
        sizes = f"{copy.prompt_bytes // copy.chunk_bytes} x {copy.chunk_bytes // _MIB} MiB"
        rows.append(Row(f"store {sizes}", "of memcpy", copy.store_ratio, target))
        rows.append(Row(f"load {sizes}", "of memcpy", copy.load_ratio, target))
    most_ms = dict(LOOKUP_MS_MOST)
    for lookup in lookups:
        what = f"look up {lookup.keys:,} keys ({lookup.held_chunks:,} held)"
        rows.append(Row(what, "ms", 1e3 * lookup.lookup_s, Target(most_ms[lookup.keys], is_least=False)))
    plain_bytes_per_s = max(copy.prompt_bytes / copy.plain_s for copy in copies)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"
    return Result(machine, plain_bytes_per_s / 1e9, rows, copies, lookups)


def print_result(result: Result, console: Console) -> None:
    """One row a target."""
    title = f"{result.machine}: plain memcpy {result.plain_copy_gb_per_s:.1f} GB/s"
    table = Table("median of a whole call", title=title, box=SIMPLE_HEAD)
    for name in ("measured", "target", ""):
        table.add_column(name, justify="right")
    for row in result.rows:
        target, verdict = "", ""
        if row.target is not None:
            target = f"{'≥' if row.target.is_least else '≤'} {row.target.value:g} {row.unit}"
            verdict = "pass" if row.passed else "[bold]MISS[/bold]"
        table.add_row(row.what, f"{row.value:.3f} {row.unit}", target, verdict)
    console.print(table)
