"""The arena: how large it may be, that it is there from the start, and that nothing of it stays behind."""

import gc
import mmap
import os
import re
from pathlib import Path

import pytest

from stepwell import connect
from stepwell.policy.evict import make_evictor
from stepwell.policy.index import Index
from stepwell.server.core import Core
from stepwell.tiers.arena import ArenaMap, ArenaTooLarge, create_arena, memory_room_bytes
from stepwell.tiers.memory import MemoryTier
from stepwell.types import Reason, SpaceSpec
from stepwell.wire import Run
from support.chunks import key
from support.server import RawClient, ServerProcess

MIB = 1 << 20


def shared_kib(pid: int | str = "self") -> int:
    """Shared memory that this process has in its page tables."""
    found = re.search(r"RssShmem:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def open_files(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def mappings(pid: int | str = "self") -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("stepwell-arena")


# -- how large it may be -----------------------------------------------------------------------------------


class Machine:
    """/proc and /sys/fs/cgroup as files of ours."""

    def __init__(self, folder: Path, available_mib: int) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroups.mkdir()
        kib = available_mib * 1024
        (self.proc / "meminfo").write_text(f"MemTotal:  99999999 kB\nMemFree: 1 kB\nMemAvailable: {kib} kB\n")

    def we_are_in(self, *lines: str) -> None:
        (self.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))

    def group(self, path: str, **files: int | str) -> None:
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("memory_", "memory.", 1)).write_text(f"{text}\n")

    def room_mib(self) -> float:
        return memory_room_bytes(self.proc, self.cgroups) / MIB


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, available_mib=1000)


def test_without_control_groups_it_is_what_the_machine_has(machine: Machine) -> None:
    assert machine.room_mib() == 1000


def test_a_machine_that_does_not_say_has_at_most_its_memory(tmp_path: Path) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_room_bytes(tmp_path, tmp_path) == whole


def test_a_group_of_version_2_limits(machine: Machine) -> None:
    machine.we_are_in("0::/a")
    machine.group("a", memory_max=300 * MIB, memory_current=100 * MIB)
    assert machine.room_mib() == 200
    machine.group("a", memory_stat=f"anon 5\ninactive_file {50 * MIB}\nactive_file {9 * MIB}")
    assert machine.room_mib() == 250, "clean file pages go when they must"
    machine.group("a", memory_max="max")
    assert machine.room_mib() == 1000


def test_the_machine_limits_a_group_that_may_have_more(machine: Machine) -> None:
    machine.we_are_in("0::/a")
    machine.group("a", memory_max=5000 * MIB, memory_current=0)
    assert machine.room_mib() == 1000


@pytest.mark.parametrize(("outer_mib", "inner_mib", "room_mib"), [(300, 200, 200), (200, 300, 200)])
def test_every_group_up_to_the_root_limits(
    machine: Machine, outer_mib: int, inner_mib: int, room_mib: int
) -> None:
    machine.we_are_in("0::/a/b/c")
    machine.group("a", memory_max=outer_mib * MIB, memory_current=0)
    machine.group("a/b", memory_max="max", memory_current=0)
    machine.group("a/b/c", memory_max=inner_mib * MIB, memory_current=0)
    assert machine.room_mib() == room_mib


def test_inside_a_container_the_root_folder_is_our_group(machine: Machine) -> None:
    for path in ("/system.slice/docker-1.scope", "/", "/../../other"):
        machine.we_are_in(f"0::{path}")
        machine.group("", memory_max=300 * MIB, memory_current=MIB)
        assert machine.room_mib() == 299


