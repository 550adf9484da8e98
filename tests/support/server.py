"""A real `stepwell serve` process on a socket of its own, ended by its own process id."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepwell import wire
from stepwell.client import Channel
from stepwell.types import CacheStats
from support.waiting import wait_until

START_LIMIT_S = 20.0


class ServerProcess:
    """`start`, then `stop` or `kill`; may be started again on the same socket."""

    def __init__(self, folder: Path, memory: str = "1MiB") -> None:
        self.socket = folder / "s.sock"
        self.memory = memory
        self._log = folder / "serve.log"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        flags = ["--memory", self.memory, "--socket", str(self.socket), "--http", "off"]
        return [sys.executable, "-m", "stepwell", "serve", *flags]

    def start(self) -> None:
        """Return when it says that it serves."""
        environ = {name: text for name, text in os.environ.items() if not name.startswith("STEPWELL_")}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(self.command(), stderr=log, stdout=log, env=environ)
        wait_until(self._serves, START_LIMIT_S, "the server's start")

    def _serves(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the server ended at once: {self.log()}"
        return "stepwell serves" in self.log()

    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(10)

    def stop(self) -> int | None:
        """SIGTERM: its exit code; None when it does not run."""
        if self.process is None or not self.runs():
            return None
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def dial(self) -> socket.socket:
        """A bare connection, to say things that no client says."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(10)
        sock.connect(str(self.socket))
        return sock


@contextmanager
def running_server(memory: str = "1MiB") -> Iterator[ServerProcess]:
    """A server in a folder with a short name: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        server = ServerProcess(Path(folder), memory)
        try:
            server.start()
            yield server
        finally:
            server.stop()


class RawClient:
    """One connection that sends exactly what it is told."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._channel = Channel(sock)

    def hello(self, session: str, maps_arena: bool = False) -> wire.Welcome:
        welcome, fd = self._channel.welcome(
            wire.Hello(wire.PROTOCOL, session, maps_arena=maps_arena), _soon()
        )
        if fd is not None:
            os.close(fd)
        return welcome

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def receive(self) -> wire.Reply:
        return self._channel.receive(_soon())

    def call(self, request: wire.Message) -> wire.Reply:
        self.send(wire.encode(request))
        return self.receive()

    def stats(self) -> CacheStats:
        reply = self.call(wire.GetStats())
        assert isinstance(reply, wire.Stats)
        return reply.stats

    def ended(self) -> bool:
        """Wait for the server to end this connection; False when it says something instead."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self._channel.close()


def _soon() -> float:
    return time.monotonic() + 10.0
