"""Files removed, or put where segments lie, while we serve: made again, and no newer one is lost."""

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_kit import CHUNK_BYTES, LIMIT_BYTES, folder_bytes, limit, right, segments, store, with_tier

from stepwell.tiers.disk import DiskTier, FolderInUse
from stepwell.tiers.disk.segment import FIRST_RECORD, record_bytes
from stepwell.types import Reason

SEGMENT_BYTES = LIMIT_BYTES // 16
CHUNKS_A_SEGMENT = 3
COUNT = 4 * CHUNKS_A_SEGMENT


def fill(folder: Path, *, close: bool = True) -> None:
    assert with_tier(folder, lambda tier: store(tier, range(COUNT)), close=close) == [None] * COUNT


def found(folder: Path) -> tuple[list[int], int]:
    """Who is right after a new start, and how many records were dropped."""

    async def use(tier: DiskTier) -> tuple[list[int], int]:
        held = await right(tier, range(COUNT))
        assert tier.usage().chunks == len(held)
        assert folder_bytes(folder) == tier.file_bytes <= LIMIT_BYTES
        return held, tier.damaged

    return with_tier(folder, use)


async def heal(tier: DiskTier, folder: Path) -> None:
    """Write the log over: it ends full of right chunks, at its full size."""
    for number in range(1000, 1000 + 80):
        if (await store(tier, [number]))[0] is Reason.NO_ROOM:
            await tier.reclaim([])
            assert await store(tier, [number]) == [None]
        assert not folder.exists() or folder_bytes(folder) <= LIMIT_BYTES
    held = await right(tier, range(1000, 1080))
    assert held == list(range(held[0], 1080))
    assert len(held) >= 40
    assert folder_bytes(folder) == tier.file_bytes == 15 * SEGMENT_BYTES


def remove_one(folder: Path) -> None:
    segments(folder)[0].unlink()


def remove_the_written(folder: Path) -> None:
    segments(folder)[-1].unlink()


def remove_all(folder: Path) -> None:
    for path in segments(folder):
        path.unlink()


REMOVALS = [remove_one, remove_the_written, remove_all, shutil.rmtree]


@pytest.mark.parametrize("remove", REMOVALS)
def test_files_removed_while_serving_are_made_again(tmp_path: Path, remove: Callable[[Path], None]) -> None:
    folder = tmp_path / "tier"

    async def use(tier: DiskTier) -> None:
        await store(tier, range(COUNT + 1))
        remove(folder)
        await right(tier, range(COUNT))  # exact, or a miss
        await heal(tier, folder)

    with_tier(folder, use)

    async def again(tier: DiskTier) -> list[int]:
        return await right(tier, range(1000, 1080))

    assert len(with_tier(folder, again)) >= 40


def test_what_lies_where_a_segment_should_is_no_segment(tmp_path: Path) -> None:
    fill(tmp_path)
    for number, content in enumerate(
        [b"", b"short", os.urandom(SEGMENT_BYTES), os.urandom(SEGMENT_BYTES + 1)]
    ):
        (tmp_path / f"segment-{number + 50:08d}").write_bytes(content)
    os.mkfifo(tmp_path / "segment-00000099")
    assert found(tmp_path) == (list(range(COUNT)), 0)
    fill(tmp_path)
    assert found(tmp_path) == (list(range(COUNT)), 0)


def test_the_copy_of_a_segment_serves_nothing_wrong(tmp_path: Path) -> None:
    fill(tmp_path)
    one = segments(tmp_path)[0]
    shutil.copy(one, tmp_path / "segment-00000050")
    assert found(tmp_path)[0] == list(range(COUNT))


def test_a_batch_longer_than_a_segment_does_not_wait_for_itself_when_files_were_removed(
    tmp_path: Path,
) -> None:
    async def use(tier: DiskTier) -> None:
        await store(tier, range(COUNT + 1))
        remove_all(tmp_path)
        outcomes = await store(tier, range(100, 100 + 3 * CHUNKS_A_SEGMENT))
        assert outcomes == [None] * len(outcomes)
        await heal(tier, tmp_path)

    with_tier(tmp_path, use)


def test_a_folder_that_was_removed_is_locked_anew(tmp_path: Path) -> None:
    folder = tmp_path / "tier"

    async def use(tier: DiskTier) -> None:
        await store(tier, range(COUNT))
        shutil.rmtree(folder)
        await store(tier, range(100, 100 + COUNT))
        with pytest.raises(FolderInUse):
            DiskTier(folder, LIMIT_BYTES)

    with_tier(folder, use)


def test_a_clear_behind_a_write_that_failed_outlives_a_kill(tmp_path: Path) -> None:
    async def use(tier: DiskTier) -> None:
        await store(tier, [0])
        # The file is there at full size, but what is written beyond this fails, and leaves a hole.
        with limit(resource.RLIMIT_FSIZE, FIRST_RECORD + record_bytes(CHUNK_BYTES)):
            assert await store(tier, [1]) == [Reason.OUT_OF_SERVICE]
        await tier.clear(None)

    with_tier(tmp_path, use, close=False)

    async def nothing(tier: DiskTier) -> list[int]:
        return await right(tier, [0, 1])

    assert with_tier(tmp_path, nothing) == []