def test_a_group_of_version_1_limits(machine: Machine) -> None:
    machine.we_are_in("12:cpuset:/x", "4:memory:/docker/1", "2:cpu,cpuacct:/docker/1", "1:name=systemd:/x")
    machine.group("memory", memory_limit_in_bytes=2**63 - 4096, memory_usage_in_bytes=7 * MIB)
    assert machine.room_mib() == 1000
    machine.group("memory/docker/1", memory_limit_in_bytes=300 * MIB, memory_usage_in_bytes=100 * MIB)
    assert machine.room_mib() == 200
    machine.group("memory", memory_limit_in_bytes=107 * MIB)
    assert machine.room_mib() == 100
    machine.group("cpu/docker/1", memory_limit_in_bytes=MIB, memory_usage_in_bytes=0)
    assert machine.room_mib() == 100


def test_both_versions_at_once(machine: Machine) -> None:
    machine.we_are_in("4:cpu,memory:/a", "0::/b")
    machine.group("memory/a", memory_limit_in_bytes=400 * MIB, memory_usage_in_bytes=0)
    machine.group("b", memory_max=500 * MIB, memory_current=0)
    assert machine.room_mib() == 400
    machine.group("b", memory_max=300 * MIB)
    assert machine.room_mib() == 300


def test_a_group_above_its_limit_has_no_room(machine: Machine) -> None:
    machine.we_are_in("0::/a")
    machine.group("a", memory_max=100 * MIB, memory_current=101 * MIB)
    assert machine.room_mib() == 0


def test_on_this_machine_it_is_something_between_nothing_and_all() -> None:
    assert 0 < memory_room_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_more_than_there_is_is_refused_before_it_is_taken() -> None:
    before = open_files(), shared_kib()
    with pytest.raises(ArenaTooLarge) as refused:
        create_arena(1 << 50)
    message = str(refused.value)
    assert message.startswith("memory=1048576.00 GiB is more than the ")
    assert "choose a smaller --memory (or STEPWELL_MEMORY)" in message
    assert (open_files(), shared_kib()) == before


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_an_arena_of_nothing_is_refused(size_bytes: int) -> None:
    before = open_files()
    with pytest.raises(ValueError, match="memory must be at least 4096 bytes"):
        create_arena(size_bytes)
    assert open_files() == before


# -- that it is there, and gone -----------------------------------------------------------------------------


def test_every_page_is_there_from_the_start_and_all_goes_with_close() -> None:
    before_kib, files, maps = shared_kib(), open_files(), mappings()
    fd, arena = create_arena(64 * MIB)
    assert shared_kib() - before_kib >= 64 * 1024
    assert os.fstat(fd).st_blocks * 512 >= 64 * MIB, "allocated, whoever maps it"
    assert mappings() == maps + 1
    arena.close()
    os.close(fd)
    assert (open_files(), mappings()) == (files, maps)
    assert shared_kib() - before_kib < 1024


