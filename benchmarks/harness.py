"""What both benchmarks of engines do around measuring: options, logs, messages, the figures as a file."""

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from client import CountError, EngineError
from processes import stop_on_sigterm
from rich.console import Console

from stepwell.demo.process import ServerError

ResultT = TypeVar("ResultT", bound=msgspec.Struct)


def parser_of(description: str | None, rounds: int, rounds_of: str) -> argparse.ArgumentParser:
    """The options that both have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"{rounds_of} (default {rounds})")
    parser.add_argument("--minutes", type=float, default=10, help="begin nothing new after (default 10)")
    parser.add_argument("--lmcache-dir", type=Path, help="a folder that install_lmcache.sh filled")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    return parser


def run(
    options: argparse.Namespace,
    measure: Callable[[Path, Console], ResultT],
    print_result: Callable[[ResultT, Console], None],
    is_met: Callable[[ResultT], bool],
) -> int:
    """The exit status: 0 where every target is met. Logs and sockets lie in the folder given to `measure`."""
    stop_on_sigterm()
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as temporary:
            folder = options.logs or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            result = measure(folder, console)
    except (ServerError, EngineError, CountError) as error:
        console.print(f"benchmark: {error}", markup=False, style="red")
        return 1
    print_result(result, console)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    return 0 if is_met(result) else 1


def machine_of(busy: Mapping[str, float]) -> str:
    """What ran it, and how many cores each engine kept busy while nobody asked it."""
    idle = ", ".join(f"{name} idle: {cores:.2f} cores" for name, cores in busy.items())
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {idle}"


def not_run(lmcache_dir: Path | None) -> list[str]:
    """What was left out, and why."""
    return [] if lmcache_dir else ["LMCache: not run: no --lmcache-dir (see install_lmcache.sh)"]
