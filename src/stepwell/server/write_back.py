"""Writing chunks down to a slower tier in the background, as far as it keeps up."""

from collections import Counter
from collections.abc import Awaitable, Callable

from stepwell.policy.index import Entry
from stepwell.policy.place import UNWRITTEN_SHARE
from stepwell.server.backlog import Backlog
from stepwell.server.core import Core
from stepwell.tiers.base import Put, Tier
from stepwell.tiers.memory import Slot
from stepwell.types import ChunkId, Reason

BATCH_BYTES = 32 << 20
"""Written at once, and pinned so long: at most, and no more than an eighth of memory."""

BATCHES_AT_ONCE = 2  # so that the drive is busy while the checksums of one are made

_TRIES_MOST = 3


class WriteBack:
    """Writes what was stored, oldest first."""

    def __init__(
        self,
        core: Core,
        tier: Tier,
        holds: Callable[[ChunkId], bool],
        make_room: Callable[[], Awaitable[bool]],
    ) -> None:
        """`holds` says what `tier` has already; `make_room` makes some, and says whether it could."""
        self._core = core
        self._tier = tier
        self._holds = holds
        self._make_room = make_room
        self._backlog: Backlog[tuple[ChunkId, int]] = Backlog()
        self._queued_bytes = 0
        self._queue_bytes_most = int(UNWRITTEN_SHARE * core.memory.limit_bytes)
        self._batch_bytes_most = min(BATCH_BYTES, core.memory.limit_bytes // 8)
        self._writing = 0
        self.chunks = 0  # written so far
        self.dropped: Counter[Reason] = Counter()

    @property
    def queued_chunks(self) -> int:
        """Offered, and neither written nor dropped yet."""
        return len(self._backlog) + self._writing

    def offer(self, chunk: ChunkId, nbytes: int) -> None:
        """Write this chunk when there is time, unless it is there, or too much is waiting already."""
        if self._holds(chunk):
            return
        if self._backlog and self._queued_bytes + nbytes > self._queue_bytes_most:
            self.dropped[Reason.TOO_SLOW] += 1
            return
        self._backlog.add((chunk, nbytes))
        self._queued_bytes += nbytes

    async def run(self) -> None:
        """Work until cancelled."""
        await self._backlog.work(BATCHES_AT_ONCE, lambda: self._write(self._batch()))

    def _batch(self) -> list[tuple[Entry, Slot]]:
        batch: list[tuple[Entry, Slot]] = []
        batch_bytes = 0
        waiting = self._backlog.items
        while waiting and (not batch or batch_bytes + waiting[0][1] <= self._batch_bytes_most):
            chunk, nbytes = waiting.popleft()
            self._queued_bytes -= nbytes
            held = None if self._holds(chunk) else self._core.hold(chunk)
            if held is not None:
                batch.append(held)
                batch_bytes += nbytes
            elif not self._holds(chunk):
                self.dropped[Reason.TOO_SLOW] += 1  # evicted while it waited
        self._writing += len(batch)  # here, not when it begins: in between nobody would know of them
        return batch

    async def _write(self, batch: list[tuple[Entry, Slot]]) -> None:
        left = batch
        tries = 0  # in vain: a chunk that is larger than what is made free never fits
        views = {entry.chunk: self._core.memory.view(slot).toreadonly() for entry, slot in batch}
        try:
            while left:
                outcomes = await self._tier.put([Put(entry.chunk, views[entry.chunk]) for entry, _ in left])
                self.chunks += outcomes.count(None)
                refused = [held for held, why in zip(left, outcomes, strict=True) if why is Reason.NO_ROOM]
                for why in outcomes:
                    if why is not None and why is not Reason.NO_ROOM:
                        self.dropped[why] += 1
                tries = 0 if len(refused) < len(left) else tries + 1
                if refused and (tries == _TRIES_MOST or not await self._make_room()):
                    self.dropped[Reason.NO_ROOM] += len(refused)
                    break
                left = refused
        finally:
            for view in views.values():
                view.release()
            for entry, slot in batch:
                self._core.let_go(entry, slot)
            self._writing -= len(batch)
