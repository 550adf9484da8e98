"""What the demo measured, and the figures of its table. Pure."""

import math
from collections.abc import Sequence

import msgspec

from stepwell.demo.client import Answer
from stepwell.demo.measure import PromptTokens
from stepwell.demo.workload import Phase


class Measured(msgspec.Struct, frozen=True):
    """One request of one run."""

    phase: Phase
    name: str
    answer: Answer


class PhaseTokens(msgspec.Struct, frozen=True):
    """Where one phase's prompt tokens came from in one run, by the engine's own metrics."""

    phase: Phase
    tokens: PromptTokens


class Run(msgspec.Struct, frozen=True):
    """All requests of one run, in order."""

    requests: tuple[Measured, ...]
    phases: tuple[PhaseTokens, ...]
    engine_start_s: tuple[float, ...]

    def of(self, phase: Phase) -> list[Measured]:
        """The requests of one phase, in order."""
        return [request for request in self.requests if request.phase == phase]

    def tokens_of(self, phase: Phase) -> PromptTokens:
        """Where the phase's prompt tokens came from."""
        return next(entry.tokens for entry in self.phases if entry.phase == phase)


class Cell(msgspec.Struct, frozen=True):
    """The figures of one phase in one run."""

    first_token_p50_s: float
    first_token_p95_s: float
    whole_s: float  # all its requests, one after another
    tokens: PromptTokens


class Row(msgspec.Struct, frozen=True):
    """One phase in both runs. Speed-ups are without over with: above 1, Stepwell was faster."""

    phase: Phase
    requests: int
    without: Cell
    with_stepwell: Cell
    first_token_speed_up: float  # of the medians
    whole_speed_up: float
    answers_equal: int


class Results(msgspec.Struct, frozen=True):
    """Everything that `stepwell demo --json` writes."""

    machine: str
    model: str
    engine: str
    engine_cache_tokens: int
    rows: tuple[Row, ...]
    without: Run
    with_stepwell: Run


def rows(without: Run, with_stepwell: Run) -> tuple[Row, ...]:
    """The table: one row a phase."""
    return tuple(_row(entry.phase, without, with_stepwell) for entry in without.phases)


def _row(phase: Phase, without: Run, with_stepwell: Run) -> Row:
    pairs = list(zip(without.of(phase), with_stepwell.of(phase), strict=True))
    before, after = _cell(without, phase), _cell(with_stepwell, phase)
    return Row(
        phase=phase,
        requests=len(pairs),
        without=before,
        with_stepwell=after,
        first_token_speed_up=before.first_token_p50_s / after.first_token_p50_s,
        whole_speed_up=before.whole_s / after.whole_s,
        answers_equal=sum(one.answer.text == other.answer.text for one, other in pairs),
    )


def _cell(run: Run, phase: Phase) -> Cell:
    answers = [request.answer for request in run.of(phase)]
    return Cell(
        first_token_p50_s=percentile([answer.first_token_s for answer in answers], 50),
        first_token_p95_s=percentile([answer.first_token_s for answer in answers], 95),
        whole_s=sum(answer.whole_s for answer in answers),
        tokens=run.tokens_of(phase),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: the smallest value that at least `percent` % of all do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]
