"""Leases, reservations and what becomes visible when, against a model of dicts and lists.

Bytes derive from the chunk's id; a writer scribbles over its slots until it commits.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stepwell.layout import fingerprint, space_id
from stepwell.policy.evict import make_evictor
from stepwell.policy.index import Index
from stepwell.server.core import WRITER_PATIENCE_S, Core, Session, UnknownSpace
from stepwell.tiers.memory import MemoryTier, Slot
from stepwell.types import Reason, RequestStats, SpaceSpec
from stepwell.wire import Granted, ProtocolError, Run, unpack_places
from support.chunks import content, key

PAGE = 4096
SPECS = SpaceSpec(fingerprint("one page"), 16, PAGE), SpaceSpec(fingerprint("two pages"), 16, 2 * PAGE)
ONE, TWO = (space_id(spec) for spec in SPECS)
NBYTES = {ONE: PAGE, TWO: 2 * PAGE}


@contextmanager
def core_of(pages: int, eviction: str = "lru") -> Iterator[Core]:
    memory = MemoryTier(pages * PAGE)
    core = Core(memory, Index(make_evictor(eviction)))
    for space, spec in zip((ONE, TWO), SPECS, strict=True):
        core.open_space(space, spec)
    try:
        yield core
    finally:
        memory.arena.close()
        os.close(memory.fd)


def chain(name: str, chunks: int) -> list[bytes]:
    return [key((name, number)) for number in range(chunks)]


def write(core: Core, space: bytes, chunk_key: bytes, offset: int) -> None:
    core.memory.view(Slot(offset, NBYTES[space]))[:] = content(space + chunk_key, NBYTES[space])


def read(core: Core, space: bytes, offset: int) -> bytes:
    return bytes(core.memory.view(Slot(offset, NBYTES[space])))


def reserve(
    core: Core,
    session: Session,
    number: int,
    keys: list[bytes],
    *,
    parent: bytes | None = None,
    space: bytes = ONE,
) -> Granted:
    """Reserve one run and write what was granted."""
    (granted,) = core.reserve(session, number, [Run(space, parent, b"".join(keys))])
    for at, offset in zip(granted.chunks, unpack_places(granted.places), strict=True):
        write(core, space, keys[at], offset)
    return granted


def store(core: Core, session: Session, number: int, keys: list[bytes], space: bytes = ONE) -> Granted:
    granted = reserve(core, session, number, keys, space=space)
    core.commit(session, number)
    return granted


def held(core: Core, keys: list[bytes], space: bytes = ONE) -> int:
    hit = core.lookup(space, b"".join(keys))
    assert hit.tiers == ("memory",) * hit.chunks
    return hit.chunks


def load(
    core: Core, session: Session, number: int, keys: list[bytes], *, space: bytes = ONE, first: int = 0
) -> int:
    """Load, check every byte, and say how many leading chunks there are."""
    chunks, offsets, coming = core.load(session, number, space, b"".join(keys), first=first)
    assert coming == chunks
    assert len(offsets) == max(0, chunks - first)
    for chunk_key, offset in zip(keys[first:chunks], offsets, strict=True):
        assert read(core, space, offset) == content(space + chunk_key, NBYTES[space])
    return chunks


def at_rest(core: Core, chunks: int, used_bytes: int) -> None:
    """Nothing is pinned, leased or reserved; this is held and nothing else takes room."""
    stats = core.memory_stats()
    assert (stats.chunks, stats.used_bytes, stats.pinned_chunks) == (chunks, used_bytes, 0)
    assert core.counts[1:] == (0, 0)
    assert core.memory.usage().chunks == chunks


# -- one thing at a time -----------------------------------------------------------------------------------


def test_what_is_committed_is_found_and_loaded_and_counted() -> None:
    keys = chain("a", 5)
    with core_of(8) as core:
        session = core.begin_session()
        granted = reserve(core, session, 1, keys[:3])
        assert (granted.held, granted.chunks, granted.stopped) == (0, [0, 1, 2], None)
        assert held(core, keys) == 0, "not before it is committed"
        core.commit(session, 1)
        assert held(core, keys) == 3
        assert load(core, session, 2, keys) == 3
        assert core.memory_stats().pinned_chunks == 3
        assert core.counts == (2, 1, 0)
        core.release(session, 2)
        assert load(core, session, 3, keys, first=2) == 3
        assert core.memory_stats().pinned_chunks == 1
        core.release(session, 3)
        assert (core.lookups, core.hit_chunks, core.missed) == (2, 6, Counter({Reason.NOT_HELD: 4}))
        assert core.memory_stats().loaded_chunks == 4
        assert core.memory_stats().stored_chunks == 3
        core.load(session, 4, ONE, b"".join(keys), again=True)
        core.release(session, 4)
        assert (core.lookups, core.hit_chunks, core.missed) == (2, 6, Counter({Reason.NOT_HELD: 4})), (
            "asked again"
        )
        at_rest(core, 3, 3 * PAGE)


def test_only_k_of_n_chunks_stored_is_a_hit_of_k() -> None:
    keys = chain("a", 6)
    for k in range(7):
        with core_of(8) as core:
            session = core.begin_session()
            store(core, session, 1, keys[:k])
            assert held(core, keys) == k


def test_a_later_chunk_without_the_first_is_no_hit_and_goes_when_room_is_needed() -> None:
    keys = chain("a", 3)
    with core_of(2) as core:
        session = core.begin_session()
        store(core, session, 1, [keys[2]])
        assert held(core, keys) == 0
        assert held(core, [keys[2]]) == 1
        store(core, session, 2, chain("b", 2))
        assert held(core, [keys[2]]) == 0
        assert core.memory_stats().evicted_chunks == 1
        at_rest(core, 2, 2 * PAGE)


def test_chunks_stored_one_by_one_are_found_in_order() -> None:
    keys = chain("a", 5)
    with core_of(8) as core:
        session = core.begin_session()
        for number, chunk_key in enumerate(keys):
            store(core, session, number, [chunk_key])
        assert held(core, keys) == 5
        assert load(core, session, 9, keys) == 5
        core.release(session, 9)
        at_rest(core, 5, 5 * PAGE)


def test_two_spaces_with_the_same_keys_never_meet_and_share_one_arena() -> None:
    keys = chain("a", 3)
    with core_of(9) as core:
        session = core.begin_session()
        store(core, session, 1, keys)
        assert (held(core, keys), held(core, keys, TWO)) == (3, 0)
        store(core, session, 2, keys, space=TWO)
        assert (held(core, keys), held(core, keys, TWO)) == (3, 3)
        assert (load(core, session, 3, keys), load(core, session, 4, keys, space=TWO)) == (3, 3)
        core.end_session(session)
        at_rest(core, 6, 9 * PAGE)
        assert sum(core.clear(TWO)) == 3
        assert (held(core, keys), held(core, keys, TWO)) == (3, 0)
        at_rest(core, 3, 3 * PAGE)


def test_a_chunk_of_another_size_takes_the_room_of_several() -> None:
    with core_of(4) as core:
        session = core.begin_session()
        store(core, session, 1, chain("small", 4))
        assert store(core, session, 2, chain("large", 2), space=TWO).chunks == [0, 1]
        assert core.memory_stats().evicted_chunks == 4
        assert store(core, session, 3, chain("small again", 4)).chunks == [0, 1, 2, 3]
        at_rest(core, 4, 4 * PAGE)


def test_a_chunk_larger_than_the_arena_evicts_nothing() -> None:
    with core_of(1) as core:
        session = core.begin_session()
        store(core, session, 1, chain("small", 1))
        granted = store(core, session, 2, chain("large", 3), space=TWO)
        assert (granted.chunks, granted.stopped) == ([], Reason.NO_ROOM)
        assert core.dropped == Counter({Reason.NO_ROOM: 3})
        at_rest(core, 1, PAGE)


def test_an_arena_of_one_slot_of_which_two_are_asked() -> None:
    keys = chain("a", 2)
    with core_of(1) as core:
        session = core.begin_session()
        granted = store(core, session, 1, keys)
        assert (granted.chunks, granted.stopped) == ([0], Reason.NO_ROOM)
        assert core.dropped == Counter({Reason.NO_ROOM: 1})
        assert load(core, session, 2, keys) == 1
        assert reserve(core, session, 3, chain("b", 1)).stopped is Reason.NO_ROOM, "the lease keeps it"
        core.release(session, 2)
        assert reserve(core, session, 4, chain("b", 1)).chunks == [0]
        core.end_session(session)
        at_rest(core, 0, 0)


@pytest.mark.parametrize("chunks_a_step", [1, 2, 3, 10])
@pytest.mark.parametrize("commits_late", [False, True])
def test_a_prompt_longer_than_the_arena_never_evicts_its_own_beginning(
    chunks_a_step: int, commits_late: bool
) -> None:
    """As an engine stores it: some chunks a step, a step's copies often ending after the next step began."""
    keys = chain("long", 10)
    with core_of(4) as core:
        session = core.begin_session()
        store(core, session, 0, chain("old", 4))
        uncommitted = None
        for number, first in enumerate(range(0, 10, chunks_a_step), start=1):
            parent = keys[first - 1] if first else None
            granted = reserve(core, session, number, keys[first : first + chunks_a_step], parent=parent)
            if uncommitted is not None:
                core.commit(session, uncommitted)
            uncommitted = number
            if not commits_late:
                core.commit(session, number)
                uncommitted = None
            if granted.stopped is not None:
                assert granted.stopped is Reason.NO_ROOM
                break
        assert granted.stopped is Reason.NO_ROOM
        core.end_session(session)
        assert held(core, keys) == 4 if not commits_late else held(core, keys) >= 4 - chunks_a_step
        assert core.memory_stats().evicted_chunks == 4, "the old ones, and nothing of its own"


