"""A claim, and what this trace says of it."""

from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """Of a claim on one trace, model and hardware."""

    HOLDS = "holds"
    DOES_NOT_HOLD = "does not hold"
    UNDECIDED = "cannot be decided from this trace"


class Verdict(msgspec.Struct, frozen=True):
    """One claim."""

    claim: str
    outcome: Outcome
    measured: str  # the figure that decides, in words
    flips: str  # the threshold at which the verdict turns


def decide(claim: str, holds: bool | None, measured: str, flips: str) -> Verdict:
    """None: nobody can tell from this trace."""
    if holds is None:
        return Verdict(claim, Outcome.UNDECIDED, measured, flips)
    return Verdict(claim, Outcome.HOLDS if holds else Outcome.DOES_NOT_HOLD, measured, flips)
