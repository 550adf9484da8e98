"""A process that writes to a disk tier until it is killed: `python writer.py FOLDER LIMIT_BYTES FIRST SEED`.

It says what it is about to do, and what is done:
    put N …      these chunks are being written     cleared N    no chunk of space 1 below N is held any more
"""

import asyncio
import random
import sys
from pathlib import Path

from stepwell.tiers.base import Put
from stepwell.tiers.disk import DiskTier
from stepwell.types import Reason
from support.chunks import chunk_id, content

SPACES = 2
CLEARED_SPACE = 1


def nbytes_of(number: int) -> int:
    """Every size from one byte to three blocks and a bit, told by the chunk's number."""
    return 1 + number * 7919 % 13_000


def space_of(number: int) -> int:
    return number % SPACES


def chunk_of(number: int) -> bytes:
    return chunk_id(number, space_of(number))


def say(text: str) -> None:
    print(text, flush=True)


async def write(folder: Path, limit_bytes: int, number: int, chance: random.Random) -> None:
    tier = DiskTier(folder, limit_bytes)
    await tier.scan()
    while True:
        batch = range(number, number + chance.randint(1, 12))
        number = batch.stop
        say(f"put {' '.join(map(str, batch))}")
        items = [Put(chunk_of(n), memoryview(content(chunk_of(n), nbytes_of(n)))) for n in batch]
        while Reason.NO_ROOM in await tier.put(items):
            oldest = [kept.chunk for kept in tier.oldest()]
            await tier.reclaim(chance.sample(oldest, len(oldest) // 3))
        if chance.random() < 0.1:
            await tier.clear(chunk_of(CLEARED_SPACE)[:16])
            say(f"cleared {number}")


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), random.Random(sys.argv[4])))
