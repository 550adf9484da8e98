"""Time to first token of a hit: against the engine's own prefix hit, computing again, and LMCache.

All engines run at the same time and are asked in turn, one request at a time, so that a machine that
slows down slows them all; an engine that waits uses no processor, which is checked first.
"""

import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from arms import LMCACHE, PLAIN, STEPWELL, Arm, Setting, arms, idle_cores
from client import Counted, CountError, random_prompt
from harness import machine_of, not_run, parser_of, run
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from stepwell.demo.engine import BLOCK_TOKENS

PROMPT_TOKENS = 4_000
WHOLE_TOKENS = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS  # what a cache can hold of a prompt: whole blocks
# One prompt with its answer, one block for `_wake`, the null block, and a few spare; two prompts do not fit.
ENGINE_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS + 9

COMPUTED = Counted(PROMPT_TOKENS, 0, 0)
ENGINE_HIT = Counted(PROMPT_TOKENS - WHOLE_TOKENS, WHOLE_TOKENS, 0)
EXTERNAL_HIT = Counted(PROMPT_TOKENS - WHOLE_TOKENS, 0, WHOLE_TOKENS)


class Visit(msgspec.Struct, frozen=True):
    """One request."""

    arm: str
    prompt: int
    round: int
    again: bool  # asked right before too, so that the engine's own cache has it
    first_token_s: float
    counted: Counted


class Line(msgspec.Struct, frozen=True):
    """Visits of one kind."""

    what: str
    visits: int
    median_s: float
    p95_s: float
    counted: Counted  # of every one of them


class Ratio(msgspec.Struct, frozen=True):
    """Of two medians; the spread is that of the same prompts' visits, pair by pair."""

    what: str
    value: float
    quartiles: tuple[float, float]
    target: str
    is_met: bool


class Result(msgspec.Struct, frozen=True):
    """Everything that one run says."""

    machine: str
    lines: list[Line]
    ratios: list[Ratio]
    not_run: list[str]
    visits: list[Visit]


def main() -> int:
    parser = parser_of(__doc__, rounds=2, rounds_of="how often each is asked again")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of 4,000 tokens (default 12)")
    options = parser.parse_args()
    plan = Plan(options.prompts, options.rounds, options.minutes)
    return run(
        options,
        lambda folder, console: measure(plan, options.lmcache_dir, folder, console),
        print_result,
        lambda result: all(ratio.is_met for ratio in result.ratios),
    )


class Plan(msgspec.Struct, frozen=True):
    """How much to ask."""

    prompts: int
    rounds: int
    minutes: float


def measure(plan: Plan, lmcache_dir: Path | None, folder: Path, console: Console) -> Result:
    """Start the engines, ask, and check by their own counters where every prompt came from."""
    kib_per_token = 30 * 2 * 3 * 64 * 2 / 1024  # of the small model: layers, K and V, heads, head size, bf16
    cache_gib = math.ceil(1.3 * (plan.prompts + 1) * PROMPT_TOKENS * kib_per_token / (1 << 20))
    setting = Setting(ENGINE_BLOCKS, 4_224, cache_gib, lmcache_dir)
    visits: list[Visit] = []
    with console.status("starting the engines") as status, arms(setting, folder) as started:
        busy = {arm.name: idle_cores(arm) for arm in started}
        for arm in started:
            status.update(f"warming up: {arm.name}")
            for _ in range(2):
                arm.engine.ask(random_prompt("warm-up", PROMPT_TOKENS), 1)
        end_s = time.monotonic() + 60 * plan.minutes
        for number, prompt in itertools.product(range(plan.rounds + 1), range(plan.prompts)):
            if number > 0 and time.monotonic() > end_s:
                break
            # Each prompt begins with another engine, so that none is always the first.
            for turn in range(len(started)):
                arm = started[(turn + prompt) % len(started)]
                if arm.name == PLAIN and number == 0:
                    continue  # there is nothing to store
                status.update(
                    f"round {number} of {plan.rounds}, prompt {prompt + 1} of {plan.prompts}: {arm.name}"
                )
                visits.append(visit(arm, prompt, number, again=False))
                visits.append(visit(arm, prompt, number, again=True))
    return summarize(visits, machine_of(busy), not_run(lmcache_dir))


