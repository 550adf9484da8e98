"""`stepwell run`, with a real cache server and a small program named `vllm` as the engine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepwell.cli.errors import CommandError
from stepwell.cli.run import CONNECTOR, CONNECTOR_FLAG, is_vllm, with_connector
from stepwell.server.launch import server_pid, stop_server

Run = Callable[..., subprocess.CompletedProcess[str]]

ENGINE = """#!{python}
import json, os, sys
print(json.dumps({{"argv": sys.argv, "socket": os.environ["STEPWELL_SOCKET"], "pid": os.getpid()}}))
sys.exit(7)
"""


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    socket = tmp_path / "stepwell.sock"
    yield socket
    stop_server(socket)


@pytest.fixture
def run(tmp_path: Path, socket: Path) -> Run:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("vllm", "wrapper"):
        program = programs / name
        program.write_text(ENGINE.format(python=sys.executable))
        program.chmod(0o755)
    clean = {name: text for name, text in os.environ.items() if not name.startswith("STEPWELL_")}
    clean |= {"PATH": f"{programs}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(tmp_path)}
    clean |= {"STEPWELL_MEMORY": "16MiB", "STEPWELL_HTTP": "off"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [sys.executable, "-m", "stepwell", "run", *arguments],
            capture_output=True,
            text=True,
            env=clean,
            timeout=60,
            check=False,
        )
        assert "Traceback" not in result.stderr
        return result

    return run


def test_becomes_the_engine_with_the_connector_and_leaves_a_server(run: Run, socket: Path) -> None:
    first = run("--", "vllm", "serve", "MODEL", "--memory", "not ours")
    assert first.returncode == 7, "the engine's own status"
    engine = json.loads(first.stdout)
    assert engine["argv"][1:-1] == ["serve", "MODEL", "--memory", "not ours", "--kv-transfer-config"]
    assert json.loads(engine["argv"][-1]) == {
        "kv_connector": "StepwellConnector",
        "kv_connector_module_path": "stepwell.engines.vllm",
        "kv_role": "kv_both",
    }
    assert engine["socket"] == str(socket)
    pid = server_pid(socket)
    assert pid is not None, "it outlives the engine"
    assert f"started the cache server, process {pid}" in first.stderr
    assert f"goes on when the engine ends; stop it with `kill {pid}`" in first.stderr

    second = run("--", "vllm", "serve", "MODEL")
    assert second.returncode == 7
    assert f"using the cache server that runs already, process {pid}" in second.stderr
    assert server_pid(socket) == pid


def test_another_program_is_run_as_it_is_and_told_about_the_flag(run: Run, socket: Path) -> None:
    result = run("--", "wrapper", "--kv-transfer-config", "its own")
    engine = json.loads(result.stdout)
    assert engine["argv"][1:] == ["--kv-transfer-config", "its own"]
    assert engine["socket"] == str(socket)
    assert "`wrapper` is not `vllm serve`: give it --kv-transfer-config" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 1, "there is no command to run; write it after --"),
        (["--"], 1, "there is no command to run; write it after --"),
        (["--", "no-such-program", "serve"], 1, "there is no program 'no-such-program' in PATH"),
        (["vllm", "serve", "MODEL", "--port", "1"], 2, "Write `--` before the engine's command"),
        (["--", "vllm", "serve", "M", "--kv-transfer-config", "{}"], 1, "has --kv-transfer-config already"),
    ],
)
def test_what_cannot_be_run_starts_nothing(
    run: Run, socket: Path, arguments: list[str], status: int, message: str
) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (status, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert list(socket.parent.glob("stepwell.sock*")) == []


def test_a_server_that_cannot_start_is_an_error_and_no_engine_is_run(run: Run, socket: Path) -> None:
    result = run("--memory", "1000TiB", "--", "vllm", "serve", "MODEL")
    assert (result.returncode, result.stdout) == (1, "")
    assert "the cache server ended before it answered" in result.stderr
    assert f"{socket}.log" in result.stderr


@pytest.mark.parametrize(
    ("line", "vllm"),
    [
        ("vllm serve M", True),
        ("/opt/venv/bin/vllm serve M", True),
        ("numactl -N 0 vllm serve M", True),
        ("env A=1 uv run vllm serve M", True),
        ("python -m vllm.entrypoints.openai.api_server --model M", True),
        ("vllm bench serve", False),
        ("vllm", False),
        ("python -m vllm_other.serve", False),
        ("python serve.py vllm", False),
    ],
)
def test_which_commands_are_vllms_server(line: str, vllm: bool) -> None:
    command = line.split()
    assert is_vllm(command) is vllm
    assert with_connector(command) == ([*command, CONNECTOR_FLAG, CONNECTOR] if vllm else command)


@pytest.mark.parametrize(
    "word",
    [
        "--kv-transfer-config",
        "--kv-transfer-config={}",
        "--kv_transfer_config",
        "--kv-transfer-config.kv_role=kv_both",
    ],
)
def test_every_spelling_of_the_flag_is_seen(word: str) -> None:
    with pytest.raises(CommandError, match="already"):
        with_connector(["vllm", "serve", "M", word, "{}"])
    with_connector(["vllm", "serve", "M", "--kv-transfer-config-of-somebody-else"])
