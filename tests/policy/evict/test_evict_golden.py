"""Exact miss counts: a changed decision of a policy shows here, even where it is as good as before."""

import json
import os
from pathlib import Path

import pytest
from naive import NAIVE, run_to
from replaying import missed_chunks

TRACES = Path(os.environ.get("STEPWELL_TRACES", Path(__file__).parents[4] / "shared" / "traces"))
CONVERSATION = TRACES / "mooncake_conversation.jsonl"


def synthetic_requests() -> list[list[bytes]]:
    """800 requests of 5 to 12 chunks: a head that some share, a body of few choices, a tail of many."""
    state = 12345
    requests = []
    for _ in range(800):
        path = b""
        state = state * 1103515245 + 12345 & 0x7FFFFFFF  # the example generator of the C standard
        length = 5 + (state >> 16) % 8
        for depth in range(length):
            state = state * 1103515245 + 12345 & 0x7FFFFFFF
            choices = (6, 1, 3, 1, 2, 4, 1, 9)[depth % 8]
            # The lower of two draws: the first choices are popular.
            path += bytes([min((state >> 16) % choices, (state >> 22) % choices)])
        requests.append(run_to(path))
    return requests


GOLDEN = {
    ("lru", 100): 3_382,
    ("lru", 400): 1_933,
    ("fifo", 100): 3_413,
    ("fifo", 400): 1_977,
    ("s3fifo", 100): 2_620,
    ("s3fifo", 400): 1_800,
}


@pytest.mark.parametrize(("policy", "capacity"), GOLDEN)
def test_synthetic(policy: str, capacity: int) -> None:
    assert missed_chunks(policy, capacity, synthetic_requests()) == GOLDEN[policy, capacity]


@pytest.mark.parametrize(("policy", "capacity"), GOLDEN)
def test_synthetic_golden_counts_are_the_naive_ones(policy: str, capacity: int) -> None:
    naive = NAIVE[policy]()
    held: set[bytes] = set()
    missed = 0
    for run in synthetic_requests():
        hits = sum(chunk in held for chunk in run)
        missed += len(run) - hits
        naive.use(run[:hits])
        last = run[hits - 1] if hits else None
        for chunk in run[hits:]:
            if len(held) == capacity:
                parents = {other[:-1] for other in held}
                victim = naive.victim(lambda c, parents=parents, last=last: c not in parents and c != last)
                if victim is None:
                    break
                naive.remove(victim)
                held.remove(victim)
            naive.insert(run_to(chunk))
            held.add(chunk)
            last = chunk
    assert missed == GOLDEN[policy, capacity]


def test_a_larger_lru_never_misses_more() -> None:
    requests = synthetic_requests()
    missed = [
        missed_chunks("lru", capacity, requests) for capacity in (12, 25, 50, 100, 200, 400, 800, 10**6)
    ]
    assert missed == sorted(missed, reverse=True)
    assert missed[-1] == len({chunk for run in requests for chunk in run})


@pytest.fixture(scope="module")
def conversation() -> list[list[bytes]]:
    if not CONVERSATION.exists():
        pytest.skip(f"no {CONVERSATION}: set STEPWELL_TRACES to the folder of the Mooncake traces (FAST'25)")
    with CONVERSATION.open() as lines:
        return [[block.to_bytes(4, "big") for block in json.loads(line)["hash_ids"]] for line in lines]


# Of 288,500 blocks of 512 tokens; no cache, however large, hits more than 36.64% of them. LRU: 13.70%
# at 5,900 blocks and 28.78% at 20,000. A FIFO without a tree is at 12.5% and 25.8%: leaves first helps it.
@pytest.mark.parametrize(
    ("policy", "capacity", "hits"),
    [
        ("lru", 5_900, 39_520),
        ("lru", 20_000, 83_035),
        ("fifo", 5_900, 39_554),
        ("fifo", 20_000, 83_043),
        ("s3fifo", 5_900, 39_134),
        ("s3fifo", 20_000, 74_101),
    ],
)
def test_conversation_trace(conversation: list[list[bytes]], policy: str, capacity: int, hits: int) -> None:
    blocks = sum(map(len, conversation))
    assert blocks == 288_500
    assert blocks - missed_chunks(policy, capacity, conversation) == hits