def visit(arm: Arm, prompt: int, number: int, again: bool) -> Visit:
    """One request, timed; raises CountError where its prompt did not come from where it should."""
    _wake(arm)
    before = arm.engine.counted()
    answer = arm.engine.ask(random_prompt(f"prompt {prompt}", PROMPT_TOKENS), 1)
    counted = arm.engine.counted().since(before)
    expected = ENGINE_HIT if again else COMPUTED if arm.name == PLAIN or number == 0 else EXTERNAL_HIT
    if counted != expected:
        what = f"{arm.name}, round {number}, prompt {prompt}"
        raise CountError(f"{what}: expected {expected}, vLLM says {counted}")
    return Visit(arm.name, prompt, number, again, answer.first_token_s, counted)


def _wake(arm: Arm) -> None:
    # While the others were asked this engine's threads slept, and its weights left the processor's caches. A
    # short prompt first, or the first of two requests would always seem slower.
    arm.engine.ask(random_prompt("wake", 8), 1)


def summarize(visits: Sequence[Visit], machine: str, not_run: list[str]) -> Result:
    """Medians by kind of visit, and the ratios that have targets."""

    def of(arm: str, again: bool, first_pass: bool) -> list[Visit]:
        return [v for v in visits if (v.arm, v.again, v.round == 0) == (arm, again, first_pass)]

    computed = of(PLAIN, False, False)
    own = of(PLAIN, True, False)
    hits = of(STEPWELL, False, False)
    kinds = [("vLLM alone: computed", computed), ("vLLM alone: own hit", own)]
    for arm in dict.fromkeys(v.arm for v in visits if v.arm != PLAIN):
        kinds += [
            (f"{arm}: first pass", of(arm, False, True)),
            (f"{arm}: hit", of(arm, False, False)),
            (f"{arm}: own hit", of(arm, True, False)),
        ]
    ratios = [
        _ratio("Stepwell hit ÷ own hit, vLLM alone", hits, own, most=1.25),
        _ratio("Stepwell hit ÷ own hit, same engine", hits, of(STEPWELL, True, False), most=1.25),
        _ratio("computed ÷ Stepwell hit", computed, hits, least=20.0),
    ]
    if guest := of(LMCACHE, False, False):
        ratios.append(_ratio("Stepwell hit ÷ LMCache hit", hits, guest, most=1.0))
    return Result(machine, [_line(what, kind) for what, kind in kinds], ratios, not_run, list(visits))


def _line(what: str, visits: Sequence[Visit]) -> Line:
    times = sorted(v.first_token_s for v in visits)
    p95_s = times[math.ceil(0.95 * len(times)) - 1]
    return Line(what, len(times), _median_s(visits), p95_s, visits[0].counted)


def _median_s(visits: Sequence[Visit]) -> float:
    return statistics.median(v.first_token_s for v in visits)


def _ratio(
    what: str, above: Sequence[Visit], below: Sequence[Visit], most: float = math.inf, least: float = 0.0
) -> Ratio:
    value = _median_s(above) / _median_s(below)
    partner = {(v.round, v.prompt): v.first_token_s for v in below}
    pairs = [v.first_token_s / partner[v.round, v.prompt] for v in above]
    low, _, high = statistics.quantiles(pairs, n=4)
    target = f"≤ {most:g}" if most < math.inf else f"≥ {least:g}"
    return Ratio(what, value, (low, high), target, least <= value <= most)


def print_result(result: Result, console: Console) -> None:
    """Two tables: times, and ratios with their targets."""
    console.print(result.machine)
    times = Table(title=f"Time to first token, prompts of {PROMPT_TOKENS:,} tokens", box=SIMPLE_HEAD)
    times.add_column("", no_wrap=True)
    # vLLM's counters in the last three: tokens of each prompt.
    for name in ("visits", "p50 s", "p95 s", "computed", "own", "external"):
        times.add_column(name, justify="right", no_wrap=True)
    for line in result.lines:
        counts = (line.counted.computed, line.counted.engine_hit, line.counted.external_hit)
        seconds = [f"{s:.3f}" for s in (line.median_s, line.p95_s)]
        times.add_row(line.what, str(line.visits), *seconds, *(f"{count:,}" for count in counts))
    ratios = Table(box=SIMPLE_HEAD)
    ratios.add_column("ratio of medians", no_wrap=True)
    for name in ("all", "pair by pair", "target", ""):
        ratios.add_column(name, justify="right", no_wrap=True)
    for ratio in result.ratios:
        quartiles = "{:.2f} to {:.2f}".format(*ratio.quartiles)
        ratios.add_row(
            ratio.what, f"{ratio.value:.2f}", quartiles, ratio.target, "pass" if ratio.is_met else "MISS"
        )
    console.print(times, ratios)
    for reason in result.not_run:
        console.print(reason)


if __name__ == "__main__":
    sys.exit(main())
