"""What the memory tier has beyond the contract: slots that others fill and read in place."""

import asyncio
import os
from collections.abc import Iterator

import pytest

from stepwell.tiers.base import Put, TierUsage
from stepwell.tiers.memory import MemoryTier, Slot
from stepwell.types import Reason
from support.chunks import chunk_id, content

PAGE = 4096


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    tier = MemoryTier(4 * PAGE)
    yield tier
    asyncio.run(tier.close())


def test_a_reserved_slot_takes_room_and_is_not_found(tier: MemoryTier) -> None:
    slot = tier.reserve(PAGE)
    assert slot is not None
    assert tier.usage() == TierUsage(0, PAGE, 4 * PAGE)
    assert asyncio.run(tier.held([chunk_id(1)])) == 0
    tier.view(slot)[:] = content(chunk_id(1), PAGE)
    tier.publish(chunk_id(1), slot)
    assert tier.usage() == TierUsage(1, PAGE, 4 * PAGE)
    assert asyncio.run(tier.held([chunk_id(1)])) == 1


def test_a_taken_chunk_is_not_found_and_keeps_its_bytes_until_it_is_freed(tier: MemoryTier) -> None:
    data = content(chunk_id(1), PAGE)
    asyncio.run(tier.put([Put(chunk_id(1), memoryview(data))]))
    slot = tier.take(chunk_id(1))
    others = [Put(chunk_id(n), memoryview(content(chunk_id(n), PAGE))) for n in range(2, 6)]
    assert asyncio.run(tier.put(others)) == [None, None, None, Reason.NO_ROOM]
    assert bytes(tier.view(slot)) == data
    tier.free(slot)
    assert tier.usage() == TierUsage(3, 3 * PAGE, 4 * PAGE)


def test_wrong_calls_are_refused(tier: MemoryTier) -> None:
    slot = tier.reserve(PAGE)
    assert slot is not None
    tier.publish(chunk_id(1), slot)
    with pytest.raises(ValueError, match="is held already"):
        tier.publish(chunk_id(1), slot)
    with pytest.raises(KeyError):
        tier.take(chunk_id(2))
    tier.free(tier.take(chunk_id(1)))
    with pytest.raises(ValueError, match="freed twice"):
        tier.free(slot)


def test_slots_never_overlap_and_fill_the_arena_to_the_last_byte(tier: MemoryTier) -> None:
    slots = [tier.reserve(PAGE) for _ in range(5)]
    assert slots[4] is None
    filled = [slot for slot in slots if slot is not None]
    for number, slot in enumerate(filled):
        tier.view(slot)[:] = bytes([number]) * PAGE
    assert [set(tier.view(slot)) for slot in filled] == [{0}, {1}, {2}, {3}]
    assert sorted(slot.offset for slot in filled) == [0, PAGE, 2 * PAGE, 3 * PAGE]


def test_the_descriptor_is_the_arena_and_is_closed_with_it() -> None:
    tier = MemoryTier(4 * PAGE)
    tier.view(Slot(PAGE, 5))[:] = b"hello"
    assert os.pread(tier.fd, 5, PAGE) == b"hello"
    assert os.fstat(tier.fd).st_size == 4 * PAGE
    fd = tier.fd
    asyncio.run(tier.close())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
