"""The folder of a disk tier: whose it is, and which files in it are segments."""

import fcntl
import os
import re
from pathlib import Path

_SEGMENT = re.compile(r"segment-(\d{8})", re.ASCII)


class DiskError(OSError):
    """The folder cannot be used; the message says why and what to do."""


class FolderInUse(DiskError):
    """Another server uses this folder."""


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:08d}"


def own_folder(folder: Path) -> int:
    """Make the folder if need be, and lock it: the lock's descriptor, which holds it until it is closed.

    Raises FolderInUse, or DiskError for a folder that cannot be used.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise DiskError(
            error.errno, f"cannot use the folder {folder}: {error.strerror}; choose another --disk"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise DiskError(
                error.errno, f"cannot lock {folder / 'lock'}: {error.strerror}; choose another --disk"
            ) from error
        raise FolderInUse(
            error.errno, f"another cache uses the folder {folder}: stop it first, or choose another --disk"
        ) from error
    return lock


def segment_files(folder: Path) -> dict[int, Path]:
    """The segments' files by number. Whatever else lies in the folder is not ours."""
    found = {}
    for name in os.listdir(folder):
        match = _SEGMENT.fullmatch(name)
        if match is not None:
            found[int(match[1])] = folder / name
    return found
