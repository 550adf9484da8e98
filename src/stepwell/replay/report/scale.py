"""The same traffic denser, or only its beginning."""

import msgspec

from stepwell.replay.traces.row import Trace


def head(trace: Trace, requests: int) -> Trace:
    """The first so many requests, for what has to be simulated many times."""
    return msgspec.structs.replace(trace, rows=trace.rows[:requests])


def denser(trace: Trace, factor: float) -> Trace:
    """Arrivals `factor` times as fast."""
    rows = tuple(msgspec.structs.replace(row, arrival_s=row.arrival_s / factor) for row in trace.rows)
    return msgspec.structs.replace(trace, rows=rows)
