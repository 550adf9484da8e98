"""`stepwell serve`: one cache server on one unix socket, until it is told to stop."""

import asyncio
import fcntl
import gc
import logging
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepwell.config import Config
from stepwell.server.below import DriveLimits
from stepwell.server.host import CacheHost, DiskSetting
from stepwell.server.http import start_http
from stepwell.server.launch import LaunchError, prepare_socket_folder

logger = logging.getLogger(__name__)


class CannotServe(RuntimeError):
    """The server cannot start; the message says why and what to do."""


# Never look through the oldest objects for cycles: the index has none, and at 10^6 chunks one such look
# took 0.2 to 0.4 s, longer than clients wait. Younger generations are still collected.
_GC_THRESHOLDS = (10_000, 20, 1_000_000_000)


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code; says on stderr why it could not start."""
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        with _socket_owner(config.socket):
            asyncio.run(_serve(config))
    except CannotServe as error:
        print(f"stepwell serve: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _socket_owner(path: Path) -> Iterator[None]:
    """Hold the right to serve on `path`. The lock goes with the process, so a killed server holds none."""
    try:
        prepare_socket_folder(path)
    except LaunchError as error:
        raise CannotServe(str(error)) from error
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise CannotServe(f"cannot open {lock_path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotServe(
                f"another server serves {path}: stop it first, or choose another --socket"
            ) from None
        yield
    finally:
        os.close(lock)


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that was killed: we hold the lock, so nobody serves on it."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise CannotServe(f"{path} is there and is no socket: remove it, or choose another --socket")
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CannotServe(f"cannot replace {path}: {error.strerror}; choose another --socket") from error


def disk_of(config: Config) -> DiskSetting | None:
    """What the configuration says of the disk tier."""
    if config.disk is None:
        return None
    limits = DriveLimits(
        read_bytes_per_s=config.disk_read_bytes_per_s,
        write_bytes_per_s=config.disk_write_bytes_per_s,
        read_latency_s=config.disk_read_latency_s,
    )
    return DiskSetting(config.disk, config.disk_bytes, limits)


async def _serve(config: Config) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        host = await asyncio.to_thread(CacheHost, config.memory_bytes, config.eviction, disk_of(config))
        host.start()
    except (ValueError, OSError) as error:
        raise CannotServe(str(error)) from error
    _remove_stale(config.socket)
    previous = os.umask(0o177)
    try:
        server = await loop.create_unix_server(host.connection, str(config.socket), backlog=128)
    except OSError as error:
        raise CannotServe(f"cannot listen on {config.socket}: {error}") from error
    finally:
        os.umask(previous)
    http = None
    if config.http is not None:
        try:
            http = await start_http(config.http, host.stats, host.health)
        except OSError as error:
            server.close()
            config.socket.unlink(missing_ok=True)
            raise CannotServe(error.strerror or str(error)) from error
    print(
        f"stepwell serves {config.memory_bytes / 2**30:.2f} GiB of memory"
        + (f" and {config.disk_bytes / 2**30:.2f} GiB in {config.disk}" if config.disk else "")
        + f" on {config.socket}"
        + (f", metrics on http://{config.http.host}:{http.port}/metrics" if http and config.http else ""),
        file=sys.stderr,
        flush=True,
    )
    try:
        await stop.wait()
    finally:
        server.close()
        config.socket.unlink(missing_ok=True)
        if http is not None:
            await http.close()
        await host.close()
