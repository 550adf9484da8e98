"""What the index answers by itself; evict/test_evict_naive.py drives it with every policy."""

import itertools
from collections.abc import Sequence

import pytest

from stepwell.policy.evict import make_evictor
from stepwell.policy.index import Index


class LazyRun(Sequence[bytes]):
    """Builds ids on demand, as the server's do: an id costs something, and only len and [i] exist."""

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.built = 0

    def __len__(self) -> int:
        return self.chunks

    def __getitem__(self, at: int) -> bytes:  # type: ignore[override]
        assert type(at) is int and 0 <= at < self.chunks
        self.built += 1
        return at.to_bytes(36, "big")

    def __iter__(self) -> None:  # type: ignore[override]
        raise AssertionError("a walk over all ids")


def chain(chunks: int) -> Index:
    index = Index(make_evictor("lru"))
    ids = [at.to_bytes(36, "big") for at in range(chunks)]
    for at, chunk in enumerate(ids):
        index.insert(chunk, ids[at - 1] if at else None, at)
    return index


@pytest.mark.parametrize("held", [0, 1, 2, 4_095, 4_096, 8_191, 8_192])
def test_held_run_bisects(held: int) -> None:
    run = LazyRun(8_192)
    assert chain(held).held_run(run) == held
    assert run.built <= 15  # log2, one more, and a look past the end


def test_held_run_costs_the_same_however_much_is_held() -> None:
    for held in (1_000, 100_000):
        run = LazyRun(8_192)
        assert chain(held).held_run(run) == min(held, 8_192)
        assert run.built <= 15  # log2, one more, and a look past the end


def test_chunks_stored_without_their_parents_are_found_and_used_as_one_run() -> None:
    run = [b"a", b"b", b"c", b"d"]
    index = Index(make_evictor("lru"))
    for chunk, parent in ((b"a", None), (b"b", b"a"), (b"c", None), (b"d", b"c"), (b"other", None)):
        index.insert(chunk, parent, 0)
    assert index.held_run(run) == 4
    assert index.held_run(run[2:], depth=2) == 2
    index.use(run)
    assert [entry.chunk for _ in range(5) if (entry := index.evict())] == [b"other", b"d", b"c", b"b", b"a"]


@pytest.mark.parametrize("missing", range(8))
def test_held_run_ends_at_a_gap_before_chunks_stored_without_their_parents(missing: int) -> None:
    run = [b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"]
    index = Index(make_evictor("lru"))
    for at, chunk in enumerate(run):
        if at != missing:
            index.insert(chunk, None if at in (0, missing + 1) else run[at - 1], 0)
    assert index.held_run(run) == missing


def test_held_run_of_nothing() -> None:
    assert chain(3).held_run([]) == 0


@pytest.mark.parametrize("policy", ["lru", "fifo", "s3fifo"])
def test_use_takes_a_lazy_or_empty_run(policy: str) -> None:
    index = Index(make_evictor(policy))
    index.use([])
    run = LazyRun(3)
    for at in range(3):
        index.insert(run[at], run[at - 1] if at else None, at)
    index.use(run)
    assert index.held_run(run) == 3


def test_use_of_what_is_not_held_is_an_error() -> None:
    with pytest.raises(ValueError, match="not held"):
        chain(2).use(LazyRun(3))


def test_remove_of_what_is_not_held_removes_nothing() -> None:
    index = chain(2)
    assert index.remove(b"never stored") == []
    assert len(index) == 2


@pytest.mark.parametrize("order", list(itertools.permutations([b"ab", b"ac", b"ad", b"ae"], 3)))
def test_children_may_go_in_any_order(order: tuple[bytes, ...]) -> None:
    index = Index(make_evictor("lru"))
    parent = index.insert(b"a", None, 0)
    children = {chunk: index.insert(chunk, b"a", 0) for chunk in (b"ab", b"ac", b"ad", b"ae")}
    for chunk in order:
        assert index.remove(chunk) == [children.pop(chunk)]
        assert parent.children == len(children)
    assert index.remove(b"a") == [*children.values(), parent]


def test_nothing_is_evicted_while_the_last_chunk_is_pinned() -> None:
    index = chain(3)
    last = index.get((2).to_bytes(36, "big"))
    assert last is not None
    index.pin(last)
    index.pin(last)
    assert index.evict() is None
    index.unpin(last)
    assert index.evict() is None
    index.unpin(last)
    assert [entry.place for _ in range(3) if (entry := index.evict())] == [2, 1, 0]


def test_a_pin_outlives_removal_and_does_not_touch_a_chunk_stored_again() -> None:
    index = Index(make_evictor("lru"))
    first = index.insert(b"a", None, place=1)
    index.pin(first)
    assert index.remove(b"a") == [first]
    assert not first.held and index.pinned_chunks == 1
    again = index.insert(b"a", None, place=2)
    index.pin(again)
    assert index.pinned_chunks == 2
    index.unpin(first)
    assert (index.pinned_chunks, again.pins) == (1, 1)
    assert index.evict() is None
    with pytest.raises(ValueError, match="not pinned"):
        index.unpin(first)
    with pytest.raises(ValueError, match="cannot be pinned"):
        index.pin(first)
