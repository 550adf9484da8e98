"""Waiting for a condition, never for a time."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0, of: str = "the condition") -> None:
    """Return as soon as `condition` holds; fail when it does not within `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"{of} did not come true in {limit_s:g} s"
        time.sleep(0.01)
