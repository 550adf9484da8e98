"""The files of a log: never more bytes than the limit, at no moment; and the threads that work on them."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import NamedTuple, TypeVar, TypeVarTuple, Unpack

from stepwell.tiers.disk.blocks import BLOCK_BYTES, aligned, open_blocks, write_all
from stepwell.tiers.disk.folder import DiskError, own_folder, segment_files, segment_path
from stepwell.tiers.disk.segment import read_sequence

logger = logging.getLogger(__name__)
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_FULL = (ENOSPC, EDQUOT, EFBIG)  # no room for more, for whatever reason


class SegmentFile(NamedTuple):
    """A file of the log, open."""

    number: int  # in its name
    fd: int
    nbytes: int


class SegmentFiles:
    """Files of `segment_bytes`, and those of an earlier limit. Counters change in the event loop only."""

    def __init__(self, folder: Path, limit_bytes: int, segment_bytes: int, io_threads: int) -> None:
        """Take the folder. Raises FolderInUse, or DiskError for a folder that cannot be used."""
        self.direct = True  # whether reads and writes go past the page cache
        self.file_bytes = 0  # of all files, whatever they hold
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._segment_bytes = segment_bytes
        self._free: list[SegmentFile] = []  # of our size, with no header
        self._cannot_grow = False  # the drive is full of others' files
        self._lock = own_folder(folder)
        self._threads = ThreadPoolExecutor(io_threads, "stepwell-disk")

    def run(self, work: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> Awaitable[T]:
        """On one of the threads."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def open_all(self) -> list[tuple[int, SegmentFile]]:
        """The files with a header, by their sequence numbers, after those that exceed the limit are removed:
        empty ones first, then the oldest.

        Raises DiskError for a file that cannot be opened.
        """
        found: list[tuple[int, SegmentFile]] = []
        for number, path in sorted(segment_files(self._folder).items()):
            try:
                fd, direct = open_blocks(path, create=False, direct=self.direct)
            except OSError as error:
                raise DiskError(
                    error.errno, f"cannot open {path}: {error.strerror}; remove it, or choose another --disk"
                ) from error
            self._note_direct(direct)
            file = SegmentFile(number, fd, os.fstat(fd).st_size)
            self.file_bytes += file.nbytes
            sequence = _read_sequence(fd)
            if sequence is not None:
                found.append((sequence, file))
            elif file.nbytes == self._segment_bytes:
                self._free.append(file)
            else:
                self._remove(file)
                self.file_bytes -= file.nbytes
        found.sort()
        while self.file_bytes > self._limit_bytes:
            file = self._free.pop() if self._free else found.pop(0)[1]
            self._remove(file)
            self.file_bytes -= file.nbytes
        return found

    @property
    def spaces(self) -> int:
        """How many segments could be begun, the one that is kept back included."""
        return len(self._free) + (self._limit_bytes - self.file_bytes) // self._segment_bytes

    @property
    def can_begin(self) -> bool:
        """Whether one can be begun and one kept back; on a full drive, whether one can be begun."""
        return self.spaces >= 2 or (self._cannot_grow and bool(self._free))

    async def take(self, spare: bool) -> SegmentFile | None:
        """A file to begin; None when there is no room, or (without `spare`) only what is kept back.

        Raises OSError.
        """
        for file in [file for file in self._free if not is_there(file.fd)]:
            self._free.remove(file)
            os.close(file.fd)
            self.file_bytes -= file.nbytes
        if self.spaces < (1 if spare else 2):
            return None
        if self._free:
            return self._free.pop()
        try:
            file = await self.run(self._make)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            if not self._cannot_grow:
                self._cannot_grow = True
                logger.warning(
                    "the drive of %s is full: the disk tier goes on with %d bytes",
                    self._folder,
                    self.file_bytes,
                )
            return None
        self._cannot_grow = False
        self.file_bytes += file.nbytes
        return file

    def untake(self, file: SegmentFile) -> None:
        """It was not begun after all."""
        self._free.append(file)

    async def give_back(self, file: SegmentFile) -> None:
        """Nobody reads or writes it any more: keep it for what comes, or remove it."""
        if file.nbytes == self._segment_bytes and await self.run(_is_emptied, file):
            self._free.append(file)
        else:
            await self.run(self._remove, file)
            self.file_bytes -= file.nbytes

    def close(self, fds: Iterable[int]) -> None:
        """Close these and all that is open here, when the threads have ended their work."""
        self._threads.shutdown()
        for fd in [*fds, *(file.fd for file in self._free)]:
            os.close(fd)
        self._free = []
        os.close(self._lock)

    def _make(self) -> SegmentFile:
        if os.fstat(self._lock).st_nlink == 0:  # somebody removed the folder, and another may use it by now
            removed, self._lock = self._lock, own_folder(self._folder)
            os.close(removed)
        number = next(n for n in range(1 << 30) if not segment_path(self._folder, n).exists())
        path = segment_path(self._folder, number)
        fd, direct = open_blocks(path, create=True, direct=self.direct)
        try:
            self._note_direct(direct)
            os.posix_fallocate(fd, 0, self._segment_bytes)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return SegmentFile(number, fd, self._segment_bytes)

    def _remove(self, file: SegmentFile) -> None:
        if is_there(file.fd):  # else somebody removed it, and a newer file may have its name
            segment_path(self._folder, file.number).unlink(missing_ok=True)
        os.close(file.fd)

    def _note_direct(self, direct: bool) -> None:
        if self.direct and not direct:
            self.direct = False
            logger.warning(
                "%s has no direct I/O: reads and writes go through the page cache, slower and at the cost "
                "of memory",
                self._folder,
            )


def is_there(fd: int) -> bool:
    """Whether the file still has a name."""
    return os.fstat(fd).st_nlink > 0


def _is_emptied(file: SegmentFile) -> bool:
    """Take back its header, or the next start would find again what was reclaimed, and even cleared."""
    try:
        write_all(file.fd, 0, [aligned(BLOCK_BYTES)])
    except OSError:
        return False
    return is_there(file.fd) and os.fstat(file.fd).st_size == file.nbytes


def _read_sequence(fd: int) -> int | None:
    try:
        return read_sequence(fd)
    except OSError as error:
        logger.warning("a segment's header cannot be read, its chunks are lost: %s", error)
        return None
