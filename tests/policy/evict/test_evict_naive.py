"""Index and each policy, step by step beside the naive ones: the same victims, the same counts."""

from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from naive import NAIVE, run_to

from stepwell.policy.evict import make_evictor
from stepwell.policy.index import Entry, Index

WHICH = st.integers(0, 10**6)  # picks one of however many there are
SYMBOLS = st.sampled_from([b"a", b"b", b"c"])
PATHS = st.text("abc", min_size=1, max_size=5).map(str.encode)


class Side(RuleBasedStateMachine):
    """One policy beside its naive twin. Subclasses name the policy."""

    policy = ""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(make_evictor(self.policy))
        self.naive = NAIVE[self.policy]()
        self.held: dict[bytes, Entry] = {}
        self.parent: dict[bytes, bytes | None] = {}  # of each held chunk, as told
        self.pins: list[Entry] = []  # one for each pin, removed chunks' too

    def pick_held(self, which: int) -> bytes:
        return sorted(self.held)[which % len(self.held)]

    def may_evict(self, chunk: bytes) -> bool:
        return not any(self.parent[other] == chunk for other in self.held) and not any(
            entry.chunk == chunk and entry.held for entry in self.pins
        )

    def chain(self, chunk: bytes) -> list[bytes]:
        parent = self.parent[chunk]
        return [*(self.chain(parent) if parent else []), chunk]

    def forget(self, entry: Entry) -> None:
        assert entry is self.held.pop(entry.chunk)
        del self.parent[entry.chunk]
        self.naive.remove(entry.chunk)

    @rule(which=WHICH, symbol=SYMBOLS, place=st.integers(0, 99))
    def insert(self, which: int, symbol: bytes, place: int) -> None:
        parents = [None, *sorted(self.held)]
        parent = parents[which % len(parents)]
        chunk = (parent or b"") + symbol
        if chunk in self.held:
            with pytest.raises(ValueError, match="held already"):
                self.index.insert(chunk, parent, place)
            return
        entry = self.index.insert(chunk, parent, place)
        assert (entry.chunk, entry.place, entry.held, entry.pins) == (chunk, place, True, 0)
        self.held[chunk] = entry
        self.parent[chunk] = parent
        self.naive.insert(self.chain(chunk))

    @rule(chunk=PATHS)
    def insert_as_a_first_chunk(self, chunk: bytes) -> None:
        """Told no parent: a server takes the later part of a prompt alone too."""
        if chunk not in self.held:
            self.held[chunk] = self.index.insert(chunk, None, 0)
            self.parent[chunk] = None
            self.naive.insert([chunk])

    @rule(parent=PATHS)
    def insert_without_parent(self, parent: bytes) -> None:
        if parent not in self.held:
            with pytest.raises(ValueError, match="is not held"):
                self.index.insert(parent + b"z", parent, 0)

    @precondition(lambda self: self.held)
    @rule(which=WHICH)
    def use(self, which: int) -> None:
        run = list(takewhile(self.held.__contains__, run_to(self.pick_held(which))))
        self.index.use(run)
        self.naive.use(run)

    @precondition(lambda self: self.held)
    @rule(which=WHICH)
    def pin(self, which: int) -> None:
        entry = self.held[self.pick_held(which)]
        self.index.pin(entry)
        self.pins.append(entry)

    @precondition(lambda self: self.pins)
    @rule(which=WHICH)
    def unpin(self, which: int) -> None:
        self.index.unpin(self.pins.pop(which % len(self.pins)))

    @precondition(lambda self: self.held)
    @rule(which=WHICH)
    def unpin_too_often(self, which: int) -> None:
        entry = self.held[self.pick_held(which)]
        if entry not in self.pins:
            with pytest.raises(ValueError, match="not pinned"):
                self.index.unpin(entry)

    @rule(times=st.integers(1, 4))
    def evict(self, times: int) -> None:
        for _ in range(times):
            expected = self.naive.victim(self.may_evict)
            entry = self.index.evict()
            assert (entry and entry.chunk) == expected
            if entry is not None:
                self.forget(entry)

    @precondition(lambda self: self.held)
    @rule(which=WHICH)
    def remove(self, which: int) -> None:
        chunk = self.pick_held(which)
        expected = [other for other in self.held if chunk in self.chain(other)]
        removed = self.index.remove(chunk)
        assert sorted(entry.chunk for entry in removed) == sorted(expected)
        depths = [len(self.chain(entry.chunk)) for entry in removed]
        assert depths == sorted(depths, reverse=True)
        for entry in removed:
            self.forget(entry)

    @rule(chunk=PATHS)
    def look_up(self, chunk: bytes) -> None:
        run = run_to(chunk)
        assert self.index.held_run(run) == len(list(takewhile(self.held.__contains__, run)))

    @invariant()
    def agree(self) -> None:
        assert len(self.index) == len(self.held)
        in_order = list(self.index)
        assert sorted(in_order) == sorted(self.held)
        assert all(self.parent[chunk] in [None, *in_order[:at]] for at, chunk in enumerate(in_order))
        for chunk, entry in self.held.items():
            assert self.index.get(chunk) is entry and chunk in self.index and entry.held
            assert entry.children == list(self.parent.values()).count(chunk)
            parent = self.parent[chunk]
            assert entry.parent is (None if parent is None else self.held[parent])
            assert entry.pins == self.pins.count(entry)
        assert self.index.pinned_chunks == len(set(self.pins))
        assert not any(entry.held for entry in self.pins if self.held.get(entry.chunk) is not entry)

    def teardown(self) -> None:
        """With all pins back, everything can be evicted, in the naive order."""
        while self.pins:
            self.index.unpin(self.pins.pop())
        assert self.index.pinned_chunks == 0
        while self.held:
            self.evict(times=1)
        assert self.index.evict() is None


