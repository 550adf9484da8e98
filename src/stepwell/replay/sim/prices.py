"""Seconds of one engine step: the roofline of its operations and of the bytes it reads."""

from stepwell.replay.shape import kv_bytes_per_token, prefill_flop, weight_bytes
from stepwell.replay.sim.spec import EngineSpec


class StepPrices:
    """Of one kind of engine. Source of the bound: Williams, Waterman, Patterson, "Roofline", CACM 2009."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._kv_bytes = kv_bytes_per_token(spec.model)
        self._weight_bytes = weight_bytes(spec.model)
        self._active_bytes = 1e9 * spec.model.active_billion * spec.model.weight_bytes

    def prefill_flop(self, tokens: int, context_tokens: int) -> float:
        """Of a part of one prompt."""
        return prefill_flop(self._spec.model, tokens, context_tokens)

    def step_s(self, flop: float, prompt_tokens: int, decodes: int, decode_context_tokens: float) -> float:
        """One step: parts of prompts with so many operations, and one token for each of `decodes`.

        `decode_context_tokens` is the sum over these. Of a mixture of experts, as many are read as the
        tokens may meet.
        """
        model = self._spec.model
        flop += 2e9 * model.active_billion * decodes + 4 * model.attention_dim * model.layers * (
            decode_context_tokens
        )
        weights = min(self._weight_bytes, self._active_bytes * (prompt_tokens + decodes))
        read_bytes = weights + self._kv_bytes * decode_context_tokens
        busy_s = max(flop / self._spec.flop_per_s, read_bytes / self._spec.memory_bytes_per_s)
        return busy_s + self._spec.step_overhead_s
