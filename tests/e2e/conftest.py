"""Real vLLM on the CPU with the small real model, started as a user starts it, driven over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stepwell.demo.engine import MODEL_NAME, environment, vllm_command
from stepwell.demo.process import end, free_port, start

pytest.importorskip("vllm", reason="needs vLLM: make setup")

START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Answer:
    """One completion."""

    tokens: list[str]
    logprobs: list[float]
    whole_s: float
    prompt_tokens: int
    cached_tokens: int


class Process:
    """A child with its log, stopped by its own group."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        self.child = start(command, os.environ | env, log)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.child.send_signal(number)

    def stop(self) -> None:
        end(self.child, patience_s=30)

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class CacheServer(Process):
    """`stepwell serve` on its own socket."""

    def __init__(self, folder: Path, memory: str = "1GiB", *extra: str) -> None:
        self.extra = extra
        self.socket = folder / "stepwell.sock"
        self.memory = memory
        self.folder = folder
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "stepwell", "serve", "--memory", self.memory]
        super().__init__(
            [*command, "--socket", str(self.socket), "--http", "off", *self.extra],
            {},
            self.folder / "serve.log",
        )
        wait_for(self.listens, 30, self.text)

    def listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def stats(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "stepwell", "stats", "--json", "--socket", str(self.socket)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


class Engine(Process):
    """`vllm serve` with the small model; its own cache holds `blocks` blocks of 128 tokens."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        blocks: int,
        cache: Path | None,
        module: str = "stepwell.engines.vllm",
        connector: str = "StepwellConnector",
        through_run: bool = False,
        env: dict[str, str] | None = None,
        extra: tuple[str, ...] = (),
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.port = free_port()
        command = [*vllm_command(model, self.port, 2048, blocks), *extra]
        if through_run:
            assert cache is not None
            command = [sys.executable, "-m", "stepwell", "run", "--socket", str(cache), "--", *command]
        elif cache is not None:
            transfer = {
                "kv_connector": connector,
                "kv_connector_module_path": module,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"socket": str(cache)} | (settings or {}),
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        environ = environment() | {"VLLM_SERVER_DEV_MODE": "1"}
        super().__init__(command, environ | (env or {}), folder / f"engine-{self.port}.log")
        wait_for(self.healthy, START_TIMEOUT_S, lambda: self.text()[-6000:], self)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self._url("/health"), timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def ask(self, prompt: list[int] | str, max_tokens: int = 8, **options: Any) -> Answer:
        body = {
            "model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 0,
            "ignore_eos": True, **options,
        }  # fmt: skip
        start_s = time.perf_counter()
        reply = self.post("/v1/completions", body)
        whole_s = time.perf_counter() - start_s
        choice, usage = reply["choices"][0], reply["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            choice["logprobs"]["tokens"],
            choice["logprobs"]["token_logprobs"],
            whole_s,
            usage["prompt_tokens"],
            details.get("cached_tokens") or 0,
        )

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._url(path), json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            data = response.read()
        return json.loads(data) if data else None

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        with urllib.request.urlopen(self._url("/metrics"), timeout=10) as response:
            lines = response.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith((name + "{", name + " ")) and all(label in line for label in wanted)
        )

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


def wait_for(condition: Any, timeout_s: float, say: Any, process: Process | None = None) -> None:
    """Poll until true; fail with what `say` returns."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s or (process is not None and process.child.poll() is not None):
            pytest.fail(f"waited in vain for {condition}: {say()}")
        time.sleep(0.05)


@pytest.fixture(scope="session")
def model() -> Path:
    from stepwell.demo.model import ensure_model

    return ensure_model()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    server = CacheServer(tmp_path_factory.mktemp("cache"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def plain_engine(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Engine]:
    """The same engine without Stepwell, its own cache large enough for every test's prompts."""
    engine = Engine(tmp_path_factory.mktemp("plain"), model, blocks=400, cache=None)
    yield engine
    engine.stop()
