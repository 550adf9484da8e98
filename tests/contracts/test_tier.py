"""One suite over every tier: what base.py promises. A new tier adds one entry to `TIERS`.

Bytes derive from the chunk's id, so that any wrong one shows.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from stepwell.tiers.base import Get, Put, Tier, TierUsage
from stepwell.tiers.disk import DiskTier
from stepwell.tiers.memory import MemoryTier
from stepwell.types import Reason
from support.chunks import chunk_id, content

CHUNK_BYTES = 10_000
T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """A tier under test, and what is its own to choose."""

    name: str
    make: Callable[[Path], Tier]  # in an empty folder
    limit_bytes: int
    chunks_most: int  # of CHUNK_BYTES, that it has room for
    used_bytes: int  # for each of them
    frees_at_once: bool  # what is deleted makes room at once


TIERS = [
    Kind("memory", lambda _: MemoryTier(8 * 12_288), 8 * 12_288, 8, 12_288, True),
    # 16 segments of 64 KiB, one kept free; in each a header, three records, room for a table.
    Kind("disk", lambda folder: DiskTier(folder, 1 << 20), 1 << 20, 45, 16_384, False),
]


def wait(answer: Awaitable[T]) -> T:
    async def await_it() -> T:
        return await answer

    return asyncio.run(await_it())


@pytest.fixture(params=TIERS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def tier(kind: Kind, tmp_path: Path) -> Iterator[Tier]:
    tier = kind.make(tmp_path)
    yield tier
    wait(tier.close())


def put(tier: Tier, *numbers: int, nbytes: int = CHUNK_BYTES) -> list[Reason | None]:
    return wait(tier.put([Put(chunk_id(n), memoryview(content(chunk_id(n), nbytes))) for n in numbers]))


def get(tier: Tier, *numbers: int, nbytes: int = CHUNK_BYTES) -> list[bytes | Reason]:
    """What came, checked: never other bytes than the chunk's."""
    buffers = [bytearray(nbytes) for _ in numbers]
    items = [Get(chunk_id(n), memoryview(buffer)) for n, buffer in zip(numbers, buffers, strict=True)]
    outcomes = wait(tier.get(items))
    assert len(outcomes) == len(items)
    return [bytes(b) if outcome is None else outcome for outcome, b in zip(outcomes, buffers, strict=True)]


def right(*numbers: int) -> list[bytes]:
    return [content(chunk_id(n), CHUNK_BYTES) for n in numbers]


def held(tier: Tier, *numbers: int) -> int:
    return wait(tier.held([chunk_id(n) for n in numbers]))


def test_an_empty_tier(tier: Tier, kind: Kind) -> None:
    assert tier.usage() == TierUsage(0, 0, kind.limit_bytes)
    assert held(tier, 1, 2) == 0
    assert get(tier, 1) == [Reason.NOT_HELD]
    wait(tier.delete([chunk_id(1)]))
    assert (wait(tier.put([])), wait(tier.get([])), wait(tier.held([]))) == ([], [], 0)


def test_what_is_put_can_be_got(tier: Tier) -> None:
    assert put(tier, 1, 2, 3) == [None] * 3
    assert get(tier, 3, 1, 2) == right(3, 1, 2)
    assert get(tier, 1) == right(1), "more than once"
    assert tier.usage().chunks == 3
    assert 3 * CHUNK_BYTES <= tier.usage().used_bytes <= tier.usage().limit_bytes


def test_a_batch_has_one_outcome_an_item_in_order(tier: Tier) -> None:
    put(tier, 1, 3)
    assert get(tier, 1, 2, 3, 4, 1) == [*right(1), Reason.NOT_HELD, *right(3), Reason.NOT_HELD, *right(1)]


def test_held_counts_leading_chunks_only(tier: Tier) -> None:
    put(tier, 1, 2, 4)
    assert [held(tier, 1, 2, 3, 4), held(tier, 3, 4), held(tier, 4), held(tier, 2, 1)] == [2, 0, 1, 2]


def test_a_chunk_put_twice_stays_as_it_is(tier: Tier) -> None:
    put(tier, 1)
    before = tier.usage()
    other = memoryview(bytes(CHUNK_BYTES))
    assert wait(tier.put([Put(chunk_id(1), other), Put(chunk_id(1), other)])) == [None, None]
    assert get(tier, 1) == right(1)
    assert tier.usage() == before


def test_the_same_chunk_twice_in_one_batch_is_stored_once(tier: Tier) -> None:
    assert put(tier, 1, 1) == [None, None]
    assert tier.usage().chunks == 1


def test_the_same_chunk_twice_in_one_batch_has_one_outcome(tier: Tier, kind: Kind) -> None:
    put(tier, *range(kind.chunks_most))
    assert put(tier, 100, 100) == [Reason.NO_ROOM] * 2


def test_the_bytes_are_taken_when_put_returns(tier: Tier) -> None:
    data = bytearray(content(chunk_id(1), CHUNK_BYTES))
    wait(tier.put([Put(chunk_id(1), memoryview(data))]))
    data[:] = bytes(CHUNK_BYTES)
    assert get(tier, 1) == right(1)


@pytest.mark.parametrize("nbytes", [1, CHUNK_BYTES - 1, CHUNK_BYTES + 1])
def test_a_buffer_of_another_size_gets_nothing(tier: Tier, nbytes: int) -> None:
    put(tier, 1)
    assert get(tier, 1, nbytes=nbytes) == [Reason.CORRUPT]
    assert get(tier, 1) == right(1)


