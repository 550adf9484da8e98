"""Servers of the demo: waited for, explained when they fail, always ended. Real child processes."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.demo.process import Server, ServerError, free_port, serving

# Answers /health, and has a child of its own that would outlive it.
SERVER = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, "server", os.getpid(), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def check_running(server: Server, log: Path) -> None:
    server.check()
    assert server.start_s > 0
    assert is_running(child_of(log))


def kill(server: Server, log: Path) -> None:
    """Ends the server itself from outside, but not its child."""
    pid = int(log.read_text().split()[3])
    os.kill(pid, signal.SIGKILL)
    assert ends(pid)
    with pytest.raises(ServerError, match="the server ended with status -9"):
        server.check()


async def start(
    log: Path, code: str, check: Callable[[Server, Path], None] = check_running, timeout_s: float = 30.0
) -> None:
    port = free_port()
    async with serving(
        name="the server",
        command=[sys.executable, "-c", code, str(port)],
        env=os.environ,
        url=f"http://127.0.0.1:{port}",
        health="/health",
        log=log,
        start_timeout_s=timeout_s,
    ) as server:
        check(server, log)


def child_of(log: Path) -> int:
    return int(log.read_text().split()[1])


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie (the one that reaps orphans may be slow)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ends(pid: int) -> bool:
    """Whether a process that was sent SIGKILL is gone within 5 s."""
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def test_a_server_and_its_children_end_with_the_block(tmp_path: Path) -> None:
    log = tmp_path / "log"
    asyncio.run(start(log, SERVER))
    assert ends(child_of(log))


def test_children_end_when_the_server_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    asyncio.run(start(log, SERVER, kill))
    assert ends(child_of(log))


def test_a_server_that_fails_is_explained_with_the_end_of_its_log(tmp_path: Path) -> None:
    code = "print('no such model: abc'); raise SystemExit(3)"
    with pytest.raises(ServerError, match=r"the server ended with status 3(.|\n)*no such model: abc"):
        asyncio.run(start(tmp_path / "log", code))


def test_a_server_that_does_not_answer_is_given_up_and_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    mute = SERVER.replace("send_response(200)", "send_response(503)")
    with pytest.raises(ServerError, match="did not answer within 2 s"):
        asyncio.run(start(log, mute, timeout_s=2.0))
    assert ends(child_of(log))
