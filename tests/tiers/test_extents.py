"""The allocator beside a map with one cell for each aligned piece of the arena."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepwell.tiers.extents import Extents

ALIGN = 64
SIZES = st.one_of(st.sampled_from([1, 64, 65, 128, 300, 512, 1_000]), st.integers(1, 4_000))


class ExtentsBesideMap(RuleBasedStateMachine):
    @initialize(pieces=st.integers(1, 100), tail=st.integers(0, ALIGN - 1))
    def start(self, pieces: int, tail: int) -> None:
        self.extents = Extents(pieces * ALIGN + tail, ALIGN)
        self.used = [False] * pieces
        self.given: list[tuple[int, int]] = []  # offset, nbytes as asked

    def holes(self) -> dict[int, int]:
        """Offset -> bytes of each longest free range."""
        holes: dict[int, int] = {}
        start = None
        for piece, used in enumerate([*self.used, True]):
            if used:
                if start is not None:
                    holes[start * ALIGN] = (piece - start) * ALIGN
                start = None
            elif start is None:
                start = piece
        return holes

    def pieces(self, offset: int, nbytes: int) -> range:
        return range(offset // ALIGN, (offset + nbytes + ALIGN - 1) // ALIGN)

    @rule(nbytes=SIZES)
    def allocate(self, nbytes: int) -> None:
        holes = self.holes()
        fitting = [size for size in holes.values() if size >= nbytes]
        offset = self.extents.allocate(nbytes)
        if not fitting:
            assert offset is None
            return
        assert offset is not None and holes[offset] == min(fitting)
        for piece in self.pieces(offset, nbytes):
            assert not self.used[piece]
            self.used[piece] = True
        self.given.append((offset, nbytes))

    @precondition(lambda self: self.given)
    @rule(which=st.integers(0, 10**6))
    def free(self, which: int) -> None:
        offset, nbytes = self.given.pop(which % len(self.given))
        self.extents.free(offset, nbytes)
        for piece in self.pieces(offset, nbytes):
            self.used[piece] = False

    @rule(offset=st.integers(-ALIGN, 100 * ALIGN), nbytes=SIZES)
    def free_what_was_not_given(self, offset: int, nbytes: int) -> None:
        given = {(at, len(self.pieces(at, size))) for at, size in self.given}
        if (offset, len(self.pieces(0, nbytes))) not in given:
            with pytest.raises(ValueError, match="allocated"):
                self.extents.free(offset, nbytes)

    @precondition(lambda self: self.given)
    @rule(which=st.integers(0, 10**6))
    def free_in_part_or_too_much(self, which: int) -> None:
        offset, nbytes = self.given[which % len(self.given)]
        for wrong in (nbytes + ALIGN, nbytes - ALIGN):
            if wrong > 0:
                with pytest.raises(ValueError, match="allocated"):
                    self.extents.free(offset, wrong)

    @invariant()
    def sums_are_exact(self) -> None:
        assert self.extents.free_bytes == self.used.count(False) * ALIGN
        assert self.extents.largest_free_bytes == max(self.holes().values(), default=0)

    def teardown(self) -> None:
        """All freed, in whatever order, is one hole again."""
        while self.given:
            self.extents.free(*self.given.pop(len(self.given) // 2))
        whole = len(self.used) * ALIGN
        assert self.extents.free_bytes == self.extents.largest_free_bytes == whole
        assert self.extents.allocate(whole) == 0
        assert self.extents.allocate(1) is None


TestExtents = ExtentsBesideMap.TestCase
TestExtents.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_double_free_changes_nothing() -> None:
    extents = Extents(1 << 20)
    first, second = extents.allocate(5_000), extents.allocate(5_000)
    assert (first, second) == (0, 8_192)
    extents.free(first, 5_000)
    with pytest.raises(ValueError, match="no range of 5000 bytes at 0 is allocated"):
        extents.free(first, 5_000)
    assert extents.free_bytes == (1 << 20) - 8_192


def test_the_size_freed_last_is_given_first() -> None:
    extents = Extents(1 << 20)
    offsets = [extents.allocate(4_096) for _ in range(6)]
    for offset in (offsets[2], offsets[0]):
        assert offset is not None
        extents.free(offset, 4_096)
    assert extents.allocate(4_096) == offsets[0]
    assert extents.allocate(4_096) == offsets[2]


def test_an_arena_too_small_for_one_alignment_gives_nothing() -> None:
    assert Extents(0).allocate(1) is None
    assert Extents(4_095).free_bytes == 0


@pytest.mark.parametrize(("size_bytes", "align_bytes"), [(-1, 4_096), (4_096, 0)])
def test_an_impossible_arena_is_an_error(size_bytes: int, align_bytes: int) -> None:
    with pytest.raises(ValueError, match="no arena"):
        Extents(size_bytes, align_bytes)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_range_is_an_error(nbytes: int) -> None:
    extents = Extents(1 << 20)
    with pytest.raises(ValueError, match="1 or more"):
        extents.allocate(nbytes)
    with pytest.raises(ValueError, match="1 or more"):
        extents.free(0, nbytes)