def test_a_chunk_is_not_evicted_while_its_child_is_written_even_if_it_came_later() -> None:
    keys = chain("a", 2)
    with core_of(2) as core:
        leader, follower, other = core.begin_session(), core.begin_session(), core.begin_session()
        reserve(core, leader, 1, keys[:1])
        assert reserve(core, follower, 1, keys).chunks == [1]
        core.commit(leader, 1)
        assert reserve(core, other, 1, chain("b", 1)).stopped is Reason.NO_ROOM
        core.commit(follower, 1)
        assert held(core, keys) == 2
        at_rest_after = core.memory_stats()
        assert (at_rest_after.pinned_chunks, at_rest_after.evicted_chunks) == (0, 0)


def test_eviction_takes_the_last_chunk_first() -> None:
    keys = chain("a", 4)
    with core_of(4) as core:
        session = core.begin_session()
        store(core, session, 1, keys)
        for left in (3, 2, 1, 0):
            reserve(core, session, 10 + left, [key(("filler", left))])
            assert held(core, keys) == left


def test_a_million_questions_pin_nothing() -> None:
    keys = chain("a", 2)
    with core_of(2) as core:
        session = core.begin_session()
        store(core, session, 1, keys)
        for _ in range(1_000):
            core.lookup(ONE, b"".join(keys))
        assert core.memory_stats().pinned_chunks == 0
        assert (core.lookups, core.hit_chunks) == (0, 0)
        assert store(core, session, 2, chain("b", 2)).chunks == [0, 1]


