"""Real damage to a real folder: every chunk comes back exact or is a miss, and the tier heals."""

import asyncio
import contextlib
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_kit import (
    CHUNK_BYTES,
    LIMIT_BYTES,
    fetch,
    folder_bytes,
    limit,
    right,
    segments,
    store,
    with_tier,
)

from stepwell.tiers.disk import DiskTier
from stepwell.tiers.disk.segment import table_bytes
from stepwell.types import Reason
from support.chunks import chunk_id

BLOCK = 4096
RECORD = BLOCK + 3 * BLOCK  # of CHUNK_BYTES


def write_some(folder: Path, *, close: bool = True) -> None:
    """Three records in segment 0, the tier's only one."""
    with_tier(folder, lambda tier: store(tier, range(3)), close=close)
    assert len(segments(folder)) == 1


def found(folder: Path) -> list[int]:
    async def use(tier: DiskTier) -> list[int]:
        numbers = await right(tier, range(3))
        assert await store(tier, [*range(3), 9]) == [None] * 4, "it goes on"
        assert await right(tier, [*range(3), 9]) == [*range(3), 9], "and heals"
        assert tier.file_bytes == folder_bytes(folder) <= LIMIT_BYTES
        return numbers

    return with_tier(folder, use)


REGIONS = {
    "segment header": (0, []),
    "segment header's digest": (45, []),
    "record header: magic": (BLOCK, [1, 2]),
    "record header: key": (BLOCK + 40, [1, 2]),
    "record header: sequence": (BLOCK + 65, [1, 2]),
    "record header: digest": (BLOCK + 120, [1, 2]),
    "payload, first byte": (2 * BLOCK, [1, 2]),
    "payload, last byte": (2 * BLOCK + CHUNK_BYTES - 1, [1, 2]),
    "second record's key": (BLOCK + RECORD + 40, [0, 2]),
    "padding": (2 * BLOCK + CHUNK_BYTES + 5, [0, 1, 2]),
}


@pytest.mark.parametrize(("offset", "left"), REGIONS.values(), ids=REGIONS.keys())
def test_one_flipped_bit(tmp_path: Path, offset: int, left: list[int]) -> None:
    write_some(tmp_path)
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)
    assert found(tmp_path) == left


@pytest.mark.parametrize("from_end", [1, 17, 33, 63, 64, 100, table_bytes(3)])
def test_one_flipped_bit_in_the_table_costs_nothing(tmp_path: Path, from_end: int) -> None:
    write_some(tmp_path)
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[-from_end] ^= 0x01
    path.write_bytes(data)
    assert found(tmp_path) == [0, 1, 2]


def test_a_flipped_bit_while_serving_is_a_miss_and_counted(tmp_path: Path) -> None:
    async def use(tier: DiskTier) -> None:
        await store(tier, range(3))
        (path,) = segments(tmp_path)
        with path.open("r+b") as file:
            file.seek(2 * BLOCK)
            byte = file.read(1)
            file.seek(2 * BLOCK)
            file.write(bytes([byte[0] ^ 1]))
            os.fsync(file.fileno())  # the tier reads past the page cache
        assert await fetch(tier, chunk_id(0)) is Reason.CORRUPT
        assert (tier.damaged, tier.usage().chunks) == (1, 2)
        assert await fetch(tier, chunk_id(0)) is Reason.NOT_HELD
        assert await right(tier, [1, 2]) == [1, 2]

    with_tier(tmp_path, use)


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + RECORD, 65536 - 1])
@pytest.mark.parametrize("serving", [True, False])
def test_a_truncated_segment(tmp_path: Path, nbytes: int, serving: bool) -> None:
    if not serving:
        write_some(tmp_path)
        os.truncate(segments(tmp_path)[0], nbytes)
        assert found(tmp_path) == []  # not its size: not ours
        return

    async def use(tier: DiskTier) -> None:
        await store(tier, range(3))
        os.truncate(segments(tmp_path)[0], nbytes)
        whole = [n for n in range(3) if BLOCK + (n + 1) * RECORD <= nbytes]
        assert await right(tier, range(3)) == whole
        assert tier.damaged == 3 - len(whole)
        for number in range(100, 200):  # until that segment's turn has come
            if (await store(tier, [number]))[0] is Reason.NO_ROOM:
                await tier.reclaim([])
        assert 199 in await right(tier, range(100, 200))
        assert tier.file_bytes == folder_bytes(tmp_path)

    with_tier(tmp_path, use)


