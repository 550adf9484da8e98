"""What the disk tier's tests share: chunks whose bytes derive from their ids, and a look into the folder."""

import asyncio
import contextlib
import resource
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from stepwell.tiers.base import Get, Put
from stepwell.tiers.disk import DiskTier
from stepwell.types import ChunkId, Reason
from support.chunks import chunk_id, content

T = TypeVar("T")
CHUNK_BYTES = 10_000
LIMIT_BYTES = 1 << 20


def with_tier(
    folder: Path,
    use: Callable[[DiskTier], Awaitable[T]],
    limit_bytes: int = LIMIT_BYTES,
    *,
    close: bool = True,
) -> T:
    """Open, scan, use and close a tier in an event loop of its own. `close=False`: as after kill -9."""

    async def scenario() -> T:
        tier = DiskTier(folder, limit_bytes)
        try:
            await tier.scan()
            return await use(tier)
        finally:
            if close:
                await tier.close()
            else:
                abandon(tier)

    return asyncio.run(scenario())


def abandon(tier: DiskTier) -> None:
    """What the kernel does for a process that was killed: descriptors close, nothing else happens."""
    tier._let_go()


async def store(tier: DiskTier, numbers: Iterable[int], nbytes: int = CHUNK_BYTES) -> list[Reason | None]:
    chunks = [chunk_id(number) for number in numbers]
    return await tier.put([Put(chunk, memoryview(content(chunk, nbytes))) for chunk in chunks])


async def fetch(tier: DiskTier, chunk: ChunkId, nbytes: int = CHUNK_BYTES) -> Reason | None:
    """None when every byte is right; other bytes than the chunk's fail the test."""
    into = bytearray(nbytes)
    (why,) = await tier.get([Get(chunk, memoryview(into))])
    if why is None:
        assert bytes(into) == content(chunk, nbytes), "wrong bytes were served"
    return why


async def right(tier: DiskTier, numbers: Iterable[int], nbytes: int = CHUNK_BYTES) -> list[int]:
    """Those of the numbers whose chunk is held and comes back right; the others are misses."""
    return [number for number in numbers if await fetch(tier, chunk_id(number), nbytes) is None]


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


@contextlib.contextmanager
def limit(kind: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
