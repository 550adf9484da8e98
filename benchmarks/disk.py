"""The disk tier beside fio: the same sizes in one folder, in one run, in turns.

    python benchmarks/disk.py FOLDER [--total-mib 1024] [--rounds 3] [--threads 4]

Both go past the page cache, with as many threads. fio's requests have the chunks' size. The tier puts
neighbours into one call of up to 8 MiB, so above 1 the ratio shows that, not a speed beyond the drive's.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stepwell.tiers.arena import create_arena
from stepwell.tiers.base import Get, Put
from stepwell.tiers.disk import DiskTier

KIB, MIB = 1 << 10, 1 << 20
BATCH_BYTES = 32 * MIB  # as write-back and promotion hand them over
CASES = [("2 MiB", 2 * MIB, 0.85), ("32 MiB", 32 * MIB, 0.85), ("64 KiB", 64 * KIB, 0.6)]
CHUNKS_MOST = 10_000


async def through_the_tier(folder: Path, nbytes: int, count: int, threads: int) -> tuple[float, float]:
    """Bytes a second of writing chunks from a memfd arena, and of reading them back cold."""
    batch = max(1, BATCH_BYTES // nbytes)
    fd, arena = create_arena(batch * nbytes * threads)
    for offset in range(0, len(arena.buffer), 4096):
        arena.buffer[offset : offset + 8] = offset.to_bytes(8, "little")
    views = [arena.view(number * nbytes, nbytes) for number in range(batch * threads)]
    names = [number.to_bytes(48, "big") for number in range(count)]
    tier = DiskTier(folder, 2 * count * (nbytes + 8192) + 256 * MIB, io_threads=threads)
    await tier.scan()
    if not tier.direct:
        sys.exit(f"{folder} has no direct I/O: what the page cache does is not to be compared")

    # Under way at once, at most: as many batches as have memory of their own.
    async def all_batches(do: str) -> float:
        begin = time.perf_counter()
        lanes = [lane(do, first) for first in range(threads)]
        await asyncio.gather(*lanes)
        return count * nbytes / (time.perf_counter() - begin)

    async def lane(do: str, first: int) -> None:
        for start in range(first * batch, count, threads * batch):
            some = names[start : start + batch]
            memory = views[first * batch : first * batch + len(some)]
            if do == "put":
                outcomes = await tier.put([Put(n, v) for n, v in zip(some, memory, strict=True)])
            else:
                outcomes = await tier.get([Get(n, v) for n, v in zip(some, memory, strict=True)])
            if any(outcomes):
                sys.exit(f"{do} failed: {outcomes}")

    try:
        return await all_batches("put"), await all_batches("get")
    finally:
        await tier.close()
        arena.close()  # goes with the views
        os.close(fd)
        shutil.rmtree(folder)


def through_fio(folder: Path, nbytes: int, count: int, threads: int) -> tuple[float, float]:
    """Bytes a second of fio, as many jobs as the tier has threads: writing into space set aside, reading."""
    folder.mkdir()
    share = max(1, count // threads) * nbytes
    common = [
        "fio", "--name=job", f"--directory={folder}", "--direct=1", "--ioengine=psync", f"--bs={nbytes}",
        f"--size={share}", f"--numjobs={threads}", "--group_reporting", "--output-format=json",
        "--fallocate=posix", "--thread",
    ]  # fmt: skip
    speeds = []
    for direction in ("write", "read"):
        done = subprocess.run([*common, f"--rw={direction}"], capture_output=True, text=True, check=True)
        speeds.append(float(json.loads(done.stdout)["jobs"][0][direction]["bw_bytes"]))
    shutil.rmtree(folder)
    return speeds[0], speeds[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--total-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4)
    flags = parser.parse_args()
    if shutil.which("fio") is None:
        print("skipped: fio is not installed, and there is nothing to compare with")
        return
    with tempfile.TemporaryDirectory(dir=flags.folder) as made:
        for label, nbytes, target in CASES:
            count = min(CHUNKS_MOST, flags.total_mib * MIB // nbytes)
            ours, fios = [], []
            for turn in range(flags.rounds):
                if turn % 2:  # neither is always the first
                    fios.append(through_fio(Path(made) / "f", nbytes, count, flags.threads))
                ours.append(asyncio.run(through_the_tier(Path(made) / "t", nbytes, count, flags.threads)))
                if not turn % 2:
                    fios.append(through_fio(Path(made) / "f", nbytes, count, flags.threads))
            for number, what in enumerate(("write", "read")):
                speed = statistics.median(one[number] for one in ours)
                limit = statistics.median(one[number] for one in fios)
                ratios = [o[number] / f[number] for o, f in zip(ours, fios, strict=True)]
                ratio = statistics.median(ratios)
                verdict = "met" if ratio >= target else "MISSED"
                print(
                    f"{label:>7} {what:<5} {speed / 1e9:5.2f} GB/s   fio {limit / 1e9:5.2f} GB/s   "
                    f"ratio {ratio:4.2f} of {min(ratios):.2f} to {max(ratios):.2f} "
                    f"(target {target}) {verdict}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
