"""Bringing chunks up from a slower tier: one read for all who wait, straight into the arena."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.policy.cost import LoadCost
from stepwell.server.backlog import Backlog
from stepwell.server.core import Core
from stepwell.tiers.base import Get, Tier
from stepwell.tiers.memory import Slot
from stepwell.types import SPACE_ID_BYTES, ChunkId, SpaceId
from stepwell.wire import Run, unpack_places

BATCH_BYTES = 32 << 20
"""Read at once, or an eighth of memory if that is less. Large enough that a drive's latency does not matter
(0.1 ms for 10 ms of transfer), small enough that a prompt's first chunks come before its last are read."""

BATCHES_AT_ONCE = 2  # so that the drive is busy while one batch is checked


@dataclass(frozen=True)
class _Batch:
    """Neighbours of one prompt."""

    space: SpaceId
    parent: ChunkId | None  # before the first
    chunks: list[ChunkId]


class Promotion:
    """Reads what is wanted in the order it was wanted in."""

    def __init__(self, core: Core, tier: Tier) -> None:
        """`run` does the work."""
        self._core = core
        self._tier = tier
        self._session = core.begin_session()
        self._numbers = itertools.count(1)
        self._backlog: Backlog[_Batch] = Backlog()
        self._under_way: set[ChunkId] = set()
        self.chunks = 0  # brought up so far
        self.cost = LoadCost()
        self._clock = asyncio.get_running_loop().time
        self._ended_s = 0.0  # when the last read did

    @property
    def queued_chunks(self) -> int:
        """Asked for and not here yet."""
        return len(self._under_way)

    def coming(self, chunk: ChunkId) -> bool:
        return chunk in self._under_way

    def want(self, space: SpaceId, parent: ChunkId | None, chunks: Sequence[ChunkId]) -> None:
        """Bring up these neighbours of one prompt, `parent` before them, but those on their way already."""
        batch_bytes = min(BATCH_BYTES, self._core.memory.limit_bytes // 8)
        chunks_most = max(1, batch_bytes // self._core.chunk_bytes(space))
        batch: list[ChunkId] = []
        before = parent
        for chunk in chunks:
            known = chunk in self._under_way
            if batch and (known or len(batch) == chunks_most):
                self._enqueue(_Batch(space, parent, batch))
                batch = []
            if not known:
                if not batch:
                    parent = before
                batch.append(chunk)
            before = chunk
        if batch:
            self._enqueue(_Batch(space, parent, batch))

    def _enqueue(self, batch: _Batch) -> None:
        self._under_way.update(batch.chunks)
        self._backlog.add(batch)

    async def run(self) -> None:
        """Work until cancelled."""
        await self._backlog.work(BATCHES_AT_ONCE, lambda: self._bring(self._backlog.items.popleft()))

    async def _bring(self, batch: _Batch) -> None:
        core, number = self._core, next(self._numbers)
        parent = None if batch.parent is None else batch.parent[SPACE_ID_BYTES:]
        keys = b"".join(chunk[SPACE_ID_BYTES:] for chunk in batch.chunks)
        (granted,) = core.reserve(self._session, number, [Run(batch.space, parent, keys)])
        nbytes = core.chunk_bytes(batch.space)
        asked = [
            Get(batch.chunks[at], core.memory.view(Slot(offset, nbytes)))
            for at, offset in zip(granted.chunks, unpack_places(granted.places), strict=True)
        ]
        begun_s = self._clock()
        try:
            outcomes = await self._tier.get(asked)
        except BaseException:
            core.abort(self._session, number)
            raise
        finally:
            for get in asked:
                get.into.release()
            self._under_way.difference_update(batch.chunks)
        # Of two reads at once, the second is charged from the end of the first.
        ended_s = self._clock()
        self.cost.observe(outcomes.count(None) * nbytes, ended_s - max(begun_s, self._ended_s))
        self._ended_s = ended_s
        failed = {get.chunk for get, why in zip(asked, outcomes, strict=True) if why is not None}
        core.commit(self._session, number, failed)
        self.chunks += len(asked) - len(failed)