def test_without_the_kernels_help_every_page_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a kernel before 5.14."""
    monkeypatch.setattr("stepwell.tiers.arena._MADV_POPULATE_WRITE", 12345)
    monkeypatch.setattr("stepwell.tiers.arena._MADV_POPULATE_READ", 12345)
    before_kib = shared_kib()
    fd, arena = create_arena(MIB)
    arena.view(0, 5)[:] = b"hello"
    assert shared_kib() - before_kib >= 1024
    arena.populate(write=True)
    assert bytes(arena.view(0, 5)) == b"hello", "touching changes nothing"
    other = ArenaMap(fd, MIB)
    other.populate(write=False)
    assert shared_kib() - before_kib >= 2 * 1024
    other.close()
    arena.close()
    os.close(fd)


def test_a_view_outlives_close_and_the_mapping_goes_with_it() -> None:
    fd, arena = create_arena(MIB)
    maps = mappings()
    view = arena.view(4096, 5)
    view[:] = b"hello"
    arena.close()
    os.close(fd)
    assert bytes(view) == b"hello"
    assert mappings() == maps
    del view, arena
    gc.collect()
    assert mappings() == maps - 1


def test_two_mappings_are_one_memory() -> None:
    fd, arena = create_arena(MIB)
    other = ArenaMap(fd, MIB)
    arena.view(MIB - 5, 5)[:] = b"hello"
    assert os.pread(fd, 5, MIB - 5) == b"hello"
    os.close(fd)
    assert bytes(other.view(MIB - 5, 5)) == b"hello"
    assert arena.address != other.address
    assert arena.address % mmap.PAGESIZE == 0
    arena.close()
    other.close()


def arena_inode(pid: int) -> str:
    (line,) = [
        line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "stepwell-arena" in line
    ]
    return line.split()[4]


def who_maps(inodes: set[str]) -> list[str]:
    users = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # it ended meanwhile, or is another user's
            continue
        users += [str(maps) for line in lines if "stepwell-arena" in line and line.split()[4] in inodes]
    return users


def test_a_server_killed_and_started_five_times_leaves_nothing(folder: Path) -> None:
    server = ServerProcess(folder, memory="32MiB")
    seen, inodes = [], set()
    try:
        for _ in range(6):
            server.start()
            seen.append((shared_kib(server.pid) // 1024, open_files(server.pid), mappings(server.pid)))
            inodes.add(arena_inode(server.pid))
            assert len(who_maps(inodes)) == 1, "only the one that runs"
            server.kill()
        assert who_maps(inodes) == []
        assert len(set(seen)) == 1, f"each start takes as much as the first: {seen}"
        assert 32 <= seen[0][0] < 40
        assert [name for name in os.listdir("/dev/shm") if "stepwell" in name] == []
        assert sorted(path.name for path in folder.iterdir()) == ["s.sock", "s.sock.lock", "serve.log"]
    finally:
        server.stop()


def resident_kib(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE // 1024


@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "fifo"])
def test_ten_thousand_stores_and_evictions_leave_memory_and_descriptors_flat(eviction: str) -> None:
    memory = MemoryTier(64 * 4096)
    core = Core(memory, Index(make_evictor(eviction)))
    core.open_space(b"s" * 16, SpaceSpec(b"f" * 32, 16, 4096))
    session = core.begin_session()

    def cycle(first: int, last: int) -> None:
        for number in range(first, last):
            run = Run(b"s" * 16, None, key(number) + key((number, "child")))
            (granted,) = core.reserve(session, number, [run])
            assert granted.chunks == [0, 1]
            core.commit(session, number)
            stats = core.memory_stats()
            assert stats.used_bytes == stats.chunks * 4096 <= stats.limit_bytes
            assert stats.stored_chunks == stats.chunks + stats.evicted_chunks == 2 * (number + 1)

    cycle(0, 2_000)
    gc.collect()
    before = resident_kib(), open_files()
    cycle(2_000, 7_000)
    gc.collect()
    assert resident_kib() - before[0] < 1024
    assert open_files() == before[1]
    assert core.memory_stats().evicted_chunks > 13_000
    assert core.dropped == {}
    assert core.dropped[Reason.NO_ROOM] == 0
    memory.arena.close()
    os.close(memory.fd)


def test_ten_thousand_chunks_through_a_server_leave_it_as_it_was(server: ServerProcess) -> None:
    with connect(server.socket) as cache:
        space = cache.space("flat", 16, 4096)
        raw = RawClient(server.dial())
        raw.hello("watching")

        def cycle(first: int, last: int) -> None:
            for number in range(first, last):
                with space.reserve([key((number, at)) for at in range(10)]) as new:
                    assert len(new) == 10

        cycle(0, 100)
        before = resident_kib(server.pid), open_files(server.pid)
        cycle(100, 1_000)
        tier = raw.stats().tiers["memory"]
        assert (tier.stored_chunks, tier.chunks, tier.evicted_chunks) == (10_000, 256, 10_000 - 256)
        assert tier.used_bytes == tier.limit_bytes == MIB
        assert open_files(server.pid) == before[1]
        assert resident_kib(server.pid) - before[0] < 1024
        raw.close()


def test_nobody_can_cut_the_arena_short() -> None:
    fd, arena = create_arena(1 << 20)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 2 << 20)
    finally:
        arena.close()
        os.close(fd)
