"""The engines that are compared: vLLM alone, with Stepwell, with LMCache; each with the servers it needs."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from client import Engine
from processes import accepts, cpu_s, running

from stepwell.cli.run import CONNECTOR
from stepwell.demo.engine import BLOCK_TOKENS, MODEL_NAME, environment, vllm_command
from stepwell.demo.model import ensure_model
from stepwell.demo.process import free_port
from stepwell.server.launch import server_pid

PLAIN, STEPWELL, LMCACHE = "vLLM alone", "Stepwell", "LMCache"


class Setting(msgspec.Struct, frozen=True):
    """What all engines of one run share."""

    engine_blocks: int  # of the engine's own cache
    max_model_tokens: int
    cache_gib: int  # of host memory for Stepwell, and for LMCache
    lmcache_dir: Path | None  # None: LMCache does not run


class Arm(msgspec.Struct, frozen=True):
    """One engine that runs."""

    name: str
    engine: Engine
    process_groups: list[int]  # the engine's and its cache server's


@contextmanager
def arms(setting: Setting, folder: Path) -> Iterator[list[Arm]]:
    """All engines at once, none of them busy; logs and sockets lie in `folder`. Raises ServerError."""
    with ExitStack() as stack:
        contexts = [_plain(setting, folder), _stepwell(setting, folder)]
        if setting.lmcache_dir is not None:
            contexts.append(_lmcache(setting, folder, setting.lmcache_dir))
        yield [stack.enter_context(context) for context in contexts]


def idle_cores(arm: Arm, seconds: float = 3.0) -> float:
    """How many processors an engine that nobody asks keeps busy: it would slow the others down."""
    before_s = sum(map(cpu_s, arm.process_groups))
    time.sleep(seconds)
    return (sum(map(cpu_s, arm.process_groups)) - before_s) / seconds


@contextmanager
def _plain(setting: Setting, folder: Path) -> Iterator[Arm]:
    with _vllm(setting, folder / "vllm-alone.log", None, environment()) as (engine, group):
        yield Arm(PLAIN, engine, [group])


@contextmanager
def _stepwell(setting: Setting, folder: Path) -> Iterator[Arm]:
    socket = folder / "stepwell.sock"
    serve = [sys.executable, "-P", "-m", "stepwell", "serve", "--socket", str(socket), "--http", "off"]
    serve += ["--memory", f"{setting.cache_gib}GiB"]
    environ = {**environment(), "STEPWELL_SOCKET": str(socket)}
    with (
        running(
            serve, dict(os.environ), folder / "stepwell.log", lambda: server_pid(socket) is not None, 60
        ) as server,
        _vllm(setting, folder / "vllm-stepwell.log", CONNECTOR, environ) as (engine, group),
    ):
        yield Arm(STEPWELL, engine, [group, server])


@contextmanager
def _lmcache(setting: Setting, folder: Path, lmcache_dir: Path) -> Iterator[Arm]:
    port, http_port, shm_name = free_port(), free_port(), f"lmcache-bench-{os.getpid()}"
    # Its hashes differ between processes otherwise, and it reports usage over the network.
    guest = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}
    path = os.pathsep.join(filter(None, [str(lmcache_dir), os.environ.get("PYTHONPATH")]))
    environ = {**environment(), **guest, "PYTHONPATH": path}
    serve = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port)]
    serve += ["--http-host", "127.0.0.1", "--http-port", str(http_port)]
    serve += ["--l1-size-gb", str(setting.cache_gib), "--eviction-policy", "LRU"]
    serve += ["--chunk-size", str(BLOCK_TOKENS)]
    serve += ["--supported-transfer-mode", "auto", "--shm-name", shm_name]
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }
    try:
        with (
            running(serve, environ, folder / "lmcache.log", lambda: accepts(http_port), 120) as server,
            _vllm(setting, folder / "vllm-lmcache.log", json.dumps(connector), environ) as (engine, group),
        ):
            yield Arm(LMCACHE, engine, [group, server])
    finally:
        for left in Path("/dev/shm").glob(f"{shm_name}*"):
            left.unlink()


@contextmanager
def _vllm(
    setting: Setting, log: Path, connector: str | None, environ: dict[str, str]
) -> Iterator[tuple[Engine, int]]:
    port = free_port()
    command = vllm_command(ensure_model(), port, setting.max_model_tokens, setting.engine_blocks)
    if connector is not None:
        command += ["--kv-transfer-config", connector]
    engine = Engine(port, MODEL_NAME)
    with running(command, environ, log, engine.is_healthy, 300) as group:
        yield engine, group
