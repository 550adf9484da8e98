"""kill -9 while it writes, again and again in one folder: every chunk exact or a miss, nothing to repair."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from disk_kit import LIMIT_BYTES, folder_bytes, with_tier
from writer import CLEARED_SPACE, chunk_of, nbytes_of, space_of

from stepwell.tiers.base import Get
from stepwell.tiers.disk import DiskTier
from support.chunks import content

WRITER = Path(__file__).with_name("writer.py")
TESTS = Path(__file__).parents[2]
NUMBERS_A_CYCLE = 100_000
RESPITE_S = 0.02  # from its last word to its end, at most


@pytest.mark.parametrize("seed", range(4))
def test_five_kills(tmp_path: Path, seed: int) -> None:
    cycle_kills(tmp_path, 5, seed)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_hundred_kills(tmp_path: Path) -> None:
    cycle_kills(tmp_path, 200, seed=1000)


def cycle_kills(folder: Path, cycles: int, seed: int) -> None:
    chance = random.Random(seed)
    cleared_below = 0
    all_begun: list[int] = []

    async def exactly_held(tier: DiskTier) -> list[int]:
        held = [number for number in all_begun if await is_right(tier, number)]
        assert tier.usage().chunks == len(held), "nothing else is held"
        assert tier.file_bytes == folder_bytes(folder)
        return held

    for cycle in range(cycles):
        begun, cleared = written_and_killed(folder, cycle, chance)
        all_begun += begun
        cleared_below = max(cleared_below, cleared)
        names = sorted(path.name for path in folder.iterdir())
        assert all(re.fullmatch(r"lock|segment-\d{8}", name) for name in names), names
        assert folder_bytes(folder) <= LIMIT_BYTES
        held = with_tier(folder, exactly_held, close=chance.random() < 0.5)
        again = with_tier(folder, exactly_held, close=False)
        assert again == held, "a start after a start finds the same"
        all_begun[:] = held
        assert set(held) & set(begun), "something of what was written lately is found"
        assert [n for n in held if space_of(n) == CLEARED_SPACE and n < cleared_below] == []


def written_and_killed(folder: Path, cycle: int, chance: random.Random) -> tuple[list[int], int]:
    """The chunks that its killed writer had begun, and below which number it had cleared its space."""
    seed = str(chance.random())
    begin = cycle * NUMBERS_A_CYCLE
    command = [sys.executable, str(WRITER), str(folder), str(LIMIT_BYTES), str(begin), seed]
    environ = {"PYTHONPATH": ":".join([str(TESTS), *sys.path])}
    begun: list[int] = []
    cleared = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as writer:
        assert writer.stdout is not None
        try:
            for _ in range(chance.randint(5, 60)):
                what, *numbers = writer.stdout.readline().split()
                if what == "put":
                    begun += map(int, numbers)
                else:
                    cleared = int(numbers[0])
            with pytest.raises(subprocess.TimeoutExpired):
                writer.wait(chance.random() * RESPITE_S)
        finally:
            writer.kill()
        for line in writer.stdout:  # what it said meanwhile
            what, *numbers = line.split()
            if what == "put":
                begun += map(int, numbers)
            else:
                cleared = int(numbers[0])
    return begun, cleared


async def is_right(tier: DiskTier, number: int) -> bool:
    """Whether it is held. One that is held and comes with other bytes fails the test."""
    into = memoryview(bytearray(nbytes_of(number)))
    (why,) = await tier.get([Get(chunk_of(number), into)])
    assert why is not None or bytes(into) == content(chunk_of(number), nbytes_of(number))
    return why is None
