"""A server as a child process: started with a log file, waited for over HTTP, always ended."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

POLL_S = 0.2
LOG_TAIL_LINES = 25


class ServerError(RuntimeError):
    """A server did not start or went away; the message ends with the tail of its log."""


class Server:
    """A running server: `name`, `url`, its log, and how long it took to answer."""

    def __init__(
        self, name: str, url: str, log: Path, process: subprocess.Popen[bytes], start_s: float
    ) -> None:
        self.name = name
        self.url = url
        self.log = log
        self.start_s = start_s
        self._process = process

    def check(self) -> None:
        """Raises `ServerError` where the process has ended."""
        status = self._process.poll()
        if status is not None:
            raise ServerError(f"{self.name} ended with status {status}.\n{log_tail(self.log)}")


@asynccontextmanager
async def serving(
    *,
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    url: str,
    health: str,
    log: Path,
    start_timeout_s: float,
) -> AsyncIterator[Server]:
    """Runs `command` until the block ends; enters it once `url + health` answers 200.

    Raises `ServerError`.
    """
    began = time.monotonic()
    process = start(command, env, log)
    server = Server(name, url, log, process, 0.0)
    try:
        await _until_healthy(server, url + health, start_timeout_s)
        server.start_s = time.monotonic() - began
        yield server
    finally:
        end(process, patience_s=10.0)


async def _until_healthy(server: Server, url: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        while time.monotonic() < deadline:
            server.check()
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(POLL_S)
    raise ServerError(f"{server.name} did not answer within {timeout_s:.0f} s.\n{log_tail(server.log)}")


def start(command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts a process whose output is appended to `log`; `end` ends it.

    It leads a group of its own, so that Ctrl-C reaches only us and its children can be ended with it.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Ends a process that leads its group, and whatever is left of the group.

    SIGTERM goes to the leader alone: when vLLM's workers get it too while they compute, its API server was
    seen to wait for them for ever.
    """
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def log_tail(log: Path) -> str:
    """The last lines of a log, for an error message."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"Its log cannot be read: {error}"
    return "\n".join([f"The end of its log {log}:", *lines[-LOG_TAIL_LINES:]])


def free_port() -> int:
    """A loopback port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
