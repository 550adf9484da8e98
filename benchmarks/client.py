"""Asks vLLM's OpenAI-compatible server as a client would, over HTTP, streaming, and reads its counters."""

import http.client
import json
import random
import time
from collections.abc import Sequence

import msgspec
from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 120.0
_TOKENS = range(1_000, 40_000)  # ordinary tokens of the small model


class EngineError(RuntimeError):
    """The engine refused a request."""


class CountError(RuntimeError):
    """A prompt did not come from where the benchmark says: its time would mean something else."""


class Counted(msgspec.Struct, frozen=True):
    """Where the tokens of prompts came from, by vLLM's own counters."""

    computed: int
    engine_hit: int
    external_hit: int

    def since(self, earlier: "Counted") -> "Counted":
        return Counted(
            self.computed - earlier.computed,
            self.engine_hit - earlier.engine_hit,
            self.external_hit - earlier.external_hit,
        )


class Answer(msgspec.Struct, frozen=True):
    """The times of one request, from sending it."""

    first_token_s: float
    whole_s: float


class Engine:
    """One vLLM server. May be used from several threads: every request has a connection of its own."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._model = model

    def ask(self, prompt: Sequence[int], output_tokens: int) -> Answer:
        """Stream `output_tokens` tokens, greedily. Raises EngineError."""
        body = json.dumps(
            {
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
        ).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        try:
            connection.connect()
            start_s = time.perf_counter()
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise EngineError(f"HTTP {response.status}: {response.read().decode(errors='replace')}")
            first = response.readline()
            first_token_s = time.perf_counter() - start_s
            rest = response.read()
            whole_s = time.perf_counter() - start_s
        finally:
            connection.close()
        if not first.startswith(b'data: {"id"') or not rest.rstrip().endswith(b"data: [DONE]"):
            raise EngineError(f"the answer is not a stream of tokens: {first!r} … {rest[-200:]!r}")
        return Answer(first_token_s, whole_s)

    def counted(self) -> Counted:
        """The counters since the engine's start."""
        tokens: dict[str, int] = {}
        external = 0
        for family in text_string_to_metric_families(self._get("/metrics")):
            for sample in family.samples:
                if sample.name == "vllm:prompt_tokens_by_source_total":
                    source = sample.labels["source"]
                    tokens[source] = tokens.get(source, 0) + int(sample.value)
                elif sample.name == "vllm:external_prefix_cache_hits_total":
                    external += int(sample.value)
        by_source = Counted(
            tokens["local_compute"], tokens["local_cache_hit"], tokens.get("external_kv_transfer", 0)
        )
        if by_source.external_hit != external:
            raise EngineError(f"vLLM's counters disagree: {by_source} but {external} external hits")
        return by_source

    def is_healthy(self) -> bool:
        """Whether the server answers yet."""
        try:
            self._get("/health")
        except (ConnectionError, EngineError):
            return False
        return True

    def _get(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            raise EngineError(f"GET {path}: HTTP {response.status}")
        return text


def random_prompt(name: str, tokens: int) -> list[int]:
    """Token ids that follow from `name` alone; two names share no block."""
    return random.Random(name).choices(_TOKENS, k=tokens)
