"""The disk tier against fio, on the same drive in the same run: write-back, cold reads, small chunks.

Both go past the page cache at the same size, several calls at once, and take turns, so that a drive that
others use slows both. Needs `fio` (Debian: apt install fio), and room for 3 GiB in the folder.
"""

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from stepwell.tiers.base import Get, Put
from stepwell.tiers.disk import DiskTier
from stepwell.tiers.memory import MemoryTier

FIO_JOBS = 4  # more gain nothing on the drives tried
TOTAL_BYTES = 1 << 30  # moved by each measurement
BATCH_BYTES = 32 << 20  # what the server's write-back and promotion give the tier at once,
LANES = 2  # so many of them at a time
CASES = (  # bytes a chunk, and the least part of fio's rate
    (32 << 20, 0.85),
    (2 << 20, 0.85),
    (64 << 10, 0.6),
)


class Rate(msgspec.Struct, frozen=True):
    """One direction at one size."""

    chunk_bytes: int
    direction: str
    bytes_per_s: float  # ours, median
    fio_bytes_per_s: float  # median
    ratio: float  # median of the rounds' ratios
    target: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the drive to measure (default: a temporary folder)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    console = Console()
    fio = shutil.which("fio")
    if fio is None:
        console.print("disk: SKIPPED: there is no fio here (Debian: apt install fio)", style="yellow")
        return 0
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-", dir=options.folder) as folder:
        rates = asyncio.run(measure(Path(folder), fio, options.rounds, console))
    print_rates(rates, console)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rates)))
    return 0 if all(rate.ratio >= rate.target for rate in rates) else 1


async def measure(folder: Path, fio: str, rounds: int, console: Console) -> list[Rate]:
    """Ours and fio's in turn."""
    arena = MemoryTier(LANES * BATCH_BYTES)
    rates = []
    for chunk_bytes, target in CASES:
        batch = max(1, BATCH_BYTES // chunk_bytes)
        slots = [arena.reserve(chunk_bytes) for _ in range(LANES * batch)]
        views = [arena.view(slot) for slot in slots if slot is not None]
        lanes = [views[:batch], views[batch:]]
        for number, view in enumerate(views):
            view[:8] = number.to_bytes(8, "little")
        found: dict[str, list[tuple[float, float]]] = {"write": [], "read": []}
        fio_file = folder / "fio"
        run_fio(fio, fio_file, chunk_bytes, "write")  # lays the file out
        tier = DiskTier(folder / f"tier-{chunk_bytes}", 2 * TOTAL_BYTES)
        await tier.scan()
        with console.status(f"{chunk_bytes >> 10} KiB") as status:
            for number in range(rounds + 1):
                status.update(f"{chunk_bytes >> 10} KiB, round {number} of {rounds}")
                ours_write = await write_all(tier, lanes, number, chunk_bytes)
                fio_write = run_fio(fio, fio_file, chunk_bytes, "write")
                ours_read = await read_all(tier, lanes, number, chunk_bytes)
                fio_read = run_fio(fio, fio_file, chunk_bytes, "read")
                if number:  # the first lays files out
                    found["write"].append((ours_write, fio_write))
                    found["read"].append((ours_read, fio_read))
        await tier.close()
        shutil.rmtree(folder / f"tier-{chunk_bytes}")
        fio_file.unlink()
        for view, slot in zip(views, slots, strict=True):
            view.release()
            if slot is not None:
                arena.free(slot)
        for direction, pairs in found.items():
            ours, theirs = zip(*pairs, strict=True)
            ratio = statistics.median(mine / fios for mine, fios in pairs)
            rates.append(
                Rate(
                    chunk_bytes,
                    direction,
                    statistics.median(ours),
                    statistics.median(theirs),
                    ratio,
                    target,
                )
            )
    await arena.close()
    return rates


def chunk(number: int, position: int) -> bytes:
    return number.to_bytes(16, "little") + position.to_bytes(32, "little")


async def write_all(tier: DiskTier, lanes: list[list[memoryview]], number: int, chunk_bytes: int) -> float:
    """Bytes a second; making room for it is part of it, as it is in the server."""

    async def lane(views: list[memoryview], starts: range) -> None:
        for start in starts:
            items = [Put(chunk(number, start + at), view) for at, view in enumerate(views)]
            while any(why is not None for why in await tier.put(items)):
                await tier.reclaim(())

    return await timed(lane, lanes, chunk_bytes)


async def read_all(tier: DiskTier, lanes: list[list[memoryview]], number: int, chunk_bytes: int) -> float:
    """Bytes a second; every chunk has to come."""

    async def lane(views: list[memoryview], starts: range) -> None:
        for start in starts:
            items = [Get(chunk(number, start + at), view) for at, view in enumerate(views)]
            outcomes = await tier.get(items)
            assert outcomes == [None] * len(items), outcomes

    return await timed(lane, lanes, chunk_bytes)


async def timed(
    lane: Callable[[list[memoryview], range], Awaitable[None]],
    lanes: list[list[memoryview]],
    chunk_bytes: int,
) -> float:
    """Bytes a second of the lanes together, each with every other batch, as the server has it."""
    count, batch = TOTAL_BYTES // chunk_bytes, len(lanes[0])
    begun_s = time.perf_counter()
    await asyncio.gather(
        *(lane(views, range(at * batch, count, len(lanes) * batch)) for at, views in enumerate(lanes))
    )
    return TOTAL_BYTES / (time.perf_counter() - begun_s)


def run_fio(fio: str, file: Path, chunk_bytes: int, direction: str) -> float:
    """Bytes a second of as many threads as ours, each in its part of one file."""
    result = subprocess.run(
        [
            fio, "--name=limit", f"--filename={file}", f"--rw={direction}", f"--bs={chunk_bytes}",
            "--direct=1", "--ioengine=psync", "--thread", f"--numjobs={FIO_JOBS}",
            f"--size={TOTAL_BYTES // FIO_JOBS}", f"--offset_increment={TOTAL_BYTES // FIO_JOBS}",
            "--group_reporting", "--output-format=json",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    report = msgspec.json.decode(result.stdout[result.stdout.index(b"{") :])
    return float(report["jobs"][0][direction]["bw_bytes"])


def print_rates(rates: list[Rate], console: Console) -> None:
    """One row for each size and direction."""
    table = Table(title=f"The disk tier and fio, {FIO_JOBS} threads, direct I/O", box=SIMPLE_HEAD)
    for name in ("KiB a chunk", "", "GB/s", "fio GB/s", "ratio", "target", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for rate in rates:
        table.add_row(
            f"{rate.chunk_bytes >> 10:,}",
            rate.direction,
            f"{rate.bytes_per_s / 1e9:.2f}",
            f"{rate.fio_bytes_per_s / 1e9:.2f}",
            f"{rate.ratio:.2f}",
            f"≥ {rate.target}",
            "pass" if rate.ratio >= rate.target else "MISS",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