# -- several engines ---------------------------------------------------------------------------------------


def test_of_two_engines_with_one_prompt_one_writes() -> None:
    keys = chain("a", 3)
    with core_of(8) as core:
        leader, follower = core.begin_session(), core.begin_session()
        assert reserve(core, leader, 1, keys).chunks == [0, 1, 2]
        granted = reserve(core, follower, 1, keys)
        assert (granted.held, granted.chunks, granted.stopped) == (0, [], None)
        assert core.memory_stats().used_bytes == 3 * PAGE
        core.abort(leader, 1)
        assert reserve(core, follower, 2, keys).chunks == [0, 1, 2], "a follower takes over"
        core.commit(follower, 2)
        assert held(core, keys) == 3
        core.commit(follower, 1)
        at_rest(core, 3, 3 * PAGE)
        assert core.memory_stats().stored_chunks == 3


def test_a_child_committed_first_becomes_visible_with_its_parent() -> None:
    keys = chain("a", 3)
    with core_of(8) as core:
        leader, follower = core.begin_session(), core.begin_session()
        reserve(core, leader, 1, keys[:1])
        assert reserve(core, follower, 1, keys).chunks == [1, 2]
        core.commit(follower, 1)
        assert (held(core, keys), held(core, keys[1:])) == (0, 0)
        core.end_session(follower)
        core.commit(leader, 1)
        assert held(core, keys) == 3
        assert load(core, leader, 2, keys) == 3


