"""Real processes throughout: `STAND_IN` is what `ensure_server` needs of a server, a socket that accepts."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stepwell.config import Config, resolve
from stepwell.server.launch import (
    LaunchError,
    ensure_server,
    log_path,
    prepare_socket_folder,
    server_pid,
    stop_server,
)

STAND_IN = """
import os, signal, socket, sys
path, started = sys.argv[1], sys.argv[2]
if sys.argv[3:] == ["ignore SIGTERM"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(started, "a") as file:
    file.write(f"{os.getpid()} {os.getppid()} {os.getsid(0)}\\n")
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
if sys.argv[3:] == ["of another user"]:
    os.setuid(12345)
listener.listen(64)
print("listening", file=sys.stderr, flush=True)
signal.pause()
"""
ENSURE = """
import json, os, sys
from pathlib import Path
from stepwell.config import resolve
from stepwell.server.launch import ensure_server
socket, command = sys.argv[1], sys.argv[2:]
print(ensure_server(resolve({"socket": socket}, {}).config, os.environ, command), os.getpid())
"""


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true"
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


class Place:
    """A folder for one server, and what was started in it."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "run" / "s.sock"
        self.started = folder / "started"
        self.config: Config = resolve({"socket": str(self.socket)}, {}).config
        self.command = [sys.executable, "-c", STAND_IN, str(self.socket), str(self.started)]

    def starts(self) -> list[list[int]]:
        if not self.started.exists():
            return []
        return [[int(word) for word in line.split()] for line in self.started.read_text().splitlines()]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for pid, _, _ in place.starts():
        if not has_ended(pid):
            os.kill(pid, signal.SIGKILL)


def test_starts_a_server_and_finds_it_after(place: Place) -> None:
    assert server_pid(place.socket) is None
    assert ensure_server(place.config, os.environ, place.command) is True
    ((pid, _, _),) = place.starts()
    assert server_pid(place.socket) == pid
    assert ensure_server(place.config, os.environ, place.command) is False
    assert len(place.starts()) == 1
    assert place.socket.parent.stat().st_mode & 0o777 == 0o700
    assert log_path(place.socket).stat().st_mode & 0o777 == 0o600
    wait_until(lambda: log_path(place.socket).read_text() == "listening\n")


def test_many_callers_at_once_start_one_server(place: Place) -> None:
    def call(_: int) -> str:
        command = [sys.executable, "-c", ENSURE, str(place.socket), *place.command]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    with ThreadPoolExecutor(6) as pool:
        answers = [output.split()[0] for output in pool.map(call, range(6))]
    assert sorted(answers) == ["False"] * 5 + ["True"]
    assert len(place.starts()) == 1


def test_the_server_is_nobodys_child_and_outlives_its_starter(place: Place) -> None:
    command = [sys.executable, "-c", ENSURE, str(place.socket), *place.command]
    starter = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    answer, starter_pid = starter.stdout.split()
    ((pid, parent, session),) = place.starts()
    assert answer == "True"
    assert parent != int(starter_pid)
    assert session == pid, "a signal to the terminal's or the engine's process group would reach it"
    assert server_pid(place.socket) == pid


def test_stopping_waits_until_the_server_is_gone(place: Place) -> None:
    assert stop_server(place.socket) is False
    ensure_server(place.config, os.environ, place.command)
    ((pid, _, _),) = place.starts()
    assert stop_server(place.socket) is True
    assert has_ended(pid)
    assert server_pid(place.socket) is None


def test_a_server_that_does_not_stop_is_an_error(place: Place) -> None:
    ensure_server(place.config, os.environ, [*place.command, "ignore SIGTERM"])
    ((pid, _, _),) = place.starts()
    with pytest.raises(LaunchError, match=f"process {pid}, has not ended within 0.1 s"):
        stop_server(place.socket, deadline_s=0.1)


def test_the_place_of_a_killed_server_is_taken_again(place: Place) -> None:
    ensure_server(place.config, os.environ, place.command)
    ((first, _, _),) = place.starts()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: server_pid(place.socket) is None)
    place.socket.unlink()  # the real server does this itself
    assert ensure_server(place.config, os.environ, place.command) is True
    assert server_pid(place.socket) == place.starts()[1][0]


def test_a_server_that_ends_is_an_error_with_the_end_of_its_log(place: Place) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no memory for the arena')"]
    for _ in range(2):
        with pytest.raises(LaunchError, match="ended") as caught:
            ensure_server(place.config, os.environ, command, deadline_s=20)
        message = str(caught.value)
        assert message.count("no memory for the arena") == 1, "only this start's messages"
        assert str(log_path(place.socket)) in message
    # A failed start leaves nothing that hinders the next.
    assert ensure_server(place.config, os.environ, place.command) is True