class LruSide(Side):
    policy = "lru"


class FifoSide(Side):
    policy = "fifo"


class S3FifoSide(Side):
    policy = "s3fifo"


TestLru = LruSide.TestCase
TestFifo = FifoSide.TestCase
TestS3Fifo = S3FifoSide.TestCase
TestLru.settings = TestFifo.settings = TestS3Fifo.settings = settings(
    max_examples=80, stateful_step_count=60, deadline=None
)


def evicted_order(policy: str, uses: Sequence[bytes]) -> list[bytes]:
    index = Index(make_evictor(policy))
    for chunk in (b"a", b"ab", b"b", b"c"):
        index.insert(chunk, chunk[:-1] or None, 0)
    for chunk in uses:
        index.use(run_to(chunk))
    return [entry.chunk for _ in range(4) if (entry := index.evict())]


def test_lru_by_hand() -> None:
    assert evicted_order("lru", []) == [b"ab", b"a", b"b", b"c"]
    assert evicted_order("lru", [b"a"]) == [b"ab", b"b", b"c", b"a"]
    assert evicted_order("lru", [b"ab", b"b"]) == [b"c", b"ab", b"a", b"b"]


def test_lru_a_removed_chunk_leaves_its_last_use_to_its_parent() -> None:
    index = Index(make_evictor("lru"))
    for chunk in (b"a", b"ab", b"b"):
        index.insert(chunk, chunk[:-1] or None, 0)
    index.use([b"a", b"ab"])
    index.remove(b"ab")
    assert [entry.chunk for _ in range(2) if (entry := index.evict())] == [b"b", b"a"]


def test_fifo_by_hand() -> None:
    assert evicted_order("fifo", [b"ab", b"b"]) == [b"ab", b"a", b"b", b"c"]


def test_s3fifo_by_hand() -> None:
    assert evicted_order("s3fifo", [b"ab", b"ab"]) == [b"b", b"c", b"ab", b"a"]
    assert evicted_order("s3fifo", [b"ab"]) == [b"ab", b"a", b"b", b"c"]


def test_s3fifo_sends_a_ghost_to_the_main_queue() -> None:
    index = Index(make_evictor("s3fifo"))
    for chunk in (b"a", b"b", b"c"):
        index.insert(chunk, None, 0)
    ghost = index.evict()
    assert ghost is not None and ghost.chunk == b"a"
    index.insert(b"a", None, 0)  # came back soon: it outlives the younger d and e without a single use
    index.insert(b"d", None, 0)
    index.insert(b"e", None, 0)
    assert [entry.chunk for _ in range(5) if (entry := index.evict())] == [b"b", b"c", b"d", b"e", b"a"]


def test_s3fifo_forgets_the_uses_of_a_chunk_that_moves_to_the_main_queue() -> None:
    index = Index(make_evictor("s3fifo"))
    index.insert(b"a", None, 0)
    index.insert(b"b", None, 0)
    index.use([b"a"])
    index.use([b"a"])
    evicted = index.evict()
    assert evicted is not None and evicted.chunk == b"b"  # a was first in line, but moved on
    index.insert(b"b", None, 0)  # a ghost: behind a in the main queue
    assert [entry.chunk for _ in range(2) if (entry := index.evict())] == [b"a", b"b"]


def test_s3fifo_spares_a_small_queue_below_its_share() -> None:
    index = Index(make_evictor("s3fifo"))
    chunks = [bytes([number]) for number in range(20)]
    for chunk in chunks:
        index.insert(chunk, None, 0)
    for chunk in chunks[:-1]:
        index.use([chunk])
        index.use([chunk])
    for number in range(20, 30):  # removed ones do not count in the share
        index.insert(bytes([number]), None, 0)
        index.remove(bytes([number]))
    # The last chunk, never used, is alone in the small queue: 1 of 20 is below a tenth, 1 of 10 is not.
    assert [entry.chunk for _ in range(12) if (entry := index.evict())] == [
        *chunks[:10],
        chunks[19],
        chunks[10],
    ]


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'belady': use lru, s3fifo or fifo"):
        make_evictor("belady")
