"""Throughput on prompts that never repeat: what storing costs a workload that gains nothing from it.

All engines run at the same time; one after the other, each in turn first, is asked the same short block of
new prompts, and compared with vLLM alone in the same round, so that a machine that slows down slows both.
"""

import itertools
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from arms import LMCACHE, PLAIN, STEPWELL, Arm, Setting, arms, idle_cores
from client import Counted, CountError, random_prompt
from harness import machine_of, not_run, parser_of, run
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from stepwell.demo.engine import BLOCK_TOKENS

PROMPT_TOKENS = 2_000
OUTPUT_TOKENS = 16
BLOCK_PROMPTS = {1: 3, 4: 8}  # by concurrency: some seconds of work each
ENGINE_BLOCKS = 90  # room for four requests at once, not for two rounds' prompts
CACHE_GIB = 2  # some 48 prompts: the cache is full, and evicts, for most of a run
RATIO_LEAST = 0.97


class Block(msgspec.Struct, frozen=True):
    """One block of prompts."""

    arm: str
    concurrency: int
    round: int
    tokens_per_s: float  # prompts and answers
    first_token_s: list[float]


class Ratio(msgspec.Struct, frozen=True):
    """An arm's throughput by that of vLLM alone, round by round."""

    arm: str
    concurrency: int
    median: float
    quartiles: tuple[float, float]
    standard_error: float  # of the mean over rounds
    rounds: int


class Result(msgspec.Struct, frozen=True):
    """Everything that one run says."""

    machine: str
    ratios: list[Ratio]
    not_run: list[str]
    blocks: list[Block]


def main() -> int:
    options = parser_of(__doc__, rounds=8, rounds_of="of each concurrency").parse_args()
    return run(
        options,
        lambda folder, console: measure(
            options.rounds, options.minutes, options.lmcache_dir, folder, console
        ),
        print_result,
        lambda result: all(verdict_of(r) == "pass" for r in result.ratios if r.arm == STEPWELL),
    )


def measure(rounds: int, minutes: float, lmcache_dir: Path | None, folder: Path, console: Console) -> Result:
    """Start the engines, ask, and check that nothing was found in a cache, and that all was stored."""
    setting = Setting(ENGINE_BLOCKS, 2_304, CACHE_GIB, lmcache_dir)
    blocks: list[Block] = []
    with console.status("starting the engines") as status, arms(setting, folder) as started:
        busy = {arm.name: idle_cores(arm) for arm in started}
        for arm in started:
            status.update(f"warming up: {arm.name}")
            for concurrency in BLOCK_PROMPTS:
                ask_block(arm, concurrency, -1)
        end_s = time.monotonic() + 60 * minutes
        for number, concurrency in itertools.product(range(rounds), BLOCK_PROMPTS):
            if number > 1 and time.monotonic() > end_s:
                break
            last = prompt_name(concurrency, number, 0)
            for turn in range(len(started)):
                arm = started[(turn + number) % len(started)]
                status.update(f"round {number + 1} of {rounds}, {concurrency} at once: {arm.name}")
                blocks.append(ask_block(arm, concurrency, number))
        for arm in started:
            check_stored(arm, last)
    return Result(machine_of(busy), ratios_of(blocks), not_run(lmcache_dir), blocks)


def prompt_name(concurrency: int, number: int, prompt: int) -> str:
    """The same for all engines."""
    return f"concurrency {concurrency}, round {number}, prompt {prompt}"


