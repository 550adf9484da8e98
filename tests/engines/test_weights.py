"""Digests of weight files: by content, remembered, never stale, never fatal."""

import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest

from stepwell.engines import weights
from stepwell.engines.weights import default_kept, digest_files, file_form, named_by_content
from support.waiting import wait_until

OLD_FILE = Path(msgspec.__file__)  # has not changed for a while: remembered at once


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"A" * 1000)
    (folder / "b.safetensors").write_bytes(b"B" * 1000)
    return folder


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "stepwell" / "weights.json"


class Reads:
    """Which files were read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[Path] = []
        digest = weights._digest

        def noted(path: Path) -> str:
            self.paths.append(path)
            return digest(path)

        monkeypatch.setattr(weights, "_digest", noted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


@pytest.mark.parametrize("clock", ["as it is", "whole seconds"])
def test_replaced_in_place_differs_and_back_again_is_the_same(
    model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    if clock == "whole seconds":  # as some file systems count

        def coarse(path: Path) -> weights.FileForm:
            form = file_form(path)
            times = (form.modified_ns // 10**9 * 10**9, form.changed_ns // 10**9 * 10**9)
            return weights.FileForm(form.size_bytes, form.inode, *times)

        monkeypatch.setattr(weights, "file_form", coarse)
    first = digest_files(files(model), kept)
    for _ in range(20):  # at once, same size, same inode
        (model / "a.safetensors").write_bytes(b"X" * 1000)
        assert digest_files(files(model), kept) != first
        (model / "a.safetensors").write_bytes(b"A" * 1000)
        assert digest_files(files(model), kept) == first


def test_times_set_back_do_not_hide_a_change(model: Path, kept: Path) -> None:
    path = model / "a.safetensors"
    first = digest_files(files(model), kept)
    wait_until(lambda: digest_files(files(model), kept) == first and str(path) in kept_paths(kept))
    times = path.stat()
    path.write_bytes(b"X" * 1000)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest_files(files(model), kept) != first


def kept_paths(kept: Path) -> list[str]:
    return list(msgspec.json.decode(kept.read_bytes())) if kept.exists() else []


def test_the_folders_place_does_not_matter_but_names_do(model: Path, kept: Path, tmp_path: Path) -> None:
    first = digest_files(files(model), kept)
    copy = tmp_path / "another" / "place"
    shutil.copytree(model, copy)
    assert digest_files(reversed(files(copy)), kept) == first
    link = tmp_path / "link"
    link.symlink_to(copy)
    assert digest_files(files(link), kept) == first
    (copy / "b.safetensors").rename(copy / "c.safetensors")
    assert digest_files(files(copy), kept) != first


def test_contents_swapped_between_two_files(model: Path, kept: Path) -> None:
    first = digest_files(files(model), kept)
    (model / "a.safetensors").rename(model / "x")
    (model / "b.safetensors").rename(model / "a.safetensors")
    (model / "x").rename(model / "b.safetensors")
    assert digest_files(files(model), kept) != first


def test_a_file_more_or_fewer(model: Path, kept: Path) -> None:
    first = digest_files(files(model), kept)
    (model / "c.safetensors").write_bytes(b"")
    more = digest_files(files(model), kept)
    (model / "c.safetensors").unlink()
    (model / "b.safetensors").unlink()
    assert len({first, more, digest_files(files(model), kept)}) == 3


def test_an_unchanged_file_is_read_once(kept: Path, reads: Reads) -> None:
    first = digest_files([OLD_FILE], kept)
    assert digest_files([OLD_FILE], kept) == first
    assert reads.paths == [OLD_FILE.resolve()]
    assert kept.stat().st_mode & 0o777 == 0o600


def test_files_named_by_content_are_not_read(tmp_path: Path, kept: Path, reads: Reads) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    digests = []
    for name in ("0" * 64, "f" * 64):
        (blobs / name).write_bytes(b"large")
        (snapshot / "model.safetensors").unlink(missing_ok=True)
        (snapshot / "model.safetensors").symlink_to(blobs / name)
        assert named_by_content(snapshot / "model.safetensors")
        digests.append(digest_files(files(snapshot), kept))
    assert len(set(digests)) == 2
    assert reads.paths == []


@pytest.mark.parametrize("name", ["0" * 63, "0" * 65, "F" * 64, "0" * 64 + ".bin", "0" * 40])
def test_other_names_are_read(tmp_path: Path, kept: Path, reads: Reads, name: str) -> None:
    (tmp_path / name).write_bytes(b"small")
    digest_files([tmp_path / name], kept)
    assert reads.paths == [tmp_path / name]


@pytest.mark.parametrize(
    "damage", [b"", b"\0", b"{", b"[1]", b'{"/x": {"form": 1}}', b'{"a": null}', b"\xff\xfe{}"]
)
def test_a_damaged_kept_file_costs_a_reading(kept: Path, reads: Reads, damage: bytes) -> None:
    first = digest_files([OLD_FILE], kept)
    kept.write_bytes(damage)
    assert digest_files([OLD_FILE], kept) == first
    assert digest_files([OLD_FILE], kept) == first
    assert len(reads.paths) == 2


def test_truncated_at_every_byte(kept: Path) -> None:
    first = digest_files([OLD_FILE], kept)
    whole = kept.read_bytes()
    for length in range(len(whole)):
        kept.write_bytes(whole[:length])
        assert digest_files([OLD_FILE], kept) == first


@pytest.mark.parametrize("folder", ["/proc/stepwell", "/dev/null/stepwell"])
def test_nowhere_to_remember(model: Path, kept: Path, folder: str) -> None:
    nowhere = Path(folder) / "weights.json"
    assert digest_files(files(model), nowhere) == digest_files(files(model), kept)
    assert digest_files(files(model), None) == digest_files(files(model), kept)
    assert not nowhere.exists()


def test_a_failed_write_leaves_no_litter(tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "weights.json"
    kept.mkdir(parents=True)
    digest_files([OLD_FILE], kept)
    assert [path.name for path in kept.parent.iterdir()] == ["weights.json"]


def test_a_path_that_is_no_text(tmp_path: Path, kept: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff\xfe")
    folder.mkdir()
    for path in (folder / "a", tmp_path / "a"):
        path.write_bytes(b"weights")
    changed_ns = file_form(tmp_path / "a").changed_ns
    wait_until(lambda: time.time_ns() - changed_ns > weights._CLOCK_TICK_NS)  # it would be remembered
    assert digest_files([folder / "a"], kept) == digest_files([tmp_path / "a"], kept)
    assert kept_paths(kept) == [str(tmp_path / "a")]


def test_an_unreadable_file_is_an_error(tmp_path: Path, kept: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digest_files([tmp_path / "absent"], kept)
    with pytest.raises(IsADirectoryError):
        digest_files([tmp_path], kept)


def test_where_digests_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_kept() == tmp_path / "stepwell" / "weights.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_kept() == tmp_path / ".cache" / "stepwell" / "weights.json"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")  # what expansion leaves for a user id that no home is known of
    assert default_kept() is None