@pytest.mark.parametrize("all_of_it", [True, False], ids=["the folder", "its files"])
def test_removed_while_serving(tmp_path: Path, all_of_it: bool) -> None:
    folder = tmp_path / "disk"

    async def use(tier: DiskTier) -> None:
        await store(tier, range(30))
        if all_of_it:
            shutil.rmtree(folder)
        else:
            for path in segments(folder):
                path.unlink()
        for number in range(100, 200):
            if (await store(tier, [number]))[0] is Reason.NO_ROOM:
                await tier.reclaim([])
                await store(tier, [number])
        assert set(range(190, 200)) <= set(await right(tier, range(200)))
        assert not set(range(27)) & set(await right(tier, range(27)))
        assert tier.damaged >= 20
        assert tier.file_bytes == folder_bytes(folder) <= LIMIT_BYTES

    with_tier(folder, use)

    async def again(tier: DiskTier) -> None:
        assert set(range(190, 200)) <= set(await right(tier, range(200)))

    with_tier(folder, again)


# -- no room, no descriptors --------------------------------------------------------------------------------


@contextlib.contextmanager
def small_filesystem(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs of its own, mounted by and for this test."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_drive_with_less_room_than_the_limit_shrinks_the_tier(tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small", "size=1m") as folder:

        async def use(tier: DiskTier) -> None:
            for number in range(100):
                if (await store(tier, [number]))[0] is Reason.NO_ROOM:
                    await tier.reclaim([])
                    assert await store(tier, [number]) == [None]
            held = await right(tier, range(100))
            assert held[-1] == 99
            assert len(held) >= 20

        with_tier(folder, use, 2 << 20)


