"""A live cache and its replay decide the same, request for request: they are one code."""

import random
from collections.abc import Sequence

import pytest

import stepwell
from stepwell.replay.hits import policy_hits
from stepwell.replay.traces.prefixes import Prefixes
from stepwell.replay.traces.row import Row, Trace

CHUNK_BYTES = 4096
CHUNK_TOKENS = 16


def workload(seed: int) -> list[list[int]]:
    """Prompts as token ids: conversations that grow, over shared heads."""
    draw = random.Random(seed)
    heads = [[head] * 2 * CHUNK_TOKENS for head in range(3)]
    open_prompts = [draw.choice(heads) for _ in range(8)]
    prompts = []
    for _ in range(400):
        turn = draw.randrange(8)
        if draw.random() < 0.2:
            open_prompts[turn] = draw.choice(heads)
        open_prompts[turn] = [
            *open_prompts[turn],
            *(draw.randrange(9) for _ in range(CHUNK_TOKENS * draw.randrange(1, 4))),
        ]
        prompts.append(open_prompts[turn])
    return prompts


def live_hits(prompts: Sequence[Sequence[int]], eviction: str, capacity: int) -> list[int]:
    """What a running cache hits: each request looks up, loads what is held, and stores the rest."""
    hits = []
    with stepwell.open(memory=capacity * CHUNK_BYTES, eviction=eviction) as cache:
        space = cache.space("a model", CHUNK_TOKENS, CHUNK_BYTES)
        for prompt in prompts:
            keys = space.keys(prompt)
            with space.load(keys, timeout_s=1.0) as lease:
                hits.append(lease.chunks)
                with space.reserve(keys) as new:
                    for view in new.values():
                        view[:1] = b"x"
    return hits


@pytest.mark.parametrize("eviction", ["lru", "fifo", "s3fifo"])
@pytest.mark.parametrize("capacity", [20, 60])
def test_a_live_cache_and_its_replay(eviction: str, capacity: int) -> None:
    prompts = workload(seed=capacity)
    prefixes = Prefixes()
    rows = []
    for number, prompt in enumerate(prompts):
        ids = [hash(tuple(prompt[at : at + CHUNK_TOKENS])) for at in range(0, len(prompt), CHUNK_TOKENS)]
        rows.append(Row(float(number), len(prompt), 1, number, prefixes.path("", ids)))
    trace = Trace(tuple(rows), CHUNK_TOKENS, len(prefixes), (), 0, ())
    replayed = policy_hits(trace, eviction, capacity)
    assert live_hits(prompts, eviction, capacity) == replayed
    assert 0 < sum(replayed) < trace.asked_blocks - trace.blocks  # evictions mattered
