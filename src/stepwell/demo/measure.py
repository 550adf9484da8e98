"""Where the prompt tokens came from, read from vLLM's own /metrics."""

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

METRIC = "vllm:prompt_tokens_by_source"
COMPUTED = "local_compute"
ENGINE_HIT = "local_cache_hit"
EXTERNAL_HIT = "external_kv_transfer"


class MetricsError(RuntimeError):
    """The engine's metrics lack what the demo reads."""


class PromptTokens(msgspec.Struct, frozen=True):
    """Prompt tokens by where their KV came from; the three add up to all prompt tokens."""

    computed: int
    engine_hit: int
    stepwell_hit: int

    def __sub__(self, earlier: "PromptTokens") -> "PromptTokens":
        return PromptTokens(
            self.computed - earlier.computed,
            self.engine_hit - earlier.engine_hit,
            self.stepwell_hit - earlier.stepwell_hit,
        )


def parse(text: str) -> PromptTokens:
    """Counts since the engine's start, from the text of /metrics. Raises `MetricsError`."""
    counts: dict[str, int] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"{METRIC}_total":
                    source = sample.labels["source"]
                    counts[source] = counts.get(source, 0) + int(sample.value)
    except ValueError as error:
        raise MetricsError(f"the engine's /metrics cannot be read: {error}") from error
    missing = {COMPUTED, ENGINE_HIT, EXTERNAL_HIT} - counts.keys()
    if missing:
        raise MetricsError(f"the engine's /metrics has no {METRIC} for {', '.join(sorted(missing))}")
    return PromptTokens(counts[COMPUTED], counts[ENGINE_HIT], counts[EXTERNAL_HIT])


async def prompt_tokens(session: aiohttp.ClientSession, url: str) -> PromptTokens:
    """Counts since the engine's start. Raises `MetricsError`."""
    try:
        async with session.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(total=10)) as response:
            return parse(await response.text())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise MetricsError(f"the engine's /metrics does not answer: {error}") from error
