"""The offline check, and its command."""

import json
from pathlib import Path

import pytest
from disk_kit import CHUNK_BYTES, LIMIT_BYTES, segments, store, with_tier

from stepwell.cli import main
from stepwell.tiers.disk import DiskTier
from stepwell.tiers.disk.fsck import check
from support.chunks import chunk_id


def test_a_whole_folder(tmp_path: Path) -> None:
    async def use(tier: DiskTier) -> None:
        await store(tier, range(7))
        await tier.clear(chunk_id(0, space=1)[:16])

    with_tier(tmp_path, use)
    report = check(tmp_path)
    assert (report.segments, report.records, report.chunk_bytes) == (3, 7, 7 * CHUNK_BYTES)
    assert report.chunks_by_space == {chunk_id(0)[:16].hex(): 7}
    assert (report.cleared, report.damaged) == (1, [])
    assert report.file_bytes == 3 * 65536


def test_damage_is_told_by_file_place_and_chunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_tier(tmp_path, lambda tier: store(tier, range(3)))
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[2 * 4096 + 5] ^= 1
    data[5 * 4096 + 70] ^= 1
    path.write_bytes(data)
    assert main(["fsck", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "2 damaged records" in told
    assert f"segment-00000000 at 4096: chunk {chunk_id(0).hex()}: its bytes fail their checksum" in told
    assert f"at 20480: chunk {chunk_id(1).hex()}: its header is not the one" in told
    assert main(["fsck", str(tmp_path), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["damaged"]) == 2
    assert path.read_bytes() == data, "it changes nothing"


def test_a_folder_in_use_or_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def use(_: DiskTier) -> None:
        assert main(["fsck", str(tmp_path)]) == 1

    with_tier(tmp_path, use, LIMIT_BYTES)
    assert "another cache uses the folder" in capsys.readouterr().err
    assert main(["fsck", str(tmp_path / "no")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
