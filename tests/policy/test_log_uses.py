"""What lives on when a log's oldest segment goes."""

from hypothesis import given
from hypothesis import strategies as st

from stepwell.policy.log import KEPT_SHARE, LogUses
from support.chunks import chunk_id

SEGMENT = [(chunk_id(n), 100) for n in range(8)]


def nobody(_: bytes) -> bool:
    return False


def test_what_nobody_used_goes() -> None:
    assert LogUses().kept(SEGMENT, 1_000, nobody) == []


def test_what_was_used_or_is_in_use_above_stays_in_the_order_of_the_log() -> None:
    uses = LogUses()
    for number in (5, 2, 99):
        uses.use([chunk_id(number)])
    kept = uses.kept(SEGMENT, 1_000, lambda chunk: chunk == chunk_id(3))
    assert kept == [chunk_id(2), chunk_id(3), chunk_id(5)]


def test_a_use_counts_once() -> None:
    uses = LogUses()
    uses.use([chunk_id(2)])
    uses.forget([chunk for chunk, _ in SEGMENT])
    assert uses.kept(SEGMENT, 1_000, nobody) == []


@given(st.lists(st.integers(1, 500), max_size=30), st.integers(0, 3_000))
def test_never_more_than_its_share_and_parents_first(sizes: list[int], segment_bytes: int) -> None:
    segment = [(chunk_id(n), nbytes) for n, nbytes in enumerate(sizes)]
    kept = LogUses().kept(segment, segment_bytes, lambda _: True)
    assert sum(nbytes for chunk, nbytes in segment if chunk in kept) <= KEPT_SHARE * segment_bytes
    if sizes and sizes[0] <= KEPT_SHARE * segment_bytes:
        assert kept[0] == chunk_id(0)
