"""A worker's half of an engine connector: it maps the arena and copies.

Copies are made by a `Copier`; on a CPU they are done when its calls return, on a GPU they run on a
stream of their own and are reported by a later step.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from stepwell.client import ArenaClient
from stepwell.engines.compare import difference
from stepwell.engines.jobs import CopyJob, Done, StepJobs
from stepwell.engines.pages import Bytes
from stepwell.tiers.arena import ArenaMap

logger = logging.getLogger(__name__)


class Copier(Protocol):
    """Moves blocks between an arena and the pages of one rank. Every copy gets the next number, from 1."""

    def load(self, arena: ArenaMap, offsets: Sequence[int], blocks: Sequence[int]) -> int:
        """Arena to pages; whatever the engine runs next sees the loaded bytes. Returns the copy's number."""

    def store(self, arena: ArenaMap, offsets: Sequence[int], blocks: Sequence[int]) -> int:
        """Pages to arena, of all that the engine has run so far. Returns the copy's number."""

    def read(self, block: int) -> Bytes:
        """One block's pages as the engine left them, of all layers, in the order of a chunk."""

    def fence(self) -> None:
        """Whatever the engine runs next may overwrite pages that are still being stored."""

    def finished(self) -> int:
        """All copies up to this number have ended."""


class WorkerSide:
    """One for each rank. Methods follow the order of vLLM's worker connector within a step."""

    def __init__(
        self, arenas: ArenaClient, copier: Copier, rank: int, stripe_bytes: int, element: str = ""
    ) -> None:
        """`element` is the type of the pages' elements, as "bfloat16"; "" where only equal bytes will do."""
        self._element = element
        self._arenas = arenas
        self._copier = copier
        self._distance = rank * stripe_bytes
        self._loading: dict[int, int] = {}  # copies that have begun: lease -> the copy's number
        self._storing: dict[int, int] = {}  # reservation -> the copy's number
        self._done = Done()
        self._failed_blocks: set[int] = set()

    def begin_step(self) -> None:
        """Before anything of a step runs: its blocks may be those of a request that has ended."""
        self._arenas.begin_step()
        self._copier.fence()

    def load(self, jobs: StepJobs) -> None:
        """Before the forward pass."""
        for job in jobs.loads:
            arena = self._arenas.arena_of(job.server_id)
            if arena is None:
                # Cannot be, for mappings outlive their server by the steps that were scheduled before; if
                # it is, the engine has to compute these blocks after all.
                logger.error(
                    "the arena of server %s is not mapped: %d blocks lost", job.server_id, len(job.blocks)
                )
                self._failed_blocks.update(job.blocks)
                self._done.loads[job.number] += 1
            else:
                self._loading[job.number] = self._copier.load(arena, self._mine(job), job.blocks)
        self._arenas.loaded()

    def store(self, jobs: StepJobs) -> None:
        """After the forward pass."""
        for job in jobs.compares:
            self._compare(job)
        for job in jobs.stores:
            arena = self._arenas.arena_of(job.server_id)
            if arena is None:
                self._done.failed_stores.add(job.number)
                self._done.stores[job.number] += 1
                continue
            self._storing[job.number] = self._copier.store(arena, self._mine(job), job.blocks)

    def _compare(self, job: CopyJob) -> None:
        arena = self._arenas.arena_of(job.server_id)
        largest = 0.0
        if arena is not None:  # else there is nothing left to compare with, nor to serve
            memory = np.frombuffer(arena.buffer, np.uint8)
            for offset, block in zip(self._mine(job), job.blocks, strict=True):
                fresh = self._copier.read(block)
                stored = memory[offset : offset + fresh.nbytes]
                largest = max(largest, difference(stored, fresh, self._element))
        self._done.compared(job.number, largest)

    def take_done(self) -> Done:
        """At the end of a step: what was finished since the last one."""
        self._arenas.end_step()
        finished = self._copier.finished()
        _move(self._loading, self._done.loads, finished)
        _move(self._storing, self._done.stores, finished)
        done, self._done = self._done, Done()
        return done

    def take_failed_blocks(self) -> set[int]:
        """Blocks that could not be loaded as promised."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _mine(self, job: CopyJob) -> list[int]:
        return [offset + self._distance for offset in job.offsets]


def _move(begun: dict[int, int], done: Counter[int], finished: int) -> None:
    for number in [number for number, copy in begun.items() if copy <= finished]:
        del begun[number]
        done[number] += 1
