"""What computing and what loading costs here, learned from what the engine and the tiers really do."""

from collections import deque
from itertools import combinations
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


PRIOR_LATENCY_S = 0.001
PRIOR_BYTES_PER_S = 1e9
"""Before anything was read from a tier: a drive of this kind. The first reads tell."""

_OBSERVED_READS = 9  # so that five reads of a tier that has changed are believed


class LoadCost:
    """Seconds to read from one tier: a latency, then bytes by bandwidth.

    The line is Theil's and Sen's through the last reads: the median of the slopes between all pairs
    (Theil 1950, Sen 1968). A few outliers do not move it.
    """

    def __init__(self) -> None:
        self._reads: deque[tuple[int, float]] = deque(maxlen=_OBSERVED_READS)
        self.latency_s = PRIOR_LATENCY_S
        self.seconds_per_byte = 1 / PRIOR_BYTES_PER_S

    def observe(self, nbytes: int, seconds: float) -> None:
        """One read took so long, less the time in which it waited for others."""
        if nbytes <= 0:
            return
        self._reads.append((nbytes, seconds))
        slopes = [
            (later_s - earlier_s) / (later - earlier)
            for (earlier, earlier_s), (later, later_s) in combinations(self._reads, 2)
            if later != earlier
        ]
        if slopes and (slope := median(slopes)) > 0:
            self.seconds_per_byte = slope
            self.latency_s = max(0.0, median(seconds - slope * nbytes for nbytes, seconds in self._reads))
        else:
            # All of one size, or larger ones were faster: nothing tells the two apart.
            self.seconds_per_byte = median(seconds / nbytes for nbytes, seconds in self._reads)
            self.latency_s = 0.0

    def seconds(self, nbytes: int) -> float:
        """Until so many bytes are here, those asked for before included."""
        return self.latency_s + nbytes * self.seconds_per_byte