@pytest.mark.parametrize("how", ["abort", "end"])
def test_when_a_parent_is_given_up_what_waits_for_it_is_freed(how: str) -> None:
    keys = chain("a", 3)
    with core_of(8) as core:
        leader, follower = core.begin_session(), core.begin_session()
        reserve(core, leader, 1, keys[:1])
        reserve(core, follower, 1, keys[:2])
        core.commit(follower, 1)
        reserve(core, follower, 2, keys)
        assert core.memory_stats().used_bytes == 3 * PAGE
        if how == "abort":
            core.abort(leader, 1)
        else:
            core.end_session(leader)
        assert core.memory_stats().used_bytes == PAGE, "only the one that is still being written"
        assert core.dropped == Counter({Reason.ABANDONED: 2})
        core.commit(follower, 2)
        assert core.dropped == Counter({Reason.ABANDONED: 3})
        assert (held(core, keys), held(core, keys[1:]), held(core, keys[2:])) == (0, 0, 0)
        core.end_session(follower)
        at_rest(core, 0, 0)
        third = core.begin_session()
        assert store(core, third, 1, keys).chunks == [0, 1, 2]
        assert held(core, keys) == 3


def test_a_slot_that_is_still_written_after_a_clear_is_nobody_elses() -> None:
    keys = chain("a", 1)
    with core_of(2) as core:
        session, other = core.begin_session(), core.begin_session()
        (granted,) = core.reserve(session, 1, [Run(ONE, None, keys[0])])
        (offset,) = unpack_places(granted.places)
        assert sum(core.clear(ONE)) == 0
        assert store(core, other, 1, keys).chunks == [0], "fresh bytes can be stored meanwhile"
        core.memory.view(Slot(offset, PAGE))[:] = b"\xee" * PAGE
        assert load(core, other, 2, keys) == 1
        core.commit(session, 1)
        assert core.memory_stats().used_bytes == PAGE
        assert core.dropped == Counter({Reason.ABANDONED: 1})
        core.end_session(other)
        at_rest(core, 1, PAGE)


def test_the_end_of_a_cleared_reservation_takes_nothing_with_it() -> None:
    """The same chunks were reserved anew: what waits now waits for the new parent."""
    keys = chain("a", 2)
    with core_of(8) as core:
        one, other, third = core.begin_session(), core.begin_session(), core.begin_session()
        reserve(core, one, 1, keys[:1])
        sum(core.clear(None))
        reserve(core, other, 1, keys[:1])
        assert reserve(core, third, 1, keys).chunks == [1]
        core.commit(third, 1)
        core.abort(one, 1)
        core.commit(other, 1)
        assert held(core, keys) == 2
        for session in (one, other, third):
            core.end_session(session)
        at_rest(core, 2, 2 * PAGE)


def test_a_clear_under_a_lease_keeps_its_bytes_until_it_ends() -> None:
    keys = chain("a", 3)
    with core_of(4) as core:
        reader, writer = core.begin_session(), core.begin_session()
        store(core, writer, 1, keys)
        _, offsets, _ = core.load(reader, 1, ONE, b"".join(keys))
        core.load(reader, 2, ONE, b"".join(keys))
        assert sum(core.clear(None)) == 3
        assert held(core, keys) == 0
        granted = reserve(core, writer, 2, chain("b", 4))
        assert (granted.chunks, granted.stopped) == ([0], Reason.NO_ROOM)
        assert [read(core, ONE, offset) for offset in offsets] == [content(ONE + k, PAGE) for k in keys]
        core.release(reader, 1)
        assert core.memory_stats().used_bytes == 4 * PAGE, "the other lease"
        core.release(reader, 2)
        assert core.memory_stats().used_bytes == PAGE
        core.end_session(writer)
        at_rest(core, 0, 0)


def test_a_clear_frees_the_parent_of_a_chunk_that_is_still_being_written_when_that_ends() -> None:
    keys = chain("a", 2)
    with core_of(4) as core:
        session = core.begin_session()
        store(core, session, 1, keys[:1])
        reserve(core, session, 2, keys)
        assert sum(core.clear(None)) == 1
        assert core.memory_stats().used_bytes == 2 * PAGE
        core.commit(session, 2)
        assert (held(core, keys), held(core, keys[1:])) == (0, 0)
        at_rest(core, 0, 0)


