"""Starting a cache server where none answers: once, however many ask at the same time."""

import fcntl
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stepwell.config import CONFIG_FILE_ENV, OPTIONS, Config, Environ, to_flags

_POLL_S = 0.02
_CONNECT_TIMEOUT_S = 1.0
_LOG_TAIL_BYTES = 2000
_UCRED = struct.Struct("iII")  # pid, uid, gid: unix(7)

# The server's parent must not be the engine: an engine that ends takes its children with it (vLLM kills
# its whole process tree), and one that goes on would keep a dead server as a zombie. So a process in
# between starts the server in a session of its own, tells its id and ends.
_START_DETACHED = (
    "import subprocess, sys; "
    "print(subprocess.Popen(sys.argv[1:], stdout=sys.stderr, start_new_session=True).pid)"
)


class LaunchError(RuntimeError):
    """No cache server could be started; the message says why and where its log is."""


def log_path(socket_path: Path) -> Path:
    """Where a server that `ensure_server` started writes its messages."""
    return socket_path.with_name(socket_path.name + ".log")


def prepare_socket_folder(socket_path: Path) -> None:
    """Make the socket's folder (mode 0700) where it is missing.

    Raises LaunchError for one in which another user could put a socket in the place of ours: the server
    behind it would be handed the prompts' attention state, and could hand back anything.
    """
    folder = socket_path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, target = folder.lstat(), folder.stat()
    except OSError as error:
        raise LaunchError(f"cannot make the socket's folder {folder}: {error.strerror}") from error
    if not {link.st_uid, target.st_uid} <= {0, os.getuid()}:
        raise LaunchError(f"{folder} belongs to another user; choose another place with --socket")
    # In a folder with the sticky bit, such as /tmp, others cannot replace what is ours.
    others_write = target.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if others_write and not target.st_mode & stat.S_ISVTX:
        raise LaunchError(
            f"other users can write to {folder}: `chmod 700 {folder}`, or choose another place with --socket"
        )


def server_pid(socket_path: Path) -> int | None:
    """The process that listens on `socket_path`; None where nobody does.

    Raises LaunchError where it is another user's, or takes no connection.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(os.fspath(socket_path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise LaunchError(f"cannot connect to {socket_path}: {error.strerror or error}") from error
        ucred = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(ucred)
    if uid not in (0, os.getuid()):
        raise LaunchError(f"the server on {socket_path} belongs to another user; choose another --socket")
    return int(pid)


def stop_server(socket_path: Path, deadline_s: float = 10.0) -> bool:
    """End the server on `socket_path` (SIGTERM) and wait until it is gone; False where there was none.

    Raises LaunchError if it has not ended within `deadline_s` seconds.
    """
    pid = server_pid(socket_path)
    if pid is None:
        return False
    try:
        server = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        signal.pidfd_send_signal(server, signal.SIGTERM)
        if not select.select([server], [], [], deadline_s)[0]:
            raise LaunchError(f"the cache server, process {pid}, has not ended within {deadline_s:g} s")
    except ProcessLookupError:
        pass  # it ended by itself in between
    finally:
        os.close(server)
    return True


def ensure_server(
    config: Config,
    environ: Environ,
    command: Sequence[str] | None = None,
    deadline_s: float | None = None,
) -> bool:
    """Have a cache server answer on `config.socket`; True where this call started it.

    The server is `command` (default: `stepwell serve` with the flags that give `config`). It outlives this
    process, and writes to the log beside its socket. Safe to call from many processes at once.
    Raises LaunchError if it ends, or does not answer within `deadline_s` seconds.
    """
    if deadline_s is None:
        # It listens when all its memory is there. The slowest seen: 0.5 GiB/s, on 2 busy cores.
        deadline_s = 30.0 + config.memory_bytes / (256 << 20)
    end_s = time.monotonic() + deadline_s
    if server_pid(config.socket) is not None:
        return False
    prepare_socket_folder(config.socket)
    with _start_lock(config.socket) as try_lock:
        while not try_lock():
            if server_pid(config.socket) is not None:
                return False
            if time.monotonic() > end_s:
                raise LaunchError(f"another process has been starting the server for {deadline_s:g} s")
            time.sleep(_POLL_S)
        # Its holder may have finished between our last try to connect and the lock.
        if server_pid(config.socket) is not None:
            return False
        _start_and_wait(config, environ, command or _serve_command(config), end_s)
        return True


@contextmanager
def _start_lock(socket_path: Path) -> Iterator[Callable[[], bool]]:
    """Gives a function that tries for the lock; the lock ends with the block, or with the process."""
    path = socket_path.with_name(socket_path.name + ".start-lock")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LaunchError(f"cannot open {path}: {error.strerror}") from error

    def try_lock() -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        yield try_lock
    finally:
        os.close(file)


def _serve_command(config: Config) -> list[str]:
    # -P: do not look for modules in the folder that it runs in.
    return [sys.executable, "-P", "-m", "stepwell", "serve", *to_flags(config)]


def _start_and_wait(config: Config, environ: Environ, command: Sequence[str], end_s: float) -> None:
    log = log_path(config.socket)
    server = _start_detached(command, _server_environ(environ), log)
    if server is None:
        raise LaunchError(f"the cache server ended at once{_log_tail(log)}")
    try:
        while server_pid(config.socket) is None:
            # A process's descriptor is readable when the process has ended (pidfd_open(2)).
            if select.select([server], [], [], _POLL_S)[0]:
                raise LaunchError(f"the cache server ended before it answered{_log_tail(log)}")
            if time.monotonic() > end_s:
                signal.pidfd_send_signal(server, signal.SIGKILL)
                raise LaunchError(f"the cache server did not answer in time{_log_tail(log)}")
    finally:
        os.close(server)


def _server_environ(environ: Environ) -> dict[str, str]:
    """`environ` without what the server's flags say already."""
    said = {CONFIG_FILE_ENV, *(option.env for option in OPTIONS.values())}
    return {name: text for name, text in environ.items() if name not in said}


def _start_detached(command: Sequence[str], environ: dict[str, str], log: Path) -> int | None:
    """Start `command` as nobody's child; a descriptor of its process, None where it has ended already."""
    try:
        if log.exists():
            log.replace(log.with_name(log.name + ".old"))
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LaunchError(f"cannot write the server's log {log}: {error.strerror}") from error
    try:
        starter = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _START_DETACHED, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            env=environ,
            cwd="/",
            start_new_session=True,
            check=False,
        )
    finally:
        os.close(file)
    if starter.returncode != 0:
        raise LaunchError(f"cannot start {command[0]}{_log_tail(log)}")
    try:
        return os.pidfd_open(int(starter.stdout))
    except ProcessLookupError:
        return None


def _log_tail(log: Path) -> str:
    try:
        tail = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    except OSError:
        tail = ""
    return f"; the end of its log {log}:\n{tail}" if tail else f"; its log {log} is empty"
