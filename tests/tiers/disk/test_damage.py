"""Files that somebody, or the drive, has changed: exact bytes or a miss, counted, and healed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_kit import CHUNK_BYTES, LIMIT_BYTES, fetch, folder_bytes, right, segments, store, with_tier

from stepwell.codec.frame import HEADER_BYTES
from stepwell.tiers.disk import DiskTier
from stepwell.tiers.disk.blocks import BLOCK_BYTES
from stepwell.tiers.disk.segment import FIRST_RECORD, record_bytes, table_bytes
from stepwell.types import Reason
from support.chunks import chunk_id

SEGMENT_BYTES = LIMIT_BYTES // 16
CHUNKS_A_SEGMENT = 3
COUNT = 4 * CHUNKS_A_SEGMENT
VICTIM = 1  # chunk 1 is the second record of the first segment
RECORD = FIRST_RECORD + record_bytes(CHUNK_BYTES)
TABLE = SEGMENT_BYTES - table_bytes(CHUNKS_A_SEGMENT)

HEADER_REGIONS = {"magic": 0, "kind": 10, "space": 16, "key": 40, "sequence": 64, "length": 72, "digest": 80}
PAYLOAD_REGIONS = {"payload": BLOCK_BYTES, "middle": BLOCK_BYTES + 5_000, "tail": BLOCK_BYTES + CHUNK_BYTES - 1}
RECORD_REGIONS = {**HEADER_REGIONS, "own digest": HEADER_BYTES - 1, **PAYLOAD_REGIONS}


def flip(path: Path, offset: int, bit: int = 3) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
        os.fsync(file.fileno())


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


def others(*numbers: int) -> list[int]:
    return [number for number in range(COUNT) if number not in numbers]


@pytest.mark.parametrize("offset", RECORD_REGIONS.values(), ids=RECORD_REGIONS.keys())
def test_a_bit_flipped_in_a_record_costs_that_chunk(tmp_path: Path, offset: int) -> None:
    fill(tmp_path)
    flip(segments(tmp_path)[0], RECORD + offset)
    assert found(tmp_path) == (others(VICTIM), 1)


@pytest.mark.parametrize("offset", RECORD_REGIONS.values(), ids=RECORD_REGIONS.keys())
def test_a_bit_flipped_while_serving_is_counted_once_and_the_chunk_can_be_stored_anew(
    tmp_path: Path, offset: int
) -> None:
    async def use(tier: DiskTier) -> None:
        await store(tier, range(COUNT))
        flip(segments(tmp_path)[0], RECORD + offset)
        assert await fetch(tier, chunk_id(VICTIM)) is Reason.CORRUPT
        assert (tier.damaged, tier.usage().chunks) == (1, COUNT - 1)
        assert await fetch(tier, chunk_id(VICTIM)) is Reason.NOT_HELD
        assert await store(tier, [VICTIM]) == [None]
        assert await right(tier, range(COUNT)) == others()
        assert tier.damaged == 1

    with_tier(tmp_path, use)
    assert found(tmp_path) == (others(), 0), "the newer copy counts"


@pytest.mark.parametrize("offset", [0, 8, 16, 24, 32])
def test_a_bit_flipped_in_a_segments_header_costs_the_segment(tmp_path: Path, offset: int) -> None:
    fill(tmp_path)
    flip(segments(tmp_path)[0], offset)
    assert found(tmp_path) == (others(0, 1, 2), 0)
    fill(tmp_path)
    assert found(tmp_path) == (others(), 0), "its file is used again"


@pytest.mark.parametrize("offset", [TABLE + 2_000, *range(SEGMENT_BYTES - 250, SEGMENT_BYTES, 24)])
def test_a_bit_flipped_in_the_table_costs_nothing(tmp_path: Path, offset: int) -> None:
    fill(tmp_path)
    flip(segments(tmp_path)[0], offset)
    assert found(tmp_path) == (others(), 0)


def test_a_bit_flipped_in_a_record_that_no_table_tells_of_costs_no_more_than_its_segment(
    tmp_path: Path,
) -> None:
    fill(tmp_path, close=False)
    last = segments(tmp_path)[COUNT // CHUNKS_A_SEGMENT - 1]
    flip(last, RECORD + HEADER_REGIONS["key"])
    held, _ = found(tmp_path)
    assert held[: COUNT - 2] == list(range(COUNT - 2))


SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, RECORD + BLOCK_BYTES + 1, SEGMENT_BYTES - 1]


@pytest.mark.parametrize("size", SIZES)
def test_a_file_that_was_cut_costs_its_chunks(tmp_path: Path, size: int) -> None:
    fill(tmp_path)
    os.truncate(segments(tmp_path)[0], size)
    assert found(tmp_path) == (others(0, 1, 2), 0)
    fill(tmp_path)
    assert found(tmp_path) == (others(), 0)


@pytest.mark.parametrize("size", SIZES)
def test_a_file_that_is_cut_while_serving_costs_what_was_cut(tmp_path: Path, size: int) -> None:
    whole = [n for n in range(3) if FIRST_RECORD + (n + 1) * record_bytes(CHUNK_BYTES) <= size]

    async def use(tier: DiskTier) -> None:
        await store(tier, range(COUNT))
        os.truncate(segments(tmp_path)[0], size)
        assert await right(tier, range(COUNT)) == [*whole, *range(3, COUNT)]
        assert (tier.damaged, tier.usage().chunks) == (3 - len(whole), COUNT - 3 + len(whole))
        await heal(tier, tmp_path)

    with_tier(tmp_path, use)


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
    for number, content in enumerate([b"", b"short", os.urandom(SEGMENT_BYTES), os.urandom(SEGMENT_BYTES + 1)]):
        (tmp_path / f"segment-{number + 50:08d}").write_bytes(content)
    os.mkfifo(tmp_path / "segment-00000099")
    assert found(tmp_path) == (others(), 0)
    fill(tmp_path)
    assert found(tmp_path) == (others(), 0)


def test_the_copy_of_a_segment_serves_nothing_wrong(tmp_path: Path) -> None:
    fill(tmp_path)
    one = segments(tmp_path)[0]
    shutil.copy(one, tmp_path / "segment-00000050")
    assert found(tmp_path)[0] == others()


def test_a_batch_longer_than_a_segment_does_not_wait_for_itself_when_files_were_removed(tmp_path: Path) -> None:
    async def use(tier: DiskTier) -> None:
        await store(tier, range(COUNT + 1))
        remove_all(tmp_path)
        outcomes = await store(tier, range(100, 100 + 3 * CHUNKS_A_SEGMENT))
        assert outcomes == [None] * len(outcomes)
        await heal(tier, tmp_path)

    with_tier(tmp_path, use)
