"""The log in good days: restarts, limits, reclaiming, clearing."""

import asyncio
import os
import stat
from pathlib import Path

import pytest
from disk_kit import CHUNK_BYTES, LIMIT_BYTES, fetch, folder_bytes, right, segments, store, with_tier

from stepwell.tiers.base import Get, Put
from stepwell.tiers.disk import DiskError, DiskTier, FolderInUse
from stepwell.tiers.disk.tier import segment_bytes_of
from stepwell.types import Reason
from support.chunks import chunk_id, content


@pytest.mark.parametrize("close", [True, False], ids=["closed", "killed"])
def test_a_new_start_finds_everything(tmp_path: Path, close: bool) -> None:
    assert with_tier(tmp_path, lambda tier: store(tier, range(20)), close=close) == [None] * 20

    async def use(tier: DiskTier) -> None:
        assert tier.usage().chunks == 20
        assert await right(tier, range(21)) == list(range(20))

    for _ in range(3):
        with_tier(tmp_path, use)


def test_before_the_scan_everything_is_a_miss_and_usage_of_files_is_known(tmp_path: Path) -> None:
    with_tier(tmp_path, lambda tier: store(tier, range(20)))

    async def scenario() -> None:
        tier = DiskTier(tmp_path, LIMIT_BYTES)
        assert not tier.scanned
        assert tier.file_bytes == folder_bytes(tmp_path) > 20 * CHUNK_BYTES
        assert await fetch(tier, chunk_id(1)) is Reason.NOT_HELD
        assert await store(tier, [1, 100]) == [None, None], "writes need no scan"
        await tier.scan()
        assert tier.scanned
        assert await right(tier, [*range(20), 100]) == [*range(20), 100]
        assert tier.usage().chunks == 21
        await tier.close()

    asyncio.run(scenario())