def test_a_program_that_is_missing_is_an_error(place: Place) -> None:
    with pytest.raises(LaunchError, match="cannot start /no/such/program"):
        ensure_server(place.config, os.environ, ["/no/such/program"])


def test_a_server_that_never_answers_is_killed_at_the_deadline(place: Place) -> None:
    pid_file = place.started.with_name("pid")
    code = f"import os, signal; open({str(pid_file)!r}, 'w').write(str(os.getpid())); signal.pause()"
    with pytest.raises(LaunchError, match="did not answer in time"):
        ensure_server(place.config, os.environ, [sys.executable, "-c", code], deadline_s=1.0)
    wait_until(lambda: has_ended(int(pid_file.read_text())))


@pytest.mark.parametrize(("memory", "limit_s"), [("1GiB", 34), ("100GiB", 430)])
def test_a_large_arena_has_longer_to_come_up(
    place: Place, monkeypatch: pytest.MonkeyPatch, memory: str, limit_s: float
) -> None:
    """Another process holds the start's lock for ever, by a clock of our own."""
    now_s = 1000.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += 1.0

    config = resolve({"socket": str(place.socket), "memory": memory}, {}).config
    prepare_socket_folder(place.socket)
    with open(f"{place.socket}.start-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr("stepwell.server.launch.time.monotonic", lambda: now_s)
        monkeypatch.setattr("stepwell.server.launch.time.sleep", sleep)
        with pytest.raises(LaunchError, match=f"for {limit_s} s"):
            ensure_server(config, os.environ, place.command)
        monkeypatch.undo()
    assert limit_s <= now_s - 1000 <= limit_s + 2
    assert place.starts() == []


def test_a_starter_that_hangs_does_not_hang_the_others(place: Place) -> None:
    code = (
        "import fcntl, sys, signal; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print(1, flush=True); signal.pause()"
    )
    prepare_socket_folder(place.socket)
    lock = f"{place.socket}.start-lock"
    with subprocess.Popen([sys.executable, "-c", code, lock], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            with pytest.raises(LaunchError, match="another process has been starting the server"):
                ensure_server(place.config, os.environ, place.command, deadline_s=0.3)
        finally:
            holder.kill()
    assert ensure_server(place.config, os.environ, place.command) is True


def test_the_servers_environment_has_no_second_word_on_its_options(place: Place) -> None:
    code = (
        "import os, sys; "
        "sys.exit(','.join(sorted(name for name in os.environ if name.startswith('STEPWELL_'))) + '.')"
    )
    environ = {
        **os.environ,
        "STEPWELL_MEMORY": "1GiB",
        "STEPWELL_CONFIG": "relative.toml",
        "STEPWELL_TEST_X": "1",
    }
    with pytest.raises(LaunchError, match=r"(?m)^STEPWELL_TEST_X\.$"):
        ensure_server(place.config, environ, [sys.executable, "-c", code])


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
def test_a_server_of_another_user_is_not_ours(place: Place) -> None:
    prepare_socket_folder(place.socket)
    with subprocess.Popen([*place.command, "of another user"], stderr=subprocess.PIPE) as server:
        assert server.stderr is not None
        assert server.stderr.readline() == b"listening\n"
        try:
            with pytest.raises(LaunchError, match="belongs to another user"):
                ensure_server(place.config, os.environ, place.command)
        finally:
            server.kill()


def test_the_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    prepare_socket_folder(tmp_path / "new" / "s.sock")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    prepare_socket_folder(tmp_path / "new" / "s.sock")


@pytest.mark.parametrize(("mode", "safe"), [(0o755, True), (0o1777, True), (0o777, False), (0o770, False)])
def test_a_folder_where_others_may_replace_the_socket_is_refused(
    tmp_path: Path, mode: int, safe: bool
) -> None:
    tmp_path.chmod(mode)
    if safe:
        prepare_socket_folder(tmp_path / "s.sock")
    else:
        with pytest.raises(LaunchError, match=r"other users can write to .*chmod 700"):
            prepare_socket_folder(tmp_path / "s.sock")


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user needs root")
@pytest.mark.parametrize("planted", ["folder", "link to theirs", "their link"])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, planted: str) -> None:
    folder = tmp_path / "planted"
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    if planted == "folder":
        folder.mkdir(mode=0o700)
        os.chown(folder, 12345, 12345)
    else:
        folder.symlink_to(theirs)
        if planted == "their link":
            os.chown(folder, 12345, 12345, follow_symlinks=False)
        else:
            os.chown(theirs, 12345, 12345)
    with pytest.raises(LaunchError, match="belongs to another user"):
        prepare_socket_folder(folder / "s.sock")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="cannot make the socket's folder"):
        prepare_socket_folder(tmp_path / "file" / "s.sock")
