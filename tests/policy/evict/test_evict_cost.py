"""What a call costs does not grow with what is held, and nothing is left behind.

Work is counted in executed lines of Python where that says it all: unlike time, it is exact.
"""

import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from stepwell.policy.evict import make_evictor
from stepwell.policy.index import Index

POLICIES = ("lru", "fifo", "s3fifo")
MANY = 100_000
SHAPES = {"single chunks": 1, "runs of 64": 64, "one chain": MANY}


def chunk_id(number: int) -> bytes:
    return number.to_bytes(36, "big")


def filled(policy: str, chunks: int, run_chunks: int = 1) -> Index:
    index = Index(make_evictor(policy))
    for number in range(chunks):
        index.insert(chunk_id(number), chunk_id(number - 1) if number % run_chunks else None, number)
    return index


def lines_executed(work: Callable[[], object]) -> int:
    lines = 0

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_eviction_from_a_full_tier_is_no_dearer(policy: str, shape: str) -> None:
    small, large = filled(policy, 1_000, SHAPES[shape]), filled(policy, MANY, SHAPES[shape])
    assert lines_executed(large.evict) <= lines_executed(small.evict) + 10


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_eviction_after_everything_was_used_is_no_dearer(policy: str) -> None:
    # S3-FIFO cannot pass this: each use may buy its chunk one more round through the queue.
    index = filled(policy, MANY)
    fresh = lines_executed(index.evict)
    for number in range(1, MANY - 1):
        index.use([chunk_id(number)])
    assert lines_executed(index.evict) <= fresh + 10


@pytest.mark.parametrize("policy", POLICIES)
def test_pinned_chunks_are_passed_over_once(policy: str) -> None:
    index = filled(policy, 10_000)
    for number in range(9_000):
        entry = index.get(chunk_id(number))
        assert entry is not None
        index.pin(entry)
    index.evict()
    later = lines_executed(lambda: [index.evict() for _ in range(500)])
    assert later / 500 < 60


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_is_evicted_from_its_end_and_removed_without_recursion(policy: str) -> None:
    index = filled(policy, MANY, MANY)
    places = [entry.place for _ in range(MANY // 2) if (entry := index.evict())]
    assert places == list(range(MANY - 1, MANY // 2 - 1, -1))
    removed = index.remove(chunk_id(0))
    assert [entry.place for entry in removed] == list(range(MANY // 2 - 1, -1, -1))
    assert len(index) == 0
    del removed  # a chain of references as long: it must not exhaust the stack either


def test_lru_marks_one_chunk_however_long_the_run() -> None:
    def lines(chunks: int) -> int:
        index = filled("lru", chunks, chunks)
        run = [chunk_id(number) for number in range(chunks)]
        return lines_executed(lambda: index.use(run))

    assert lines(8_192) == lines(2)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("run_chunks", [1, 64])
def test_time_of_an_eviction_and_an_insert_is_flat(policy: str, run_chunks: int) -> None:
    # Time, because work inside C code executes no line. Were it in proportion, this would be 100.
    def seconds(chunks: int) -> float:
        index = filled(policy, chunks, run_chunks)
        number = chunks
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(1_000):
                index.evict()
                index.insert(chunk_id(number), None, number)
                number += 1
            best = min(best, time.perf_counter() - start)
        return best

    gc.disable()  # a collection walks all that is held: not ours to measure
    try:
        assert seconds(MANY) < 20 * seconds(1_000)
    finally:
        gc.enable()


@pytest.mark.parametrize("policy", POLICIES)
def test_time_of_an_eviction_does_not_grow_while_a_tier_empties(policy: str) -> None:
    # A plain dict as a queue fails here: it steps over every key that left, at its old end.
    index = filled(policy, MANY)

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(500):
            index.evict()
        return time.perf_counter() - start

    gc.disable()
    try:
        batches = [seconds() for _ in range(MANY // 500 - 1)]
    finally:
        gc.enable()
    assert min(batches[-10:]) < 10 * min(batches[:10])


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_flat_over_many_cycles(policy: str) -> None:
    """Parents that lose and gain a child come back to their place each time, and nothing is evicted."""
    index = filled(policy, 100)

    def cycle(times: int) -> None:
        for number in range(times):
            parent = chunk_id(number % 50)
            entry = index.insert(parent + b"child", parent, 0)
            index.use([parent])
            index.pin(entry)
            index.remove(entry.chunk)
            index.unpin(entry)

    cycle(2_000)
    tracemalloc.start()
    try:
        cycle(1_000)
        before, _ = tracemalloc.get_traced_memory()
        cycle(10_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 50_000
    assert len(index) == 100


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_flat_over_many_evictions(policy: str) -> None:
    index = filled(policy, 200, 8)
    number = 200

    def cycle(times: int) -> None:
        nonlocal number
        for _ in range(times):
            index.evict()
            index.insert(chunk_id(number), None, 0)
            index.use([chunk_id(number)])
            number += 1

    cycle(2_000)
    tracemalloc.start()
    try:
        cycle(1_000)
        before, _ = tracemalloc.get_traced_memory()
        cycle(10_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 50_000
