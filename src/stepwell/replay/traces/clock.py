"""What is odd about the times of one file."""

from collections.abc import Sequence
from itertools import pairwise

from stepwell.replay.traces.record import Record

# Seconds beside milliseconds: neighbours a thousand times apart, give or take the time between them.
_RATIO_LEAST, _RATIO_MOST = 900, 1_100
# Below, a pause makes that factor: backwards nothing does, but from near 0; forwards it takes a day.
_BACKWARDS_FROM_S, _FORWARDS_FROM_S = 1.0, 100.0


def mixed_units(records: Sequence[Record]) -> tuple[Record, Record] | None:
    """The first two neighbours that look as if one had seconds and the other milliseconds."""
    for before, after in pairwise(records):
        if before.scope != after.scope:
            continue
        low, high = sorted((before.time_s, after.time_s))
        least = _BACKWARDS_FROM_S if after.time_s < before.time_s else _FORWARDS_FROM_S
        if low >= least and _RATIO_LEAST <= high / low <= _RATIO_MOST:
            return before, after
    return None


def out_of_order(records: Sequence[Record]) -> int:
    """How many stand after a later one."""
    return sum(
        after.time_s < before.time_s for before, after in pairwise(records) if before.scope == after.scope
    )