def ask_block(arm: Arm, concurrency: int, number: int) -> Block:
    """One block, timed as a whole; raises CountError where a token was not computed."""
    prompts = [
        random_prompt(prompt_name(concurrency, number, prompt), PROMPT_TOKENS)
        for prompt in range(BLOCK_PROMPTS[concurrency])
    ]
    before = arm.engine.counted()
    with ThreadPoolExecutor(concurrency) as threads:
        start_s = time.perf_counter()
        answers = list(threads.map(lambda prompt: arm.engine.ask(prompt, OUTPUT_TOKENS), prompts))
        wall_s = time.perf_counter() - start_s
    counted = arm.engine.counted().since(before)
    if counted != Counted(len(prompts) * PROMPT_TOKENS, 0, 0):
        raise CountError(f"{arm.name}, round {number}: new prompts were found in a cache: {counted}")
    tokens = len(prompts) * (PROMPT_TOKENS + OUTPUT_TOKENS)
    return Block(arm.name, concurrency, number, tokens / wall_s, [a.first_token_s for a in answers])


def check_stored(arm: Arm, name: str) -> None:
    """Ask for a prompt once more when the engine's own cache has forgotten it.

    Raises CountError where a cache does not have it: not storing would look fast.
    """
    for filler in range(-(-ENGINE_BLOCKS * BLOCK_TOKENS // PROMPT_TOKENS)):
        arm.engine.ask(random_prompt(f"filler {filler}", PROMPT_TOKENS), 1)
    before = arm.engine.counted()
    arm.engine.ask(random_prompt(name, PROMPT_TOKENS), 1)
    counted = arm.engine.counted().since(before)
    whole = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    found = 0 if arm.name == PLAIN else whole
    if counted != Counted(PROMPT_TOKENS - found, 0, found):
        raise CountError(f"{arm.name}: expected {found} tokens in its cache, vLLM says {counted}")


def ratios_of(blocks: list[Block]) -> list[Ratio]:
    """Each arm against vLLM alone in the same round."""
    plain = {(b.concurrency, b.round): b.tokens_per_s for b in blocks if b.arm == PLAIN}
    ratios = []
    for concurrency in BLOCK_PROMPTS:
        for arm in (STEPWELL, LMCACHE):
            pairs = [
                b.tokens_per_s / plain[concurrency, b.round]
                for b in blocks
                if (b.arm, b.concurrency) == (arm, concurrency)
            ]
            if pairs:
                low, median, high = statistics.quantiles(pairs, n=4)
                error = statistics.stdev(pairs) / len(pairs) ** 0.5
                ratios.append(Ratio(arm, concurrency, median, (low, high), error, len(pairs)))
    return ratios


def print_result(result: Result, console: Console) -> None:
    """One row for each arm and concurrency."""
    console.print(result.machine)
    title = f"Throughput on new prompts of {PROMPT_TOKENS:,} tokens, answers of {OUTPUT_TOKENS}"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in ("users", "tok/s", "ratio", "quartiles", "s.e.", "n", "target", ""):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for concurrency in BLOCK_PROMPTS:
        table.add_row(PLAIN, str(concurrency), f"{speed(result, PLAIN, concurrency):,.0f}")
        for ratio in result.ratios:
            if ratio.concurrency == concurrency:
                verdict = ["", ""]
                if ratio.arm == STEPWELL:
                    verdict = [f"≥ {RATIO_LEAST}", verdict_of(ratio)]
                table.add_row(
                    ratio.arm,
                    str(concurrency),
                    f"{speed(result, ratio.arm, concurrency):,.0f}",
                    f"{ratio.median:.3f}",
                    "{:.3f}, {:.3f}".format(*ratio.quartiles),
                    f"{ratio.standard_error:.3f}",
                    str(ratio.rounds),
                    *verdict,
                )
    console.print(table)
    for line in result.not_run:
        console.print(line)


def verdict_of(ratio: Ratio) -> str:
    """Nothing is shown by a ratio that lies within two standard errors of the target."""
    if abs(ratio.median - RATIO_LEAST) < 2 * ratio.standard_error:
        return "unclear"
    return "pass" if ratio.median >= RATIO_LEAST else "MISS"


def speed(result: Result, arm: str, concurrency: int) -> float:
    """Median over rounds."""
    return statistics.median(
        b.tokens_per_s for b in result.blocks if (b.arm, b.concurrency) == (arm, concurrency)
    )


if __name__ == "__main__":
    sys.exit(main())
