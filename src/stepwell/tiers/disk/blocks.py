"""Whole blocks between files and memory, past the page cache: no copy in between where memory is aligned.

A cache's chunks are large and seldom read twice from disk, so the kernel's cache would only take memory
from the arena, and cost a copy. See open(2) on O_DIRECT for what has to be aligned.
"""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

BLOCK_BYTES = 4096
"""What offsets, sizes and addresses are multiples of: no drive in use has larger sectors."""

IOV_MOST = 1024  # IOV_MAX of Linux


class ShortRead(OSError):
    """The file ends before what was asked for: somebody cut it."""


def blocks_bytes(nbytes: int) -> int:
    """`nbytes`, rounded up to whole blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def open_blocks(path: Path, *, create: bool, direct: bool) -> tuple[int, bool]:
    """A descriptor for reading and writing, 0600, and whether it is a direct one; never through a symlink.

    Raises OSError.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != 22:  # EINVAL: this filesystem has no direct I/O
                raise
    return os.open(path, flags, 0o600), False


def aligned(nbytes: int) -> memoryview:
    """New memory for `nbytes` rounded up to whole blocks, zeroed, at an aligned address."""
    return memoryview(mmap.mmap(-1, max(BLOCK_BYTES, blocks_bytes(nbytes))))


def is_aligned(view: memoryview) -> bool:
    """Whether its bytes begin where direct I/O can begin."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) % BLOCK_BYTES == 0


def write_all(fd: int, offset: int, views: Sequence[memoryview]) -> None:
    """Write whole blocks. Raises OSError; how much was written is then unknown."""
    left = [view for view in views if view.nbytes]
    while left:
        written = os.pwritev(fd, left[:IOV_MOST], offset)
        if written == 0:
            raise OSError(28, "a write wrote nothing")
        offset += written
        left = _after(left, written)


def read_all(fd: int, offset: int, views: Sequence[memoryview]) -> None:
    """Fill the views, which are whole blocks. Raises OSError, ShortRead among them."""
    left = [view for view in views if view.nbytes]
    while left:
        got = os.preadv(fd, left[:IOV_MOST], offset)
        if got == 0:
            raise ShortRead(5, "the file ends too early")
        offset += got
        left = _after(left, got)


def _after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    for number, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[number + 1 :]]
        nbytes -= view.nbytes
    return []
