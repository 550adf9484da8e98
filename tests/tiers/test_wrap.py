"""Wrappers around a real tier: limits, faults, and the breaker that keeps a failing tier out of the way."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import pytest

from stepwell.tiers.base import Get, Put, Tier
from stepwell.tiers.guard import FAILURES_MOST, Guarded
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.wrap import Faulty, Pace, Throttled
from stepwell.types import ChunkId, Reason
from support.chunks import chunk_id, content

CHUNK_BYTES = 8192
T = TypeVar("T")


def with_memory(use: Callable[[MemoryTier], Awaitable[T]]) -> T:
    async def scenario() -> T:
        memory = MemoryTier(1 << 20)
        try:
            return await use(memory)
        finally:
            await memory.close()

    return asyncio.run(scenario())


async def put(tier: Tier, *numbers: int) -> list[Reason | None]:
    return await tier.put([Put(chunk_id(n), memoryview(content(chunk_id(n), CHUNK_BYTES))) for n in numbers])


async def get(tier: Tier, *numbers: int) -> list[Reason | None]:
    buffers = [bytearray(CHUNK_BYTES) for _ in numbers]
    outcomes = await tier.get(
        [Get(chunk_id(n), memoryview(b)) for n, b in zip(numbers, buffers, strict=True)]
    )
    for number, buffer, outcome in zip(numbers, buffers, outcomes, strict=True):
        assert outcome is not None or buffer == content(chunk_id(number), CHUNK_BYTES)
    return outcomes


def test_transfers_queue_on_one_link() -> None:
    now_s = 100.0
    pace = Pace(1_000, lambda: now_s)
    assert [pace.take(500), pace.take(500), pace.take(0)] == [0.5, 1.0, 1.0]
    now_s = 103.0
    assert pace.take(100) == pytest.approx(0.1)
    assert Pace(None, lambda: now_s).take(1 << 40) == 0.0


def test_a_throttled_tier_is_as_slow_as_asked_for_and_right() -> None:
    async def use(memory: MemoryTier) -> None:
        clock = asyncio.get_running_loop().time
        tier = Throttled(memory, read_bytes_per_s=1e6, write_bytes_per_s=2e6, read_latency_s=0.03)
        begun_s = clock()
        assert await put(tier, 1, 2) == [None, None]
        assert clock() - begun_s >= 2 * CHUNK_BYTES / 2e6
        begun_s = clock()
        assert await asyncio.gather(get(tier, 1), get(tier, 2)) == [[None], [None]]
        assert clock() - begun_s >= 2 * CHUNK_BYTES / 1e6 + 0.03

    with_memory(use)


def test_faults_are_drawn_from_the_seed() -> None:
    async def outcomes(memory: MemoryTier, seed: int) -> list[Reason | None]:
        tier = Faulty(memory, seed, fails=0.3, damages=0.3)
        return [(await get(tier, 1))[0] for _ in range(50)]

    async def use(memory: MemoryTier) -> None:
        await put(memory, 1)
        first = await outcomes(memory, 7)
        assert first == await outcomes(memory, 7) != await outcomes(memory, 8)
        assert set(first) == {None, Reason.OUT_OF_SERVICE, Reason.CORRUPT}

    with_memory(use)


class Gate(Faulty):
    """Holds every call until it is opened."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier, 0)
        self.open = asyncio.Event()
        self.calls = 0

    async def get(self, items: Sequence[Get]) -> list[Reason | None]:
        self.calls += 1
        await self.open.wait()
        return await super().get(items)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def guarded(tier: Tier, stall_s: float = 5.0) -> Guarded:
    return Guarded(tier, stall_s=stall_s, pause_first_s=0.01, pause_most_s=0.02)


def test_failures_in_a_row_take_it_out_of_service_and_it_comes_back_by_itself() -> None:
    async def use(memory: MemoryTier) -> None:
        faulty = Faulty(memory, 0)
        guard = guarded(faulty)
        await guard.start()
        assert guard.health == "ok"
        assert memory.usage().chunks == 0, "the trial chunk is gone"
        await put(guard, 1)
        faulty.fails = 1.0
        for number in range(FAILURES_MOST):
            assert guard.in_service, number
            assert await get(guard, 1) == [Reason.OUT_OF_SERVICE]
        assert not guard.in_service
        assert "reading failed 3 times in a row" in guard.health
        faulty.fails = 0.0
        assert await get(guard, 1) == [Reason.OUT_OF_SERVICE], "not asked before it was tried"
        await until(lambda: guard.in_service)
        assert await get(guard, 1) == [None]
        await guard.close()

    with_memory(use)


def test_a_failure_now_and_then_is_no_reason() -> None:
    async def use(memory: MemoryTier) -> None:
        faulty = Faulty(memory, 0)
        guard = guarded(faulty)
        await put(guard, 1)
        for _ in range(10):
            faulty.fails = 1.0
            await get(guard, 1)
            await get(guard, 1)
            faulty.fails = 0.0
            assert await get(guard, 1) == [None]
        assert guard.in_service

    with_memory(use)


def test_misses_and_a_full_tier_are_no_failures() -> None:
    async def use(memory: MemoryTier) -> None:
        guard = guarded(memory)
        for _ in range(10):
            await get(guard, 99)
            await put(guard, *range(200))
        assert guard.in_service

    with_memory(use)


def test_a_stall_takes_it_out_of_service_and_keeps_the_callers_buffer_until_it_lands() -> None:
    async def use(memory: MemoryTier) -> None:
        await put(memory, 1)
        gate = Gate(memory)
        guard = guarded(gate, stall_s=0.05)
        stalled = asyncio.ensure_future(get(guard, 1))
        await until(lambda: not guard.in_service)
        assert not stalled.done(), "its bytes may still land"
        assert await get(guard, 1) == [Reason.OUT_OF_SERVICE]
        assert gate.calls == 1, "nothing more is sent to a tier that hangs"
        gate.open.set()
        assert await stalled == [None]
        await until(lambda: guard.in_service)
        assert await get(guard, 1) == [None]

    with_memory(use)


def test_a_tier_that_does_not_work_at_the_start_is_tried_again() -> None:
    async def use(memory: MemoryTier) -> None:
        faulty = Faulty(memory, 0, fails=1.0)
        guard = guarded(faulty)
        await guard.start()
        assert "could not be written" in guard.health
        assert await put(guard, 1) == [Reason.OUT_OF_SERVICE]
        faulty.fails = 0.0
        await until(lambda: guard.in_service)
        assert await put(guard, 1) == [None]

    with_memory(use)


def test_a_tier_that_gives_back_other_bytes_at_the_start_is_out_of_service() -> None:
    class Liar(Faulty):
        async def get(self, items: Sequence[Get]) -> list[Reason | None]:
            for item in items:
                item.into[:] = bytes(item.into.nbytes)
            return [None] * len(items)

    async def use(memory: MemoryTier) -> None:
        guard = guarded(Liar(memory, 0))
        await guard.start()
        assert "could not be read (other bytes)" in guard.health
        await guard.close()

    with_memory(use)


def test_everything_else_passes_through() -> None:
    async def use(memory: MemoryTier) -> None:
        tier = guarded(Throttled(memory))
        chunks: list[ChunkId] = [chunk_id(1), chunk_id(2)]
        await put(tier, 1, 2)
        assert (tier.name, await tier.held(chunks), tier.usage()) == ("memory", 2, memory.usage())
        await tier.delete(chunks[:1])
        assert await tier.held(chunks) == 0

    with_memory(use)
