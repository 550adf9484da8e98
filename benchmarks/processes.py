"""Servers as child processes: started, waited for until they answer, and always stopped."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from stepwell.demo.process import ServerError, end, log_tail, start

_POLL_S = 0.1
_STOP_S = 20.0


@contextmanager
def running(
    command: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    answers: Callable[[], bool],
    deadline_s: float,
) -> Iterator[int]:
    """`command` as the leader of a process group, from when `answers` says so; gives the group's number.

    The whole group is ended on leaving. Raises ServerError where the command ends or does not answer.
    """
    process = start(command, environ, log)
    try:
        end_s = time.monotonic() + deadline_s
        while not answers():
            if process.poll() is not None:
                raise ServerError(f"a server ended before it answered. {log_tail(log)}")
            if time.monotonic() > end_s:
                raise ServerError(f"a server did not answer within {deadline_s:g} s. {log_tail(log)}")
            time.sleep(_POLL_S)
        yield process.pid
    finally:
        end(process, _STOP_S)


def stop_on_sigterm() -> None:
    """SIGTERM ends this program by an exception, so that it stops its servers."""

    def stop(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)


def accepts(port: int) -> bool:
    """Whether someone listens on this port of the loopback interface."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def cpu_s(group: int) -> float:
    """Processor time that the processes of this group have used, in seconds."""
    ticks = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            if int(fields[2]) == group:  # after the name: state, ppid, pgrp (proc_pid_stat(5))
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
