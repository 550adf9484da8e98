"""Times against what they are by hand, or by a simulation that takes one step at a time; and invariants."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_kit import BLOCK_BYTES, BLOCK_TOKENS, STEP_S, TOKEN_S, engine, tier, trace_of

from stepwell.replay.sim.compare import compare
from stepwell.replay.sim.prices import StepPrices
from stepwell.replay.sim.simulate import SimError, simulate
from stepwell.replay.sim.spec import EngineSpec, SimSpec
from stepwell.replay.traces.row import Trace


def near(seconds: float) -> object:
    return pytest.approx(seconds, rel=1e-3)


def test_one_prompt_takes_its_operations() -> None:
    result = simulate(trace_of([(3.0, range(10))]), SimSpec(engine(), 1))
    assert result.ttft_s["p50"] == near(160 * TOKEN_S)
    assert (result.computed_tokens, result.hit_tokens) == (160, {"gpu": 0})


def test_a_long_prompt_is_computed_in_parts_and_a_long_answer_step_by_step() -> None:
    trace = trace_of([(0.0, range(1000))], output_tokens=11)
    result = simulate(trace, SimSpec(engine(), 1))
    assert result.ttft_s["p50"] == near(16_000 * TOKEN_S)
    # Each of the ten other tokens reads the weights and 16 MB of KV.
    assert result.total_s["p50"] == near(16_000 * TOKEN_S + 10 * (STEP_S + 16_000 * 1024 / 100e9))


def test_the_same_again_computes_one_token() -> None:
    result = simulate(trace_of([(0.0, range(10)), (1.0, range(10))]), SimSpec(engine(), 1))
    assert result.hit_tokens == {"gpu": 159}
    assert result.computed_tokens == 161
    assert result.ttft_s["p50"] == near(STEP_S)


def test_what_left_the_gpu_comes_back_from_memory() -> None:
    # The second prompt takes all of the GPU's 40 blocks but 3; the third is the first again, and one more.
    trace = trace_of([(0.0, range(30)), (2.0, range(100, 136)), (4.0, [*range(30), 77])])
    spec = SimSpec(engine(gpu_blocks=40), 1, (tier("memory", 1_000),))
    result = simulate(trace, spec)
    assert result.hit_tokens["gpu"] + result.hit_tokens["memory"] == 480
    assert result.hit_tokens["memory"] >= 27 * BLOCK_TOKENS
    from_memory = result.hit_tokens["memory"] // BLOCK_TOKENS
    # Over the host's link of 1 GB/s, then the one new block.
    assert result.ttft_s["p50"] == near(480 * TOKEN_S)
    fastest = min(480 * TOKEN_S, from_memory * BLOCK_BYTES / 1e9 + max(STEP_S, 16 * TOKEN_S))
    without = simulate(trace, SimSpec(engine(gpu_blocks=40), 1))
    mean_gain = without.ttft_s["mean"] - result.ttft_s["mean"]
    assert mean_gain == near((without.ttft_s["mean"] * 3 - 480 * TOKEN_S - 576 * TOKEN_S - fastest) / 3)


def disk_trace() -> Trace:
    """The last prompt is the first, which is in the GPU no more, nor in memory of 130 blocks: only below."""
    fill = [(2.0 * number, range(100 * number, 100 * number + 39)) for number in range(1, 5)]
    return trace_of([(0.0, range(30)), *fill, (12.0, range(30))])


DISK_TRACE_COMPUTED_S = (30 + 4 * 39) * BLOCK_TOKENS * TOKEN_S  # all but the last


@pytest.mark.parametrize("name", ["disk", "redis"])
def test_what_left_memory_comes_up_from_below(name: str) -> None:
    slow = tier(name, 16 * 50, bytes_per_s=10e6)
    spec = SimSpec(engine(gpu_blocks=40), 1, (tier("memory", 130), slow))
    result = simulate(disk_trace(), spec)
    assert result.hit_tokens == {"gpu": 0, "memory": 0, name: 479}
    # 30 blocks at 10 MB/s, then over the host's link, then one token.
    last_s = 6 * result.ttft_s["mean"] - DISK_TRACE_COMPUTED_S
    assert last_s == near(30 * BLOCK_BYTES / 10e6 + 30 * BLOCK_BYTES / 1e9 + STEP_S)


def test_a_tier_that_is_too_slow_costs_its_deadline_and_no_more() -> None:
    stalled = tier("disk", 16 * 50, latency_s=1_000.0)
    spec = SimSpec(engine(gpu_blocks=40), 1, (tier("memory", 130), stalled))
    result = simulate(disk_trace(), spec)
    assert result.hit_tokens["disk"] == 0
    last_s = 6 * result.ttft_s["mean"] - DISK_TRACE_COMPUTED_S
    assert last_s == near(2 * 480 * TOKEN_S)  # it waited as long as it then computed


def test_memory_of_size_0_is_no_cache() -> None:
    trace = random_trace(random.Random(5), 60)
    off = simulate(trace, SimSpec(engine(gpu_blocks=60), 2))
    zero = simulate(trace, SimSpec(engine(gpu_blocks=60), 2, (tier("memory", 0), tier("disk", 1_000))))
    assert zero == off


def test_many_engines_on_one_link_wait_for_each_other() -> None:
    heads = [list(range(100 * number, 100 * number + 30)) for number in range(8)]
    fill = [list(range(5_000 + 100 * number, 5_000 + 100 * number + 39)) for number in range(8)]
    trace = trace_of(
        [(0.0, head) for head in heads] + [(20.0, each) for each in fill] + [(60.0, head) for head in heads]
    )
    memory = tier("memory", 10_000, bytes_per_s=5e6)  # 98 ms for 30 blocks: eight of them wait for each other

    def slowest_load_s(engines: int) -> float:
        spec = SimSpec(engine(gpu_blocks=40), engines, (memory,))
        served = simulate(trace, spec)
        assert served.hit_tokens["memory"] > 0
        return served.tiers[0].read_busy_s

    # The link does the same work; nobody gets more of it than there is.
    assert slowest_load_s(8) == pytest.approx(slowest_load_s(1), rel=0.2)
    alone = trace_of([(0.0, heads[0]), (20.0, fill[0]), (60.0, heads[0])])
    one = simulate(alone, SimSpec(engine(gpu_blocks=40), 1, (memory,)))
    eight = simulate(trace, SimSpec(engine(gpu_blocks=40), 8, (memory,)))
    assert eight.ttft_s["mean"] > one.ttft_s["mean"] + 0.05


def random_trace(draw: random.Random, requests: int, output_tokens: int = 20) -> Trace:
    now_s, found = 0.0, []
    for _ in range(requests):
        now_s += draw.expovariate(1 / 0.2)
        found.append((now_s, [draw.randrange(2) for _ in range(draw.randrange(1, 12))]))
    return trace_of(found, output_tokens, tail_tokens=5)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6), memory=st.integers(0, 80), disk=st.integers(0, 300), gpu=st.integers(15, 80)
)
def test_every_prompt_token_is_counted_once(seed: int, memory: int, disk: int, gpu: int) -> None:
    trace = random_trace(random.Random(seed), 40)
    spec = SimSpec(
        engine(gpu_blocks=gpu),
        2,
        (tier("memory", memory), tier("disk", disk, bytes_per_s=1e6), tier("redis", 100, bytes_per_s=2e6)),
    )
    result = simulate(trace, spec)
    assert result.requests == 40
    assert result.refused == 0
    assert all(tokens >= 0 for tokens in result.hit_tokens.values())
    assert sum(result.hit_tokens.values()) + result.computed_tokens == result.prompt_tokens
    assert result.computed_tokens >= 40
    assert result.ttft_s["p50"] >= STEP_S * 0.99


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_more_memory_hits_no_less(seed: int) -> None:
    trace = random_trace(random.Random(seed), 60)
    rates = [
        simulate(trace, SimSpec(engine(gpu_blocks=30), 1, (tier("memory", blocks),))).hit_rate_tokens
        for blocks in (0, 10, 40, 10_000)
    ]
    # Times shift the order of requests a little, so hits are not monotone to the last token.
    for less, more in itertools.pairwise(rates):
        assert more >= less - 0.03


class OneStepAtATime:
    """One engine without any cache: each step by itself, from plain lists."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.prices = StepPrices(spec)

    def first_tokens(self, trace: Trace) -> list[float]:
        now_s = 0.0
        queue = [(row.arrival_s, number) for number, row in enumerate(trace.rows)]
        prompts: list[list[int]] = []  # [number, tokens left]
        decodes: list[list[int]] = []  # [number, tokens left, context]
        found = [0.0] * len(trace.rows)
        while queue or prompts or decodes:
            if not prompts and not decodes:
                now_s = max(now_s, queue[0][0])
            while queue and queue[0][0] <= now_s:
                number = queue.pop(0)[1]
                prompts.append([number, trace.rows[number].input_tokens])
            room = self.spec.batch_tokens - len(decodes)
            flop, tokens, done = 0.0, 0, []
            for prompt in prompts:
                part = min(room, prompt[1])
                if part == 0:
                    break
                before = trace.rows[prompt[0]].input_tokens - prompt[1]
                flop += self.prices.prefill_flop(part, before)
                tokens += part
                room -= part
                prompt[1] -= part
                if prompt[1] == 0:
                    done.append(prompt)
            now_s += self.prices.step_s(flop, tokens, len(decodes), sum(each[2] for each in decodes))
            for each in decodes:
                each[1] -= 1
                each[2] += 1
            decodes = [each for each in decodes if each[1]]
            for prompt in done:
                prompts.remove(prompt)
                row = trace.rows[prompt[0]]
                found[prompt[0]] = now_s - row.arrival_s
                if row.output_tokens > 1:
                    decodes.append([prompt[0], row.output_tokens - 1, row.input_tokens])
        return found


