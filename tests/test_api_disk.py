"""The public interface with a disk below memory."""

from pathlib import Path

import pytest

import stepwell
from stepwell.api import Cache, Space
from stepwell.tiers.disk import FolderInUse
from stepwell.types import Hit, Key
from support.chunks import content

CHUNK_BYTES = 64 << 10
CHUNKS = 8


def opened(folder: Path) -> Cache:
    return stepwell.open(memory="1MiB", disk=folder, disk_size="16MiB")


def space_of(cache: Cache) -> Space:
    return cache.space("model", chunk_tokens=16, chunk_bytes=CHUNK_BYTES)


def fill(space: Space, keys: list[Key]) -> None:
    with space.reserve(keys) as new:
        for key, view in new.items():
            view[:] = content(key, CHUNK_BYTES)


def right(space: Space, keys: list[Key], timeout_s: float) -> int:
    """How many leading chunks come in time; a wrong byte fails the test."""
    with space.load(keys, timeout_s=timeout_s) as lease:
        for key, view in zip(keys, lease.views, strict=False):
            assert bytes(view) == content(key, CHUNK_BYTES)
        return lease.chunks


def test_what_was_flushed_is_there_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        space = space_of(cache)
        keys = space.keys(range(16 * CHUNKS))
        fill(space, keys)
        assert cache.flush() is True
        assert cache.stats()["tiers"]["disk"]["stored_chunks"] == CHUNKS
        assert space.lookup(keys) == Hit(CHUNKS, ("memory",) * CHUNKS)
    with opened(tmp_path) as cache:
        space = space_of(cache)
        assert right(space, keys, timeout_s=20.0) == CHUNKS
        assert space.lookup(keys) == Hit(CHUNKS, ("memory",) * CHUNKS)
        assert cache.clear() == CHUNKS
        assert space.lookup(keys).chunks == 0


def test_a_lookup_says_which_tier_has_what(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        space = space_of(cache)
        prompts = [space.keys([number] * 16 * CHUNKS) for number in range(3)]  # more than memory holds
        for keys in prompts:
            fill(space, keys)
            assert cache.flush()
        tiers = space.lookup(prompts[0]).tiers
        assert len(tiers) == CHUNKS
        assert tiers == tuple(sorted(tiers, reverse=True)), "memory first: leaves are evicted first"
        assert "disk" in tiers
        assert space.fetch(prompts[2][0]) == content(prompts[2][0], CHUNK_BYTES)


def test_without_time_only_what_lies_in_memory_is_loaded_and_the_rest_comes_up(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        space = space_of(cache)
        keys = space.keys(range(16 * CHUNKS))
        fill(space, keys)
        cache.flush()
    with opened(tmp_path) as cache:
        space = space_of(cache)
        while space.lookup(keys).chunks < CHUNKS:
            pass  # its catalogue is read in the background
        assert right(space, keys, timeout_s=0.0) == 0
        assert right(space, keys, timeout_s=20.0) == CHUNKS
        assert cache.stats()["leases"] == 0
        assert cache.stats()["tiers"]["disk"]["loaded_chunks"] == CHUNKS, "read once"


def test_a_folder_in_use_is_refused_and_nothing_is_left_open(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(FolderInUse):
        opened(tmp_path)
    with opened(tmp_path) as cache:
        assert cache.connected