# -- messages out of order, and wrong ones -----------------------------------------------------------------


def test_an_end_that_overtook_its_beginning() -> None:
    keys = chain("a", 2)
    with core_of(4) as core:
        session = core.begin_session()
        store(core, session, 1, keys)
        core.release(session, 5)
        core.abort(session, 6)
        core.load(session, 5, ONE, b"".join(keys))
        (granted,) = core.reserve(session, 6, [Run(ONE, None, b"".join(chain("b", 2)))])
        assert (granted.chunks, granted.places) == ([], b"")
        at_rest(core, 2, 2 * PAGE)
        assert reserve(core, session, 7, chain("b", 2)).chunks == [0, 1], "and nobody is writing them"
        core.end_session(session)
        at_rest(core, 2, 2 * PAGE)


def test_an_end_that_comes_twice() -> None:
    keys = chain("a", 2)
    with core_of(4) as core:
        session = core.begin_session()
        store(core, session, 1, keys)
        core.commit(session, 1)
        core.abort(session, 1)
        load(core, session, 2, keys)
        core.release(session, 2)
        core.release(session, 2)
        at_rest(core, 2, 2 * PAGE)


def test_one_number_cannot_name_two_leases_or_reservations() -> None:
    keys = chain("a", 1)
    with core_of(4) as core:
        session = core.begin_session()
        store(core, session, 1, keys)
        load(core, session, 2, keys)
        reserve(core, session, 3, chain("b", 1))
        with pytest.raises(ProtocolError, match="lease 2 exists"):
            core.load(session, 2, ONE, keys[0])
        with pytest.raises(ProtocolError, match="reservation 3 exists"):
            core.reserve(session, 3, [Run(ONE, None, b"".join(chain("c", 1)))])
        with pytest.raises(ProtocolError, match="begins before its first chunk"):
            core.load(session, 4, ONE, keys[0], first=-1)
        core.end_session(session)
        at_rest(core, 1, PAGE)


@pytest.mark.parametrize("bad", [Run(b"?" * 16, None, key("b")), Run(ONE, None, b"short")])
def test_a_reservation_that_cannot_be_read_takes_nothing(bad: Run) -> None:
    with core_of(4) as core:
        session = core.begin_session()
        with pytest.raises((UnknownSpace, ProtocolError)):
            core.reserve(session, 1, [Run(ONE, None, key("a")), bad])
        at_rest(core, 0, 0)


@pytest.mark.parametrize(("chunk_tokens", "chunk_bytes"), [(16, 0), (16, -1), (0, PAGE)])
def test_a_space_of_empty_chunks_is_refused(chunk_tokens: int, chunk_bytes: int) -> None:
    with core_of(1) as core, pytest.raises(ProtocolError, match="no chunk has"):
        core.open_space(b"?" * 16, SpaceSpec(b"f", chunk_tokens, chunk_bytes))


def test_an_unknown_space_is_said_to_be_unknown() -> None:
    with core_of(1) as core:
        session = core.begin_session()
        for ask in (lambda: core.lookup(b"?" * 16, b""), lambda: core.load(session, 1, b"?" * 16, b"")):
            with pytest.raises(UnknownSpace):
                ask()
        assert sum(core.clear(b"?" * 16)) == 0


def test_a_chunk_whose_parent_nobody_has_is_not_taken() -> None:
    keys = chain("a", 3)
    with core_of(4) as core:
        session = core.begin_session()
        granted = reserve(core, session, 1, keys[1:], parent=keys[0])
        assert (granted.chunks, granted.stopped) == ([], Reason.NO_PARENT)
        assert core.dropped == Counter({Reason.NO_PARENT: 2})
        core.abort(session, 1)
        at_rest(core, 0, 0)


def test_engines_reports_are_summed() -> None:
    with core_of(1) as core:
        for _ in range(2):
            core.report(RequestStats(1, 10, 2, 3, 5), {Reason.TOO_SHORT: 1}, {Reason.NO_WORKER: 2})
        assert core.requests == RequestStats(2, 20, 4, 6, 10)
        assert core.missed == Counter({Reason.TOO_SHORT: 2})
        assert core.dropped == Counter({Reason.NO_WORKER: 4})


# -- any order ---------------------------------------------------------------------------------------------

