"""Cross-cutting concerns as wrappers around any tier: limits for a shared drive, faults for tests."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from stepwell.tiers.base import Get, Put, Tier, TierUsage
from stepwell.types import ChunkId, Reason

T = TypeVar("T")


class Wrapper:
    """A tier that passes everything on."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    @property
    def name(self) -> str:
        return self._tier.name

    async def held(self, chunks: Sequence[ChunkId]) -> int:
        return await self._tier.held(chunks)

    async def put(self, items: Sequence[Put]) -> list[Reason | None]:
        return await self._tier.put(items)

    async def get(self, items: Sequence[Get]) -> list[Reason | None]:
        return await self._tier.get(items)

    async def delete(self, chunks: Sequence[ChunkId]) -> None:
        await self._tier.delete(chunks)

    def usage(self) -> TierUsage:
        return self._tier.usage()

    async def close(self) -> None:
        await self._tier.close()


class Pace:
    """Turns on one link of `bytes_per_s` bytes a second: who comes later waits longer."""

    def __init__(self, bytes_per_s: float | None, clock: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at_s = clock()

    def take(self, nbytes: int) -> float:
        """Seconds until a transfer of `nbytes` that begins now, or when the link is free, has passed."""
        if self._bytes_per_s is None:
            return 0.0
        now_s = self._clock()
        self._free_at_s = max(now_s, self._free_at_s) + nbytes / self._bytes_per_s
        return self._free_at_s - now_s


class Throttled(Wrapper):
    """Reads and writes at most so many bytes a second, and no read sooner than its latency.

    What the tier below takes itself runs beside the wait, so a throttled tier is exactly as slow as asked
    for, as long as the tier below is faster.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        read_bytes_per_s: float | None = None,
        write_bytes_per_s: float | None = None,
        read_latency_s: float = 0.0,
    ) -> None:
        """Needs a running event loop."""
        super().__init__(tier)
        clock = asyncio.get_running_loop().time
        self._reads = Pace(read_bytes_per_s, clock)
        self._writes = Pace(write_bytes_per_s, clock)
        self._read_latency_s = read_latency_s

    async def put(self, items: Sequence[Put]) -> list[Reason | None]:
        wait_s = self._writes.take(sum(item.data.nbytes for item in items))
        return await _at_least(wait_s, self._tier.put(items))

    async def get(self, items: Sequence[Get]) -> list[Reason | None]:
        wait_s = self._reads.take(sum(item.into.nbytes for item in items)) + self._read_latency_s
        return await _at_least(wait_s, self._tier.get(items))


async def _at_least(wait_s: float, work: Awaitable[T]) -> T:
    if wait_s <= 0:
        return await work
    result, _ = await asyncio.gather(work, asyncio.sleep(wait_s))
    return result


class Faulty(Wrapper):
    """Fails, stalls or damages a share of the calls, as drawn from `seed`: for tests and trials."""

    def __init__(
        self,
        tier: Tier,
        seed: int,
        *,
        fails: float = 0.0,
        damages: float = 0.0,
        stalls: float = 0.0,
        stall_s: float = 0.0,
    ) -> None:
        """`fails`, `damages` and `stalls` are probabilities, each of a call."""
        super().__init__(tier)
        self._random = random.Random(seed)
        self.fails = fails
        self.damages = damages
        self.stalls = stalls
        self.stall_s = stall_s

    async def put(self, items: Sequence[Put]) -> list[Reason | None]:
        await self._stall()
        if self._random.random() < self.fails:
            return [Reason.OUT_OF_SERVICE] * len(items)
        return await self._tier.put(items)

    async def get(self, items: Sequence[Get]) -> list[Reason | None]:
        await self._stall()
        if self._random.random() < self.fails:
            return [Reason.OUT_OF_SERVICE] * len(items)
        if self._random.random() < self.damages:
            for item in items:
                item.into.cast("B")[:1] = b"\xee"
            return [Reason.CORRUPT] * len(items)
        return await self._tier.get(items)

    async def _stall(self) -> None:
        if self._random.random() < self.stalls:
            await asyncio.sleep(self.stall_s)
