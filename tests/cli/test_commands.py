"""The commands as a user runs them: in processes of their own, against a real server."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import stepwell
from stepwell.cli import main
from stepwell.config import resolve
from stepwell.server.launch import ensure_server, stop_server

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `stepwell …` in an environment without options; checks that it never ends in a traceback."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("STEPWELL_")}
    clean |= {"XDG_RUNTIME_DIR": str(tmp_path), "COLUMNS": "120"}

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [sys.executable, "-m", "stepwell", *arguments],
            capture_output=True,
            text=True,
            env=clean | environ,
            timeout=60,
            check=False,
        )
        assert "Traceback" not in result.stderr
        return result

    return run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    socket = tmp_path / "stepwell.sock"
    config = resolve({"socket": str(socket), "memory": "16MiB", "http": "off"}, {}).config
    ensure_server(config, os.environ)
    yield socket
    stop_server(socket)


def test_version(run: Run) -> None:
    assert run("--version").stdout.strip() == version("stepwell")


def test_config_shows_values_and_where_they_came_from(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "stepwell.toml"
    file.write_text("eviction = 's3fifo'")
    result = run("config", "--memory", "512 MiB", "--config", str(file), STEPWELL_HTTP="off")
    assert result.returncode == 0
    rows = [re.split(r" {2,}", line) for line in result.stdout.splitlines()]
    assert rows == [
        ["memory", "512MiB", "--memory"],
        ["disk", "off", "default"],
        ["disk_size", "64GiB", "default"],
        ["disk_read_limit", "off", "default"],
        ["disk_write_limit", "off", "default"],
        ["disk_read_latency", "0s", "default"],
        ["socket", str(tmp_path / "stepwell.sock"), "default"],
        ["http", "off", "STEPWELL_HTTP"],
        ["eviction", "s3fifo", str(file)],
        ["log_level", "info", "default"],
    ]
    data = json.loads(run("config", "--json", STEPWELL_CONFIG=str(file)).stdout)
    assert data["eviction"] == {"value": "s3fifo", "source": str(file)}


@pytest.mark.parametrize("command", ["serve", "run", "config"])
@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["--memory", "4 gigs"], {}, "--memory: '4 gigs' is not a size"),
        (["--memroy", "4GiB"], {}, "Did you mean --memory?"),
        ([], {"STEPWELL_MEMROY": "1"}, "did you mean STEPWELL_MEMORY?"),
        (["--config", "/no/such.toml"], {}, "cannot read the configuration file /no/such.toml"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_status_2(
    run: Run, command: str, arguments: list[str], environ: dict[str, str], message: str
) -> None:
    result = run(command, *arguments, **environ)
    assert result.returncode == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["stats", "clear"])
def test_without_a_server_is_one_line_and_status_1(run: Run, command: str, tmp_path: Path) -> None:
    socket = tmp_path / "none.sock"
    result = run(command, "--socket", str(socket))
    assert (result.returncode, result.stdout) == (1, "")
    assert f"no cache server runs on {socket}; start one with `stepwell serve`" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_stats_and_clear_tell_of_what_is_held(run: Run, server: Path) -> None:
    with stepwell.connect(server) as cache:
        space = cache.space("test", chunk_tokens=4, chunk_bytes=1 << 20)
        keys = space.keys(range(20))
        with space.reserve(keys[:3]) as new:
            assert len(new) == 3
        with space.load(keys, timeout_s=1.0) as lease:
            assert lease.chunks == 3

    data = json.loads(run("stats", "--json", STEPWELL_SOCKET=str(server)).stdout)
    assert data["tiers"]["memory"]["used_bytes"] == 3 << 20
    assert data["hit_chunks"] == 3
    assert data["missed"]["not_held"] == 2

    table = run("stats", "--socket", str(server)).stdout
    # GiB used and its limit, the share of it, then chunks, pinned, loaded, stored, evicted
    assert re.search(r"memory +0\.00 +0\.02 +18\.8 +3 +0 +3 +3 +0", table)
    assert re.search(r"hit +3 +60\.0", table)
    assert re.search(r"missed: not_held +2 +40\.0", table)
    assert "no_room" not in table

    assert run("clear", "--socket", str(server)).stdout == "3 chunks removed\n"
    assert run("clear", "--socket", str(server)).stdout == "0 chunks removed\n"
    assert json.loads(run("stats", "--json").stdout)["tiers"]["memory"]["used_bytes"] == 0


def test_stats_table_fits_a_terminal_of_80_columns(run: Run, server: Path) -> None:
    table = run("stats", "--socket", str(server), COLUMNS="80").stdout
    assert "…" not in table
    assert "evicted" in table
    assert "computed" in table


def test_the_demo_says_what_to_do_without_an_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    assert main(["demo"]) == 1
    message = capsys.readouterr().err
    assert "vllm cannot be imported here; run `make demo`" in message
    assert "pip install 'stepwell[vllm]'" in message