def test_chunks_of_several_sizes(tier: Tier) -> None:
    for number, nbytes in enumerate((1, 4095, 4096, 4097, 20_000)):
        assert put(tier, number, nbytes=nbytes) == [None]
        assert get(tier, number, nbytes=nbytes) == [content(chunk_id(number), nbytes)]
    assert tier.usage().chunks == 5


def test_views_of_any_format_count_in_bytes(tier: Tier) -> None:
    data = memoryview(bytearray(content(chunk_id(1), 8_000))).cast("H")
    assert wait(tier.put([Put(chunk_id(1), data)])) == [None]
    into = memoryview(bytearray(8_000)).cast("I")
    assert wait(tier.get([Get(chunk_id(1), into)])) == [None]
    assert bytes(into) == content(chunk_id(1), 8_000)


def test_a_full_tier_says_so_and_keeps_what_it_has(tier: Tier, kind: Kind) -> None:
    most = kind.chunks_most
    outcomes = put(tier, *range(most + 2))
    assert outcomes == [None] * most + [Reason.NO_ROOM] * 2
    usage = tier.usage()
    assert usage.chunks == most
    assert usage.used_bytes <= usage.limit_bytes
    assert get(tier, *range(most)) == right(*range(most))
    assert put(tier, 0) == [None], "it is there"
    wait(tier.delete([chunk_id(3)]))
    assert put(tier, most + 2) == [None if kind.frees_at_once else Reason.NO_ROOM]


def test_a_chunk_larger_than_the_tier_has_no_room(tier: Tier, kind: Kind) -> None:
    put(tier, 1)
    assert put(tier, 2, nbytes=kind.limit_bytes + 1) == [Reason.NO_ROOM]
    assert get(tier, 1) == right(1)


def test_what_is_deleted_is_gone(tier: Tier, kind: Kind) -> None:
    put(tier, *range(8))
    wait(tier.delete([chunk_id(1), chunk_id(99), chunk_id(2), chunk_id(1)]))
    assert (held(tier, 0, 1), held(tier, 1), held(tier, 3)) == (1, 0, 1)
    assert get(tier, 0, 1, 3) == [*right(0), Reason.NOT_HELD, *right(3)]
    wait(tier.delete([chunk_id(n) for n in range(8)]))
    assert tier.usage() == TierUsage(0, 0, kind.limit_bytes)


def test_ids_that_differ_in_one_bit_are_two_chunks(tier: Tier) -> None:
    one = chunk_id(1)
    for bit in (0, len(one) * 8 - 1):
        other = bytearray(one)
        other[bit // 8] ^= 1 << bit % 8
        put(tier, 1)
        into = memoryview(bytearray(CHUNK_BYTES))
        assert wait(tier.get([Get(bytes(other), into)])) == [Reason.NOT_HELD]
        assert wait(tier.held([bytes(other)])) == 0


def test_closing_twice_does_nothing(tier: Tier) -> None:
    put(tier, 1)
    wait(tier.close())
    wait(tier.close())


def test_its_name_is_a_metrics_label(tier: Tier, kind: Kind) -> None:
    assert tier.name == kind.name


NUMBERS = st.integers(0, 16)


def machine_of(kind: Kind) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        """Any order of calls, against a dict."""

        @initialize()
        def begin(self) -> None:
            self.folder = tempfile.TemporaryDirectory()
            self.tier = kind.make(Path(self.folder.name))
            self.room = kind.chunks_most
            self.expected: set[int] = set()

        def teardown(self) -> None:
            if hasattr(self, "tier"):
                wait(self.tier.close())
                self.folder.cleanup()

        @rule(numbers=st.lists(NUMBERS, max_size=4))
        def put(self, numbers: list[int]) -> None:
            for number, outcome in zip(numbers, put(self.tier, *numbers), strict=True):
                if number not in self.expected and self.room > 0:
                    self.expected.add(number)
                    self.room -= 1
                assert outcome == (None if number in self.expected else Reason.NO_ROOM)

        @rule(numbers=st.lists(NUMBERS, max_size=4))
        def get(self, numbers: list[int]) -> None:
            wanted = [right(n)[0] if n in self.expected else Reason.NOT_HELD for n in numbers]
            assert get(self.tier, *numbers) == wanted

        @rule(numbers=st.lists(NUMBERS, max_size=4))
        def delete(self, numbers: list[int]) -> None:
            wait(self.tier.delete([chunk_id(n) for n in numbers]))
            gone = self.expected & set(numbers)
            self.expected -= gone
            self.room += len(gone) * kind.frees_at_once

        @rule(numbers=st.lists(NUMBERS, max_size=4))
        def held(self, numbers: list[int]) -> None:
            leading = next((at for at, n in enumerate(numbers) if n not in self.expected), len(numbers))
            assert held(self.tier, *numbers) == leading

        @invariant()
        def usage_is_exact(self) -> None:
            if hasattr(self, "tier"):
                chunks = len(self.expected)
                assert self.tier.usage() == TierUsage(chunks, chunks * kind.used_bytes, kind.limit_bytes)

    return Machine


def test_any_order_of_calls(kind: Kind) -> None:
    run_state_machine_as_test(machine_of(kind), settings=settings(max_examples=30, stateful_step_count=30))
