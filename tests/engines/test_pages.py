"""Pages of host memory to the arena and back."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stepwell.engines.pages import HostCopier
from stepwell.tiers.arena import ArenaMap, create_arena


@pytest.fixture
def arena() -> Iterator[ArenaMap]:
    fd, arena = create_arena(1 << 20)
    yield arena
    arena.close()
    os.close(fd)


def random_pages(*shape: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def test_there_and_back_in_another_order(arena: ArenaMap) -> None:
    source = [random_pages(6, 96), random_pages(6, 32)]
    target = [np.zeros((9, 96), np.uint8), np.zeros((9, 32), np.uint8)]
    copier = HostCopier(source)
    assert copier.block_bytes == 128
    assert copier.store(arena, [4096, 0, 8192], [5, 1, 3]) == copier.finished() == 1
    reader = HostCopier(target)
    assert reader.load(arena, [8192, 4096, 0], [2, 8, 4]) == reader.finished() == 1
    for before, after in zip(source, target, strict=True):
        assert np.array_equal(after[[2, 8, 4]], before[[3, 5, 1]])
        assert not after[[0, 1, 3, 5, 6, 7]].any()
    # A block is its layers' pages, one after the other, and nothing beside them is touched.
    memory = np.frombuffer(arena.buffer, np.uint8)
    assert np.array_equal(memory[4096:4224], np.concatenate([source[0][5], source[1][5]]))
    assert not memory[4224:8192].any()
