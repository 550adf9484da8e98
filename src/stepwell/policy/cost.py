"""What computing costs here, learned from what the engine really does."""

from collections import deque
from statistics import median

PRIOR_TOKENS_PER_S = 2_000.0
"""Before anything was observed: a slow engine, so that the first prompts after a start wait for a slow
tier rather than compute. It is off by less than the first step's time."""

_OBSERVED_STEPS = 31  # the median of so many forgets an old load within seconds, and ignores outliers
_TOKENS_LEAST = 64  # a step of fewer is mostly overhead, or decodes: it says little about prompts


class PrefillSpeed:
    """Seconds to compute prompt tokens, as the median of the last steps that computed many."""

    def __init__(self) -> None:
        self._seconds_per_token: deque[float] = deque(maxlen=_OBSERVED_STEPS)

    def observe(self, tokens: int, seconds: float) -> None:
        """One step computed so many tokens in so many seconds."""
        if tokens >= _TOKENS_LEAST and seconds > 0:
            self._seconds_per_token.append(seconds / tokens)

    def seconds(self, tokens: int) -> float:
        """To compute so many tokens of a prompt."""
        if not self._seconds_per_token:
            return tokens / PRIOR_TOKENS_PER_S
        return tokens * median(self._seconds_per_token)
