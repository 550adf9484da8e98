"""Servers of the demo: waited for, explained when they fail, always ended. Real child processes."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from stepwell.demo.process import Server, ServerError, free_port, serving

# Answers /health, and has a child of its own that would outlive it.
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def start(log: Path, *command: str, port: int, timeout_s: float = 30.0) -> None:
    async with serving(
        name="the server",
        command=[sys.executable, "-c", *command, str(port)],
        env=os.environ,
        url=f"http://127.0.0.1:{port}",
        health="/health",
        log=log,
        start_timeout_s=timeout_s,
    ) as server:
        check_running(server, log)


def check_running(server: Server, log: Path) -> None:
    server.check()
    assert server.start_s > 0
    assert is_running(child_of(log))


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
    asyncio.run(start(log, SERVER, port=free_port()))
    assert ends(child_of(log))


def test_children_end_when_the_server_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    killing = SERVER.replace("self.end_headers()", "self.end_headers(); import os; os.kill(os.getpid(), 9)")

    async def play() -> None:
        with pytest.raises(ServerError, match=f"status -{signal.SIGKILL.value}"):
            await start(log, killing, port=free_port())

    asyncio.run(play())
    assert ends(child_of(log))


def test_a_server_that_fails_is_explained_with_the_end_of_its_log(tmp_path: Path) -> None:
    code = "print('no such model: abc'); raise SystemExit(3)"
    with pytest.raises(ServerError, match=r"the server ended with status 3(.|\n)*no such model: abc"):
        asyncio.run(start(tmp_path / "log", code, port=free_port()))


def test_a_server_that_does_not_answer_is_given_up_and_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    mute = SERVER.replace("send_response(200)", "send_response(503)")
    with pytest.raises(ServerError, match="did not answer within 2 s"):
        asyncio.run(start(log, mute, port=free_port(), timeout_s=2.0))
    assert ends(child_of(log))
