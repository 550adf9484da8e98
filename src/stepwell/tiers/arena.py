"""Shared memory that the cache server and the engines' workers map: a memfd, passed as a descriptor.

A memfd has no name, so a killed server leaves nothing behind, and it lives as long as anyone maps it,
so a copy under way when the server dies still reads what it was promised.
"""

import ctypes
import fcntl
import mmap
import os
from pathlib import Path

# From <linux/mman.h>; the mmap module does not name them. They fault pages in without touching data.
_MADV_POPULATE_READ = 22  # Linux 5.14
_MADV_POPULATE_WRITE = 23
# mmap.madvise keeps the interpreter lock: small steps let an engine's other threads run between them.
_POPULATE_STEP_BYTES = 64 << 20
_PAGE_BYTES = 4096


class ArenaTooLarge(ValueError):
    """More memory was asked for than this machine or container has. The message says what would fit."""


class ArenaMap:
    """One process's mapping of an arena of `size_bytes` bytes."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map `fd`, which stays the caller's. Raises OSError when it cannot be mapped."""
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes)
        # Page tables for 2 MiB instead of 4 KiB pages, where the kernel grants them to shared memory.
        _advise(self._map, mmap.MADV_HUGEPAGE, 0, size_bytes)
        self.buffer = memoryview(self._map)

    def populate(self, write: bool) -> None:
        """Fault every page in now, so that no copy pays for it later. `write` also allocates them."""
        advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
        for start in range(0, self.size_bytes, _POPULATE_STEP_BYTES):
            nbytes = min(_POPULATE_STEP_BYTES, self.size_bytes - start)
            if not _advise(self._map, advice, start, nbytes):
                _touch(self.buffer[start : start + nbytes], write)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes at `offset`, writable, without a copy."""
        return self.buffer[offset : offset + nbytes]

    @property
    def address(self) -> int:
        """Where the mapping begins in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        """Unmap, unless views of it are still held: then the mapping goes with the last of them."""
        try:
            self.buffer.release()
            self._map.close()
        except BufferError:
            pass


def _advise(mapping: mmap.mmap, advice: int, start: int, nbytes: int) -> bool:
    try:
        mapping.madvise(advice, start, nbytes)
    except OSError:
        return False  # an older kernel, or one without huge pages for shared memory
    return True


def _touch(view: memoryview, write: bool) -> None:
    for offset in range(0, len(view), _PAGE_BYTES):
        byte = view[offset]
        if write:
            view[offset] = byte


def create_arena(size_bytes: int) -> tuple[int, ArenaMap]:
    """A new arena, every page allocated: its descriptor and our mapping of it.

    Raises ArenaTooLarge before it takes memory that is not there: the kernel would grant it and later
    kill a process of its choice.
    """
    if size_bytes < 1:
        raise ValueError(
            f"no arena has {size_bytes} bytes: memory must be at least {_PAGE_BYTES} bytes, one page"
        )
    room_bytes = memory_room_bytes()
    if size_bytes > room_bytes:
        raise ArenaTooLarge(
            f"memory={size_bytes / 2**30:.2f} GiB is more than the {room_bytes / 2**30:.2f} GiB that this "
            "machine or container has free: choose a smaller --memory (or STEPWELL_MEMORY)"
        )
    fd = os.memfd_create("stepwell-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        # Nobody who maps it can cut it short under the others: that would kill them by SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        arena = ArenaMap(fd, size_bytes)
        arena.populate(write=True)
    except BaseException:
        os.close(fd)
        raise
    return fd, arena


def memory_room_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can still be taken: what the machine has free, or what the container may still use."""
    rooms = [_available_bytes(proc / "meminfo")]
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _cgroup_rooms(cgroups, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            rooms += _cgroup_rooms(cgroups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(rooms)


def _available_bytes(meminfo: Path) -> int:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_rooms(root: Path, path: str, limit_file: str, usage_file: str) -> list[int]:
    # Every group from ours to the root limits us. Inside a container the path may name a folder that is
    # only visible from outside; then the root folder is our own group.
    rooms = []
    folder = root / path.lstrip("/")
    for group in [folder, *folder.parents]:
        limit, usage = _lines(group / limit_file), _lines(group / usage_file)
        if limit and usage and limit[0] != "max":
            rooms.append(max(0, int(limit[0]) - int(usage[0]) + _file_cache_bytes(group)))
        if group == root:
            break
    return rooms


def _file_cache_bytes(group: Path) -> int:
    # Clean file pages count as used, but go when memory is asked for.
    for line in _lines(group / "memory.stat"):
        if line.startswith(("inactive_file ", "total_inactive_file ")):
            return int(line.split()[1])
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
