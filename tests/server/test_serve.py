"""`stepwell serve` as a process: its socket, its lock, its end."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell import wire
from support.server import RawClient, ServerProcess
from support.waiting import wait_until


@pytest.fixture
def server(folder: Path) -> Iterator[ServerProcess]:
    """Not started."""
    server = ServerProcess(folder)
    yield server
    server.stop()


def refused(server: ServerProcess) -> str:
    """Start a second server on the same socket: what it says when it gives up."""
    second = subprocess.run(server.command(), capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode == 1
    assert second.stdout == ""
    assert "Traceback" not in second.stderr
    assert len(second.stderr.splitlines()) == 1
    return second.stderr


def answers(server: ServerProcess) -> bool:
    client = RawClient(server.dial())
    client.hello("anyone")
    pong = client.call(wire.Ping())
    client.close()
    return pong == wire.Pong()


def test_its_socket_and_lock_are_for_its_user_alone(server: ServerProcess) -> None:
    server.start()
    assert server.socket.is_socket()
    assert server.socket.stat().st_mode & 0o777 == 0o600
    lock = server.socket.with_name("s.sock.lock")
    assert lock.stat().st_mode & 0o777 == 0o600
    assert answers(server)


def test_a_second_server_on_one_socket_is_refused(server: ServerProcess) -> None:
    server.start()
    message = refused(server)
    assert f"another server serves {server.socket}: stop it first, or choose another --socket" in message
    assert server.socket.is_socket()
    assert answers(server), "and the first goes on"


def test_of_four_servers_started_at_once_one_serves(server: ServerProcess) -> None:
    rivals = [
        subprocess.Popen(server.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(4)
    ]
    try:
        wait_until(lambda: sum(rival.poll() is None for rival in rivals) == 1, 20)
        wait_until(server.socket.exists, 20)
        wait_until(lambda: answers(server))
        assert sorted(str(rival.poll()) for rival in rivals) == ["1", "1", "1", "None"]
    finally:
        for rival in rivals:
            rival.terminate()
            rival.wait(10)
    assert not server.socket.exists()


def test_the_socket_of_a_killed_server_is_replaced(server: ServerProcess) -> None:
    server.start()
    first = RawClient(server.dial()).hello("anyone").server_id
    server.kill()
    assert server.socket.is_socket(), "a killed server leaves it"
    server.start()
    assert RawClient(server.dial()).hello("anyone").server_id != first


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(server: ServerProcess, number: signal.Signals) -> None:
    server.start()
    client = RawClient(server.dial())
    client.hello("anyone", maps_arena=True)
    server.signal(number)
    assert server.process is not None
    assert server.process.wait(10) == 0
    assert client.ended()
    assert not server.socket.exists()
    assert "Traceback" not in server.log()
    server.start()
    assert answers(server)


@pytest.mark.parametrize("there", ["a file", "a folder", "a link to a file"])
def test_what_is_no_socket_is_left_alone(server: ServerProcess, there: str) -> None:
    file = server.socket.parent / "precious"
    file.write_text("precious")
    match there:
        case "a file":
            file.rename(server.socket)
        case "a folder":
            server.socket.mkdir()
        case _:
            server.socket.symlink_to(file)
    assert f"{server.socket} is there and is no socket: remove it, or choose another --socket" in refused(
        server
    )
    assert server.socket.is_dir() or server.socket.read_text() == "precious"


def test_a_folder_where_others_may_write_is_refused(server: ServerProcess) -> None:
    server.socket.parent.chmod(0o777)
    assert "choose another place with --socket" in refused(server)
    server.socket.parent.chmod(0o700)
    server.start()


def test_a_lock_that_is_a_link_is_not_followed(server: ServerProcess) -> None:
    target = server.socket.parent / "precious"
    server.socket.with_name("s.sock.lock").symlink_to(target)
    assert "cannot open" in refused(server)
    assert not target.exists()


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("1000TiB", "is more than the"),
        ("1", "memory must be at least 4096 bytes, one page"),
    ],
)
def test_an_arena_that_cannot_be_is_refused_with_what_to_do(
    server: ServerProcess, memory: str, message: str
) -> None:
    server.memory = memory
    assert message in refused(server)
    assert not server.socket.exists()


def test_a_taken_http_port_is_refused_and_leaves_no_socket(server: ServerProcess) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [address if word == "off" else word for word in server.command()]
        second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode == 1
    assert address in second.stderr
    assert "Traceback" not in second.stderr
    assert not server.socket.exists()


def test_a_limit_on_locked_memory_changes_nothing(server: ServerProcess) -> None:
    limited = ["bash", "-c", 'ulimit -l 0; exec "$@"', "-", *server.command()]
    process = subprocess.Popen(limited, stderr=subprocess.DEVNULL)
    try:
        wait_until(server.socket.exists)
        wait_until(lambda: answers(server))
    finally:
        process.terminate()
        assert process.wait(10) == 0


def test_without_descriptors_it_serves_whom_it_has_and_then_all_again(server: ServerProcess) -> None:
    """RLIMIT_NOFILE: connections that cannot be taken wait, and nobody else notices."""
    limited = ["bash", "-c", 'ulimit -n 40; exec "$@"', "-", *server.command()]
    with (server.socket.parent / "serve.log").open("wb") as log:
        server.process = subprocess.Popen(limited, stderr=log)
    wait_until(lambda: "stepwell serves" in server.log())
    first = RawClient(server.dial())
    first.hello("first")
    crowd = [RawClient(server.dial()) for _ in range(60)]
    for client in crowd:
        client.send(wire.encode(wire.Hello(wire.PROTOCOL, "crowd", maps_arena=True)))
    assert first.call(wire.Ping()) == wire.Pong()
    wait_until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) >= 39)
    assert first.call(wire.Ping()) == wire.Pong()
    for client in crowd:
        client.close()
    wait_until(lambda: first.stats().sessions == 1, 20)
    assert answers(server)
    first.close()


@pytest.mark.parametrize(
    ("disk", "says"),
    [
        (["--disk", "/proc/no"], "cannot use the folder /proc/no: No such file or directory; choose another"),
        (["--disk", "/tmp/x", "--disk-size", "5"], "needs at least 256 KiB: choose a larger --disk-size"),
    ],
)
def test_a_disk_that_cannot_be_used_is_one_line(tmp_path: Path, disk: list[str], says: str) -> None:
    command = [sys.executable, "-m", "stepwell", "serve", "--memory", "1MiB", "--http", "off"]
    result = subprocess.run(
        [*command, "--socket", str(tmp_path / "s"), *disk], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stderr.startswith("stepwell serve: ")
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
