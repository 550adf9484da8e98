"""The cache server of the demo: `stepwell serve` with a socket of its own."""

import os
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from stepwell.demo.process import Server, free_port, serving

# All prompts of the demo are some 16,000 different tokens of 22.5 KiB: 0.35 GiB.
MEMORY = "1GiB"
DISK_SIZE = "2GiB"
START_TIMEOUT_S = 60.0


def cache_server(socket: Path, disk: Path, log: Path) -> AbstractAsyncContextManager[Server]:
    """Runs a cache server on `socket`, with a disk tier in the folder `disk`. Raises `ServerError`."""
    port = free_port()
    command = [sys.executable, "-m", "stepwell", "serve", "--memory", MEMORY]
    command += ["--disk", str(disk), "--disk-size", DISK_SIZE]
    command += ["--socket", str(socket), "--http", f"127.0.0.1:{port}"]
    return serving(
        name="Stepwell's cache server",
        command=command,
        env=dict(os.environ),
        url=f"http://127.0.0.1:{port}",
        health="/healthz",
        log=log,
        start_timeout_s=START_TIMEOUT_S,
    )