SESSIONS = st.integers(0, 2)
SPACES = st.sampled_from([ONE, TWO])
PATHS = st.text("ab", min_size=1, max_size=4)  # a prompt is a path in a tree of two branches


def path_keys(path: str) -> list[bytes]:
    return [key(path[: end + 1]) for end in range(len(path))]


class Being:
    """The model's idea of a chunk that is being written."""

    def __init__(self, name: bytes, parent: bytes | None, offset: int) -> None:
        self.name, self.parent, self.offset = name, parent, offset
        self.written = self.cancelled = False


class AnyOrder(RuleBasedStateMachine):
    """Sessions do what they may in any order; with `exact`, the arena never fills and the model knows all."""

    pages = 400
    exact = True

    @initialize()
    def begin(self) -> None:
        self.context = core_of(self.pages)
        self.core = self.context.__enter__()
        self.sessions = [self.core.begin_session() for _ in range(3)]
        self.leases: list[dict[int, list[tuple[bytes, int]]]] = [{}, {}, {}]
        self.reservations: list[dict[int, list[Being]]] = [{}, {}, {}]
        self.held: set[bytes] = set()
        self.pending: dict[bytes, Being] = {}
        self.stored = self.abandoned = self.number = 0

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for session in self.sessions:
            self.core.end_session(session)
        stats = self.core.memory_stats()
        assert (stats.pinned_chunks, self.core.counts[1:]) == (0, (0, 0))
        assert stats.used_bytes == sum(NBYTES[chunk[:16]] for chunk in self.core._index)
        assert sum(self.core.clear(None)) == stats.chunks
        at_rest(self.core, 0, 0)
        assert self.core.memory.reserve(self.pages * PAGE) is not None, "the arena is in one piece again"
        self.context.__exit__(None, None, None)

    def next(self) -> int:
        self.number += 1
        return self.number

    # What the model thinks that happens.

    def cancel(self, name: bytes) -> None:
        being = self.pending.pop(name, None)
        if being is None:
            return
        being.cancelled = True
        self.abandoned += being.written
        for child in [b.name for b in self.pending.values() if b.parent == name]:
            self.cancel(child)

    def show_what_can_be_seen(self) -> None:
        while ready := [
            b for b in self.pending.values() if b.written and (b.parent is None or b.parent in self.held)
        ]:
            for being in ready:
                del self.pending[being.name]
                self.held.add(being.name)
                self.stored += 1

    # What sessions do.

    @rule(
        who=SESSIONS,
        space=SPACES,
        path=PATHS,
        start=st.integers(0, 3),
        alone=st.booleans(),
        twice=st.booleans(),
    )
    def reserve(self, *, who: int, space: bytes, path: str, start: int, alone: bool, twice: bool) -> None:
        keys = path_keys(path)
        start = min(start, len(keys) - 1)
        parent = None if alone or start == 0 else keys[start - 1]
        run = Run(space, parent, b"".join(keys[start:]))
        number = self.next()
        answers = self.core.reserve(self.sessions[who], number, [run, run] if twice else [run])
        if twice:
            assert answers[1].chunks == [], "granted once"
        granted = answers[0]
        names = [space + k for k in keys[start:]]
        before = None if parent is None else space + parent
        taken = self.reservations[who][number] = []
        offsets = dict(zip(granted.chunks, unpack_places(granted.places), strict=True))
        if self.exact:
            held = next((at for at, name in enumerate(names) if name not in self.held), len(names))
            assert granted.held == held
            no_parent = before is not None and before not in self.held and before not in self.pending
            new = [at for at in range(held, len(names)) if names[at] not in self.held | self.pending.keys()]
            if no_parent and new[:1] == [0]:
                assert (granted.chunks, granted.stopped) == ([], Reason.NO_PARENT)
            else:
                assert (granted.chunks, granted.stopped) == (new, None)
        for at, offset in offsets.items():
            parent_name = names[at - 1] if at else before
            being = self.pending[names[at]] = Being(names[at], parent_name, offset)
            taken.append(being)
            self.core.memory.view(Slot(offset, NBYTES[space]))[:] = b"\xee" * NBYTES[space]

    @rule(who=SESSIONS, data=st.data())
    def commit(self, who: int, data: st.DataObject) -> None:
        if not self.reservations[who]:
            return
        number = data.draw(st.sampled_from(sorted(self.reservations[who])))
        taken = self.reservations[who].pop(number)
        for being in taken:  # cancelled or not, the slot is still its writer's
            nbytes = NBYTES[being.name[:16]]
            self.core.memory.view(Slot(being.offset, nbytes))[:] = content(being.name, nbytes)
        self.core.commit(self.sessions[who], number)
        for being in taken:
            being.written = True
            self.abandoned += being.cancelled
        self.show_what_can_be_seen()

    @rule(who=SESSIONS, data=st.data())
    def abort(self, who: int, data: st.DataObject) -> None:
        if not self.reservations[who]:
            return
        number = data.draw(st.sampled_from(sorted(self.reservations[who])))
        self.core.abort(self.sessions[who], number)
        self.give_up(self.reservations[who].pop(number))

    def give_up(self, taken: list[Being]) -> None:
        for being in taken:
            if not being.cancelled:
                self.cancel(being.name)
            self.abandoned += 1

    @rule(who=SESSIONS, space=SPACES, path=PATHS, first=st.integers(0, 3))
    def load(self, who: int, space: bytes, path: str, first: int) -> None:
        keys = path_keys(path)
        number = self.next()
        chunks, offsets, _ = self.core.load(self.sessions[who], number, space, b"".join(keys), first=first)
        assert len(offsets) == max(0, chunks - first)
        names = [space + k for k in keys[:chunks]]
        if self.exact:
            assert chunks == next((at for at, k in enumerate(keys) if space + k not in self.held), len(keys))
        assert set(names) <= self.held, "only what was committed, and not cleared since"
        self.leases[who][number] = list(zip(names[first:], offsets, strict=True))

    @rule(who=SESSIONS, data=st.data())
    def release(self, who: int, data: st.DataObject) -> None:
        if self.leases[who]:
            number = data.draw(st.sampled_from(sorted(self.leases[who])))
            del self.leases[who][number]
            self.core.release(self.sessions[who], number)

    @rule(who=SESSIONS, space=SPACES, path=PATHS)
    def end_before_the_beginning(self, who: int, space: bytes, path: str) -> None:
        keys = b"".join(path_keys(path))
        lease, reservation = self.next(), self.next()
        self.core.release(self.sessions[who], lease)
        self.core.abort(self.sessions[who], reservation)
        assert self.core.load(self.sessions[who], lease, space, keys)[1] == []
        assert self.core.reserve(self.sessions[who], reservation, [Run(space, None, keys)])[0].chunks == []

    @rule(who=SESSIONS)
    def end_session(self, who: int) -> None:
        self.core.end_session(self.sessions[who])
        self.sessions[who] = self.core.begin_session()
        self.leases[who] = {}
        for taken in self.reservations[who].values():
            self.give_up(taken)
        self.reservations[who] = {}

    @rule(space=SPACES | st.none())
    def clear(self, space: bytes | None) -> None:
        gone = {name for name in self.held if space is None or name.startswith(space)}
        cleared = sum(self.core.clear(space))
        if self.exact:
            assert cleared == len(gone)
        self.held -= gone
        for name in [n for n in self.pending if space is None or n.startswith(space)]:
            self.cancel(name)

    # What always holds.

    @invariant()
    def leased_bytes_are_right(self) -> None:
        for leases in getattr(self, "leases", []):
            for name, offset in (pinned for lease in leases.values() for pinned in lease):
                assert read(self.core, name[:16], offset) == content(name, NBYTES[name[:16]])

    @invariant()
    def held_bytes_are_right_and_all_counters_agree(self) -> None:
        if not hasattr(self, "core"):
            return
        index = self.core._index
        assert set(index) <= self.held
        if self.exact:
            assert set(index) == self.held
            assert set(self.core._pending) == set(self.pending)
            assert self.core.memory_stats().stored_chunks == self.stored
            assert self.core.dropped[Reason.ABANDONED] == self.abandoned
        taken_bytes: dict[int, int] = {}  # by offset: two owners of one slot show
        for chunk in index:
            entry = index.get(chunk)
            assert entry is not None
            assert entry.parent is None or entry.parent.held
            assert read(self.core, chunk[:16], entry.place) == content(chunk, NBYTES[chunk[:16]])
            taken_bytes[entry.place] = NBYTES[chunk[:16]]
        for leases in self.leases:
            for lease in leases.values():
                taken_bytes |= {offset: NBYTES[name[:16]] for name, offset in lease}
        beings = [b for some in self.reservations for taken in some.values() for b in taken]
        waiting = [b for b in self.pending.values() if b.written]
        for being in beings + waiting:
            if being.name in self.core._pending or not being.written:
                assert being.offset not in taken_bytes
                taken_bytes[being.offset] = NBYTES[being.name[:16]]
        for session in self.core._sessions:  # a cleared chunk stays while a child of it is being written
            for pending in (p for taken in session.reservations.values() for p in taken):
                if pending.pinned_parent is not None:
                    taken_bytes[pending.pinned_parent.place] = pending.slot.nbytes
        stats = self.core.memory_stats()
        assert stats.used_bytes == sum(taken_bytes.values())
        assert stats.chunks == len(index) == self.core.memory.usage().chunks
        assert self.core.counts[1:] == (sum(map(len, self.leases)), sum(map(len, self.reservations)))


