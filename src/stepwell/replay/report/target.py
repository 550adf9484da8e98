"""How many engines meet a target for the time to the first token."""

from collections.abc import Callable

import msgspec

from stepwell.replay.sim.result import SimResult
from stepwell.replay.sim.simulate import simulate
from stepwell.replay.sim.spec import SimSpec
from stepwell.replay.traces.row import Trace
from stepwell.sizes import parse_duration

ENGINES_MOST = 64


class Target(msgspec.Struct, frozen=True):
    """A percentile of the time to the first token, at most so many seconds."""

    percentile: str  # "p50", "p90", "p95", "p99" or "mean"
    seconds: float

    def met_by(self, result: SimResult) -> bool:
        return result.requests == 0 or result.ttft_s[self.percentile] <= self.seconds


def parse_target(text: str) -> Target:
    """As in ttft_p95=2s. Raises ValueError."""
    name, equals, seconds = text.partition("=")
    percentile = name.strip().removeprefix("ttft_")
    if not equals or percentile not in ("mean", "p50", "p90", "p95", "p99"):
        raise ValueError(f"{text!r} is not a target; write it as ttft_p95=2s (mean, p50, p90, p95 or p99)")
    return Target(percentile, parse_duration(seconds))


def fewest_engines(trace: Trace, spec: SimSpec, target: Target) -> int | None:
    """By doubling, then bisection; None when none of 1, 2, 4, ... up to `ENGINES_MOST` meets it.

    More engines may be worse: each has a cache of its own, and sessions meet it less often.
    """

    def meets(engines: int) -> bool:
        return target.met_by(simulate(trace, msgspec.structs.replace(spec, engines=engines)))

    return _first_true(meets, ENGINES_MOST)


def _first_true(is_true: Callable[[int], bool], most: int) -> int | None:
    high = 1
    while not is_true(high):
        if high >= most:
            return None
        high = min(most, 2 * high)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if is_true(middle):
            high = middle
        else:
            low = middle
    return high
