"""The worker's half: which job gets which bytes, and what is told when."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
from engine_kit import GatedCopier

from stepwell.engines.jobs import CopyJob, Done, StepJobs
from stepwell.engines.worker import WorkerSide
from stepwell.tiers.arena import ArenaMap, create_arena

PAGE_BYTES = 64
STRIPE_BYTES = 2 * PAGE_BYTES


class Arenas:
    """One server's arena, and what it was told of steps."""

    def __init__(self, arena: ArenaMap) -> None:
        self._arena = arena
        self.told: list[str] = []

    def begin_step(self) -> None:
        self.told.append("begin")

    def loaded(self) -> None:
        self.told.append("loaded")

    def end_step(self) -> None:
        self.told.append("end")

    def arena_of(self, server_id: str) -> ArenaMap | None:
        return self._arena if server_id == "here" else None


@pytest.fixture
def arena() -> Iterator[ArenaMap]:
    fd, arena = create_arena(1 << 16)
    yield arena
    arena.close()
    os.close(fd)


class Rank:
    """A worker with eight blocks whose pages show whose they are."""

    def __init__(self, arena: ArenaMap, rank: int) -> None:
        self.layer = np.zeros((8, PAGE_BYTES), np.uint8)
        self.layer[:] = 100 * rank + np.arange(8, dtype=np.uint8)[:, None]
        self.copier = GatedCopier([self.layer])
        self.arenas = Arenas(arena)
        self.worker = WorkerSide(self.arenas, self.copier, rank, STRIPE_BYTES)  # type: ignore[arg-type]


def job(number: int, offsets: list[int], blocks: list[int], server_id: str = "here") -> CopyJob:
    return CopyJob(number, server_id, offsets, blocks)


def test_every_rank_has_its_stripe(arena: ArenaMap) -> None:
    ranks = [Rank(arena, rank) for rank in (0, 1)]
    stores = StepJobs(stores=[job(1, [4096, 4096 + PAGE_BYTES], [3, 5])])
    for rank in ranks:
        rank.worker.store(stores)
        rank.copier.open()
    pages = np.frombuffer(arena.buffer, np.uint8)[4096 : 4096 + 4 * PAGE_BYTES].reshape(4, PAGE_BYTES)
    assert [set(page) for page in pages.tolist()] == [{3}, {5}, {103}, {105}]
    for rank, expected in zip(ranks, (3, 103), strict=True):
        rank.worker.load(StepJobs(loads=[job(2, [4096], [7])]))
        assert set(rank.layer[7].tolist()) == {expected}


def test_a_job_is_told_once_when_its_copy_has_ended(arena: ArenaMap) -> None:
    rank = Rank(arena, 0)
    rank.worker.store(StepJobs(stores=[job(11, [0], [1])]))
    assert not rank.worker.take_done()
    rank.copier.open()
    rank.worker.store(StepJobs(stores=[job(12, [4096], [2])]))
    done = rank.worker.take_done()
    assert (dict(done.stores), dict(done.loads), done.failed_stores) == ({11: 1}, {}, set())
    rank.worker.begin_step()
    assert dict(rank.worker.take_done().stores) == {12: 1}
    assert not rank.worker.take_done()


def test_loads_and_stores_may_have_equal_numbers(arena: ArenaMap) -> None:
    rank = Rank(arena, 0)
    rank.worker.load(StepJobs(loads=[job(5, [0], [1])]))
    rank.worker.store(StepJobs(stores=[job(5, [4096], [2])]))
    assert (dict(rank.worker.take_done().loads), rank.copier.queued) == ({5: 1}, 1)
    rank.copier.open()
    assert dict(rank.worker.take_done().stores) == {5: 1}


def test_a_server_whose_arena_is_not_mapped(arena: ArenaMap) -> None:
    rank = Rank(arena, 0)
    before = rank.layer.copy()
    away = "away"
    rank.worker.load(StepJobs(loads=[job(1, [0, 64], [1, 2], away), job(2, [0], [3])]))
    rank.worker.store(StepJobs(stores=[job(3, [0], [4], away)]))
    done = rank.worker.take_done()
    # Every job is told, done or not, or others would wait for it for ever.
    assert (dict(done.loads), dict(done.stores), done.failed_stores) == ({1: 1, 2: 1}, {3: 1}, {3})
    assert rank.worker.take_failed_blocks() == {1, 2}
    assert rank.worker.take_failed_blocks() == set()
    assert np.array_equal(np.delete(rank.layer, 3, 0), np.delete(before, 3, 0))


def test_arenas_are_told_of_a_steps_loads_after_they_are_copied(arena: ArenaMap) -> None:
    rank = Rank(arena, 0)
    rank.worker.begin_step()
    rank.copier.during = lambda: rank.arenas.told.append("copying")
    rank.worker.load(StepJobs(loads=[job(1, [0], [1])]))
    rank.worker.store(StepJobs())
    assert rank.arenas.told == ["begin", "copying", "loaded"]
    rank.worker.take_done()
    assert rank.arenas.told[3:] == ["end"]


def test_what_ranks_and_steps_report_adds_up() -> None:
    one, other = Done(), Done()
    assert not one
    one.loads.update({1: 1})
    one.stores.update({2: 1})
    other.stores.update({2: 1, 3: 1})
    other.failed_stores.add(3)
    total = one.add(other)
    assert total
    assert (dict(total.loads), dict(total.stores), total.failed_stores) == ({1: 1}, {2: 2, 3: 1}, {3})