class AnyOrderInASmallArena(AnyOrder):
    """Seven pages for 60 chunks of one and two pages: what is evicted, the model does not say."""

    pages = 7
    exact = False


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
AnyOrderInASmallArena.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase
TestAnyOrderInASmallArena = AnyOrderInASmallArena.TestCase


@pytest.mark.soak
@pytest.mark.timeout(1800)
class TestAnyOrderForLong(AnyOrder.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=80)


def test_a_chunk_that_fits_between_no_pins_does_not_empty_the_cache() -> None:
    with core_of(100) as core:
        session = core.begin_session()
        singles = [chain(str(number), 1) for number in range(100)]
        for number, keys in enumerate(singles):
            store(core, session, number, keys)
        for lease, pinned in enumerate(singles[1::2], 1000):  # every second page: no two free ones meet
            core.load(session, lease, ONE, pinned[0])
        granted = reserve(core, session, 999, chain("large", 1), space=TWO)
        assert (granted.chunks, granted.stopped) == ([], Reason.NO_ROOM)
        assert len(core._index) >= 80


# -- writers that hang, and long clears ----------------------------------------------------------------------


def test_a_writer_that_hangs_loses_its_claim_and_keeps_its_slots() -> None:
    now_s = 100.0
    keys = chain("a", 3)
    with core_of(8) as core:
        core._clock = lambda: now_s
        hung, other = core.begin_session(), core.begin_session()
        first = reserve(core, hung, 1, keys)
        now_s += WRITER_PATIENCE_S
        assert reserve(core, other, 2, keys).chunks == [], "it may still be copying"
        core.abort(other, 2)
        now_s += 1
        second = reserve(core, other, 3, keys)
        assert second.chunks == [0, 1, 2]
        assert not set(unpack_places(first.places)) & set(unpack_places(second.places))
        core.commit(other, 3)
        assert load(core, other, 4, keys) == 3
        core.release(other, 4)
        core.commit(hung, 1)  # it wakes up
        assert load(core, other, 5, keys) == 3
        core.release(other, 5)
        at_rest(core, 3, 3 * PAGE)


def test_an_unknown_lease_has_nothing_more() -> None:
    with core_of(4) as core:
        session = core.begin_session()
        with pytest.raises(ProtocolError, match="there is no lease 7"):
            core.more(session, 7)


def test_a_long_clear_goes_in_slices_and_others_are_served_between_them() -> None:
    with core_of(4_000) as core:
        session = core.begin_session()
        for number in range(400):
            store(core, session, number, chain(str(number), 10))
        removed = 0
        for number, slice_ in enumerate(core.clear(None)):
            assert 0 < slice_ <= 1_000
            removed += slice_
            keys = chain(f"new {number}", 2)
            store(core, session, 10_000 + number, keys)
            assert held(core, keys) == 2
        assert removed == 4_000
        assert core.memory_stats().chunks == 2 * 4, "what came meanwhile stays"


def test_a_failed_read_takes_only_its_chunk_and_what_follows() -> None:
    keys = chain("a", 4)
    with core_of(8) as core:
        session = core.begin_session()
        reserve(core, session, 1, keys)
        core.commit(session, 1, {ONE + keys[2]})
        assert held(core, keys) == 2
        at_rest(core, 2, 2 * PAGE)