def test_others_fill_the_drive_and_go_again(tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small", "size=2m") as folder:

        async def use(tier: DiskTier) -> None:
            await store(tier, range(6))
            theirs = folder / "theirs"
            with theirs.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            for number in range(100, 130):
                outcome = (await store(tier, [number]))[0]
                assert outcome in (None, Reason.NO_ROOM)
                if outcome is Reason.NO_ROOM:
                    await tier.reclaim([])
            assert await right(tier, range(100, 130)) != []
            shrunk = tier.file_bytes
            theirs.unlink()
            for number in range(200, 260):
                if (await store(tier, [number]))[0] is Reason.NO_ROOM:
                    await tier.reclaim([])
            assert tier.file_bytes > shrunk, "it grows again when there is room"

        with_tier(folder, use, 1 << 20)


def test_no_inodes_left(tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small", "size=4m,nr_inodes=5") as folder:

        async def use(tier: DiskTier) -> None:
            for number in range(60):
                if (await store(tier, [number]))[0] is Reason.NO_ROOM:
                    await tier.reclaim([])
                    await store(tier, [number])
            assert 59 in await right(tier, range(60))
            assert len(segments(folder)) <= 3

        with_tier(folder, use)


def test_no_descriptors_left(tmp_path: Path) -> None:
    async def use(tier: DiskTier) -> None:
        await store(tier, range(3))
        next_fd = os.dup(0)
        os.close(next_fd)
        with limit(resource.RLIMIT_NOFILE, next_fd):
            assert await store(tier, range(10, 13)) == [Reason.OUT_OF_SERVICE] * 3
            assert await right(tier, range(3)) == [0, 1, 2]
        assert await store(tier, range(10, 13)) == [None] * 3
        assert await right(tier, range(10, 13)) == [10, 11, 12]

    with_tier(tmp_path, use)


def test_a_file_may_not_grow(tmp_path: Path) -> None:
    async def use(tier: DiskTier) -> None:
        with limit(resource.RLIMIT_FSIZE, 40_000):
            assert Reason.NO_ROOM in await store(tier, range(3))
        assert await store(tier, range(3)) == [None] * 3

    with_tier(tmp_path, use)


def test_a_write_that_comes_back_short_is_never_visible(tmp_path: Path) -> None:
    async def use(tier: DiskTier) -> None:
        await store(tier, [0])
        os.truncate(segments(tmp_path)[0], BLOCK + RECORD)
        with limit(resource.RLIMIT_FSIZE, BLOCK + RECORD + 2 * BLOCK):  # the next ends in its middle
            assert await store(tier, [1]) == [Reason.OUT_OF_SERVICE]
            assert await right(tier, [0, 1]) == [0]
        assert await store(tier, [1]) == [None]
        assert await right(tier, [0, 1]) == [0, 1]

    with_tier(tmp_path, use)


# -- kill -9 ------------------------------------------------------------------------------------------------

WRITER = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from disk_kit import store
from stepwell.tiers.disk import DiskTier
from stepwell.types import Reason

async def main():
    tier = DiskTier(Path(sys.argv[1]), int(sys.argv[2]))
    await tier.scan()
    print("writing", flush=True)
    number = tier._next_sequence * 1000
    while True:
        outcomes = await store(tier, range(number, number + 6), 30_000)
        if Reason.NO_ROOM in outcomes:
            await tier.reclaim([kept.chunk for kept in tier.oldest()][:1])
        number += 6

asyncio.run(main())
"""


def kill_and_look(folder: Path, cycles: int) -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    limit_bytes = 4 << 20
    for cycle in range(cycles):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(limit_bytes), *paths], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"writing\n"
        time.sleep(0.002 * (cycle * 7 % 40))  # a random byte of a write: no condition to wait for
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()

        async def look(tier: DiskTier) -> int:
            assert folder_bytes(folder) <= limit_bytes
            assert tier.file_bytes == folder_bytes(folder)
            chunks = list(tier._catalogue)
            for chunk in chunks:
                assert await fetch(tier, chunk, 30_000) in (None, Reason.CORRUPT)
            return len(chunks) - tier.damaged

        held = with_tier(folder, look, limit_bytes)
        assert {path.name.split("-")[0] for path in folder.iterdir()} <= {"segment", "lock"}
        assert len(segments(folder)) <= 16
        assert cycle < 3 or held > 0


def test_killed_twenty_times(tmp_path: Path) -> None:
    kill_and_look(tmp_path, 20)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_killed_two_hundred_times(tmp_path: Path) -> None:
    kill_and_look(tmp_path, 200)


@pytest.mark.parametrize("tables", [True, False], ids=["with tables", "headers only"])
def test_a_hundred_thousand_chunks_are_served_within_two_seconds(tmp_path: Path, tables: bool) -> None:
    limit_bytes = 2 << 30
    count = 100_000

    async def fill(tier: DiskTier) -> None:
        for start in range(0, count, 5_000):
            assert set(await store(tier, range(start, start + 5_000), 4096)) == {None}

    with_tier(tmp_path, fill, limit_bytes)
    if not tables:
        for path in segments(tmp_path):
            with path.open("r+b") as file:
                file.seek(-64, os.SEEK_END)
                file.write(bytes(64))

    async def start() -> tuple[float, float]:
        begun_s = time.monotonic()
        tier = DiskTier(tmp_path, limit_bytes)
        serves_s = time.monotonic() - begun_s
        scan = asyncio.ensure_future(tier.scan())
        longest_s = 0.0
        while not scan.done():
            before_s = time.thread_time()  # not what other processes take
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - before_s)
        assert tier.usage().chunks == count
        assert await fetch(tier, chunk_id(count - 1), 4096) is None
        await tier.close()
        return serves_s, longest_s

    gc.collect()
    gc.disable()  # the server never looks through its oldest objects, of which the tests have many
    try:
        serves_s, longest_s = asyncio.run(start())
    finally:
        gc.enable()
    assert serves_s < 2.0
    assert longest_s < 0.25, "look-ups are answered meanwhile"
