"""`stepwell run -- vllm serve MODEL …`: the cache server, then the engine in the place of this process."""

import os
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath

from stepwell.cli.errors import CommandError
from stepwell.config import Config, Environ
from stepwell.server.launch import ensure_server, log_path, server_pid

CONNECTOR_FLAG = "--kv-transfer-config"
CONNECTOR = (
    '{"kv_connector":"StepwellConnector","kv_connector_module_path":"stepwell.engines.vllm",'
    '"kv_role":"kv_both"}'
)


def run_engine(command: Sequence[str], config: Config, environ: Environ) -> int:
    """Become `command`, with the connector where it is vLLM's. Returns only by raising.

    Raises CommandError for a command that cannot be run, LaunchError where no cache server can be started.
    """
    if not command:
        raise CommandError("there is no command to run; write it after --: stepwell run -- vllm serve MODEL")
    program = shutil.which(command[0], path=environ.get("PATH"))
    if program is None:
        raise CommandError(f"there is no program '{command[0]}' in PATH; is its virtual environment active?")
    engine = with_connector(command)

    started = ensure_server(config, environ)
    _say_who_serves(config, started)
    if not is_vllm(command):
        print(
            f"stepwell: `{command[0]}` is not `vllm serve`: give it {CONNECTOR_FLAG} '{CONNECTOR}' yourself",
            file=sys.stderr,
            flush=True,
        )
    os.execve(program, engine, {**environ, "STEPWELL_SOCKET": str(config.socket)})


def is_vllm(command: Sequence[str]) -> bool:
    """Whether vLLM's server is started here, perhaps behind `numactl`, `env` or `uv run`."""
    return any(
        (PurePath(word).name == "vllm" and after == "serve")
        or (word == "-m" and after.startswith("vllm.entrypoints."))
        for word, after in pairwise(command)
    )


def with_connector(command: Sequence[str]) -> list[str]:
    """`command` with the connector's flag where it is vLLM's. Raises CommandError where one is there."""
    if not is_vllm(command):
        return list(command)
    for word in command:
        # vLLM takes _ for -, =VALUE, and .FIELD for one field of the JSON.
        if word.split("=")[0].split(".")[0].replace("_", "-") == CONNECTOR_FLAG:
            raise CommandError(
                f"the command has {CONNECTOR_FLAG} already, and vLLM takes one connector: leave it out, or "
                "run the engine yourself beside `stepwell serve`"
            )
    return [*command, CONNECTOR_FLAG, CONNECTOR]


def _say_who_serves(config: Config, started: bool) -> None:
    pid = server_pid(config.socket)
    if started:
        message = f"started the cache server, process {pid}; its log is {log_path(config.socket)}"
    else:
        message = f"using the cache server that runs already, process {pid}, with its own configuration"
    print(
        f"stepwell: {message}\nstepwell: it goes on when the engine ends; stop it with `kill {pid}`",
        file=sys.stderr,
        flush=True,
    )