@pytest.mark.parametrize("seed", range(5))
def test_many_steps_at_once_are_the_same_as_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    now_s, requests = 0.0, []
    for number in range(80):  # no two share a block: without hits the cache plays no part
        now_s += draw.expovariate(1 / 0.3)
        requests.append((now_s, range(1_000 * number, 1_000 * number + draw.randrange(1, 40))))
    trace = trace_of(requests, output_tokens=30)
    naive = sorted(OneStepAtATime(engine(batch_tokens=256)).first_tokens(trace))
    result = simulate(trace, SimSpec(engine(batch_tokens=256), 1))
    assert result.ttft_s["mean"] == pytest.approx(sum(naive) / len(naive), rel=0.01)
    assert result.ttft_s["p50"] == pytest.approx(naive[39], rel=0.01)
    assert result.ttft_s["p95"] == pytest.approx(naive[75], rel=0.01)


def test_a_prompt_longer_than_the_gpu_is_refused_and_counted() -> None:
    result = simulate(trace_of([(0.0, range(50)), (1.0, range(5))]), SimSpec(engine(gpu_blocks=20), 1))
    assert (result.requests, result.refused) == (1, 1)


def test_no_requests() -> None:
    compared = compare(trace_of([]), SimSpec(engine(), 1, (tier("memory", 10),)))
    assert compared.without.requests == 0
    assert compared.without.ttft_s == {}
    assert compared.ttft_ratio is None


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(SimError, match="leaves no room for its cache"):
        simulate(trace_of([(0.0, range(5))]), SimSpec(engine(gpu_blocks=0), 1))


def test_without_prefixes() -> None:
    trace = Trace(trace_of([(0.0, range(5))]).rows, None, 0, (), 0, ())
    with pytest.raises(SimError, match="no prefix information"):
        simulate(trace, SimSpec(engine(), 1))