def test_files_are_the_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with_tier(folder, lambda tier: store(tier, [1]))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_the_folder_never_exceeds_its_limit_whatever_the_limit_was_before(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(b"not ours")

    async def fill(tier: DiskTier) -> None:
        for number in range(200):
            if (await store(tier, [number]))[0] is Reason.NO_ROOM:
                await tier.reclaim([])
                assert await store(tier, [number]) == [None]
            assert folder_bytes(tmp_path) - 8 <= tier.limit_bytes
            assert tier.file_bytes == folder_bytes(tmp_path) - 8
        assert len(await right(tier, range(200))) == tier.usage().chunks > 10

    for limit_bytes in (LIMIT_BYTES, LIMIT_BYTES // 3, 4 * LIMIT_BYTES, LIMIT_BYTES // 2 + 5):
        with_tier(tmp_path, fill, limit_bytes)
    assert (tmp_path / "theirs").read_bytes() == b"not ours"


def test_a_smaller_limit_keeps_the_newest(tmp_path: Path) -> None:
    with_tier(tmp_path, lambda tier: store(tier, range(40)))

    async def use(tier: DiskTier) -> list[int]:
        assert folder_bytes(tmp_path) <= 300_000
        return await right(tier, range(40))

    held = with_tier(tmp_path, use, 300_000)
    assert held == list(range(min(held), 40))
    assert len(held) >= 10


def test_reclaiming_drops_the_oldest_and_keeps_what_it_is_told_to(tmp_path: Path) -> None:
    async def use(tier: DiskTier) -> None:
        await store(tier, range(100))
        full = tier.usage().chunks
        oldest = [kept.chunk for kept in tier.oldest()]
        assert oldest == [chunk_id(n) for n in range(len(oldest))]
        await tier.reclaim([oldest[1]])
        assert tier.usage().chunks == full - len(oldest) + 1
        assert await right(tier, range(full)) == [1, *range(len(oldest), full)]
        assert oldest[1] not in [kept.chunk for kept in tier.oldest()]
        assert await store(tier, [200]) == [None]

    with_tier(tmp_path, use)

    async def again(tier: DiskTier) -> list[int]:
        return await right(tier, [0, 1, 2, 200])

    assert with_tier(tmp_path, again) == [1, 200]


def test_a_log_in_which_all_is_kept_for_ever_still_takes_new_chunks(tmp_path: Path) -> None:
    async def use(tier: DiskTier) -> None:
        for number in range(300):
            while (await store(tier, [number]))[0] is Reason.NO_ROOM:
                segment = tier.oldest()
                await tier.reclaim([kept.chunk for kept in segment[: len(segment) // 2]])
            assert tier.file_bytes <= LIMIT_BYTES
        assert 299 in await right(tier, range(300))

    with_tier(tmp_path, use)


def test_a_read_under_way_while_its_segment_is_reclaimed_is_right(tmp_path: Path) -> None:
    async def use(tier: DiskTier) -> None:
        await store(tier, range(100))
        for number in range(0, 40, 3):
            into = bytearray(CHUNK_BYTES)
            reading = asyncio.ensure_future(tier.get([Get(chunk_id(number), memoryview(into))]))
            await asyncio.sleep(0)  # let it begin
            await tier.reclaim([])
            await store(tier, range(1000 + number, 1003 + number))
            (why,) = await reading
            assert why is not None or bytes(into) == content(chunk_id(number), CHUNK_BYTES)

    with_tier(tmp_path, use)


@pytest.mark.parametrize("close", [True, False], ids=["closed", "killed"])
def test_what_was_cleared_never_comes_back(tmp_path: Path, close: bool) -> None:
    other = chunk_id(1, space=1)

    async def use(tier: DiskTier) -> None:
        await store(tier, range(10))
        await tier.put([Put(other, memoryview(content(other, CHUNK_BYTES)))])
        await tier.clear(chunk_id(0)[:16])
        assert tier.usage().chunks == 1
        assert await store(tier, [3]) == [None], "what is stored after is kept"

    with_tier(tmp_path, use, close=close)

    async def look(tier: DiskTier) -> None:
        assert await right(tier, range(10)) == [3]
        assert await fetch(tier, other) is None
        await tier.clear(None)
        assert tier.usage().chunks == 0

    with_tier(tmp_path, look, close=close)

    async def nothing(tier: DiskTier) -> None:
        assert (tier.usage().chunks, await right(tier, range(10))) == (0, [])

    with_tier(tmp_path, nothing)


def test_a_clear_reaches_what_is_being_written(tmp_path: Path) -> None:
    async def use(tier: DiskTier) -> None:
        writing = asyncio.ensure_future(store(tier, range(5)))
        while not tier._writing:
            await asyncio.sleep(0)
        await tier.clear(None)
        await writing
        assert await right(tier, range(5)) == []

    with_tier(tmp_path, use)

    async def nothing(tier: DiskTier) -> list[int]:
        return await right(tier, range(5))

    assert with_tier(tmp_path, nothing) == []


def test_a_full_log_can_be_cleared(tmp_path: Path) -> None:
    async def use(tier: DiskTier) -> None:
        assert Reason.NO_ROOM in await store(tier, range(60))
        await tier.clear(None)
        assert tier.usage().chunks == 0

    with_tier(tmp_path, use, close=False)

    async def nothing(tier: DiskTier) -> int:
        return tier.usage().chunks

    assert with_tier(tmp_path, nothing) == 0


def test_one_server_a_folder(tmp_path: Path) -> None:
    async def use(_: DiskTier) -> None:
        with pytest.raises(FolderInUse, match="another cache uses the folder"):
            DiskTier(tmp_path, LIMIT_BYTES)

    with_tier(tmp_path, use)
    with_tier(tmp_path, lambda tier: store(tier, [1]))


def test_a_folder_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/no")):
        with pytest.raises(DiskError, match="choose another --disk"):
            DiskTier(folder, LIMIT_BYTES)
    with pytest.raises(DiskError, match="needs at least 256 KiB: choose a larger --disk-size"):
        DiskTier(tmp_path / "small", 100_000)


def test_a_symlink_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.write_bytes(bytes(LIMIT_BYTES // 16))
    (folder / "segment-00000000").symlink_to(outside)
    with pytest.raises(DiskError, match="remove it"):
        DiskTier(folder, LIMIT_BYTES)
    assert outside.read_bytes() == bytes(LIMIT_BYTES // 16)


def test_segments_are_a_small_part_of_the_log_and_never_too_many() -> None:
    for limit_bytes in (1 << 18, 1 << 20, 1 << 30, 200 << 30, 64 << 40):
        nbytes = segment_bytes_of(limit_bytes)
        assert nbytes % 4096 == 0
        assert 4 <= limit_bytes // nbytes <= 257


def test_ten_thousand_cycles_leave_descriptors_and_memory_flat(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    async def use(tier: DiskTier) -> None:
        async def cycle(first: int, count: int) -> None:
            for number in range(first, first + count):
                if (await store(tier, [number], 5_000))[0] is Reason.NO_ROOM:
                    await tier.reclaim([])
                    await store(tier, [number], 5_000)

        await cycle(0, 1_000)
        before = descriptors(), resident_bytes()
        await cycle(1_000, 9_000)
        assert descriptors() == before[0]
        assert resident_bytes() - before[1] < 8 << 20
        assert tier.file_bytes == folder_bytes(tmp_path)
        assert len(tier.oldest()) <= 20
        assert sum(len(segment.records) for segment in tier._segments) == tier.usage().chunks

    with_tier(tmp_path, use)
    assert len(segments(tmp_path)) == 15  # and room for one more, kept back


def test_what_was_cleared_does_not_come_back_when_the_note_of_it_is_reclaimed(tmp_path: Path) -> None:
    async def use(tier: DiskTier) -> None:
        await store(tier, range(30))
        await tier.clear(None)
        for number in range(1000, 1200):  # until the note has gone, but not every file was written anew
            if (await store(tier, [number]))[0] is Reason.NO_ROOM:
                await tier.reclaim([])
            if len(tier._segments) > 3 and not any(r.kind for s in tier._segments for r in s.records):
                break

    with_tier(tmp_path, use, close=False)

    async def nothing(tier: DiskTier) -> list[int]:
        return await right(tier, range(30))

    assert with_tier(tmp_path, nothing) == []


@pytest.mark.parametrize("nbytes", [(20 << 20) + 5, 16 << 20, 3 << 20])
def test_a_large_chunk_is_written_and_read_by_several_threads(tmp_path: Path, nbytes: int) -> None:
    limit_bytes = 16 * (32 << 20)

    async def use(tier: DiskTier) -> None:
        assert await store(tier, [1, 2], nbytes) == [None, None]
        assert await right(tier, [1, 2], nbytes) == [1, 2]

    with_tier(tmp_path, use, limit_bytes, close=False)

    async def damaged(tier: DiskTier) -> list[int]:
        path = segments(tmp_path)[0]
        with path.open("r+b") as file:
            file.seek(4096 + 4096 + nbytes - 1)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
            os.fsync(file.fileno())
        return await right(tier, [1, 2], nbytes)

    assert with_tier(tmp_path, damaged, limit_bytes) == [2]
