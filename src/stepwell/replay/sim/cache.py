"""The cache server of all engines, without bytes: memory's index, the tiers below, and their links."""

from collections.abc import Sequence

from stepwell.policy.evict import make_evictor
from stepwell.policy.index import Index
from stepwell.policy.place import UNWRITTEN_SHARE
from stepwell.replay.sim.link import Link
from stepwell.replay.sim.slow import IndexStore, LogStore, SlowStore
from stepwell.replay.sim.spec import SimSpec, TierSpec
from stepwell.replay.store import insert_run
from stepwell.types import ChunkId


class SlowTier:
    """One tier below memory."""

    def __init__(self, spec: TierSpec, store: SlowStore) -> None:
        self.spec = spec
        self.store = store
        self.reads = Link(spec.read_bytes_per_s, spec.latency_s)
        self.writes = Link(spec.write_bytes_per_s, spec.latency_s)
        self.dropped_blocks = 0  # not written, for too much was waiting


class Coming:
    """Chunks on their way up for one request: `run[first + i]` is there at `done_s[i]`, in order."""

    __slots__ = ("done_s", "first", "tiers")

    def __init__(self, first: int) -> None:
        self.first = first
        self.done_s: list[float] = []
        self.tiers: list[str] = []

    @property
    def end_s(self) -> float:
        return self.done_s[-1]


class Cache:
    """Shared by all engines. `Sim` says when things happen."""

    def __init__(self, spec: SimSpec) -> None:
        """Needs at least memory."""
        memory = spec.tiers[0]
        self._block_bytes = spec.engine.block_bytes
        self._capacity_blocks = int(memory.size_bytes / self._block_bytes)
        self._index = Index(make_evictor(spec.eviction))
        self._unwritten_bytes_most = UNWRITTEN_SHARE * memory.size_bytes
        self.memory_reads = Link(memory.read_bytes_per_s, memory.latency_s)
        self.slow = [SlowTier(tier, self._store_of(tier)) for tier in spec.tiers[1:]]
        self._logs = [tier.store for tier in self.slow if isinstance(tier.store, LogStore)]
        self._under_way: dict[ChunkId, tuple[float, str]] = {}

    def _store_of(self, tier: TierSpec) -> SlowStore:
        if tier.name == "disk":
            return LogStore(tier.size_bytes, self._block_bytes, self._in_use)
        return IndexStore(int(tier.size_bytes / self._block_bytes))

    def _in_use(self, chunk: ChunkId) -> bool:
        entry = self._index.get(chunk)
        return entry is not None and (entry.used or entry.children > 0)

    @property
    def memory_blocks(self) -> int:
        return len(self._index)

    def held(self, run: Sequence[ChunkId]) -> int:
        """Leading chunks in memory."""
        return self._index.held_run(run)

    def use(self, run: Sequence[ChunkId]) -> None:
        """An engine loads this run from memory."""
        self._index.use(run)

    def bring(self, run: Sequence[ChunkId], beyond: int, now_s: float) -> Coming | None:
        """Start to read what lies below memory; None when that makes no longer run than `beyond`."""
        first = self._index.held_run(run)
        places = self._below(run, first)
        if not places or first + len(places) <= beyond:
            return None
        coming = Coming(first)
        latest_s = now_s
        number = first
        while number < first + len(places):
            tier = places[number - first]
            start = number
            while number < first + len(places) and places[number - first] is tier:
                chunk = run[number]
                known = self._under_way.get(chunk)
                if known is None:
                    known = (tier.reads.transfer(now_s, self._block_bytes), tier.spec.name)
                    self._under_way[chunk] = known
                latest_s = max(latest_s, known[0])
                coming.done_s.append(latest_s)
                coming.tiers.append(known[1])
                number += 1
            tier.store.use(run, start, number)
        return coming

    def _below(self, run: Sequence[ChunkId], first: int) -> list[SlowTier]:
        """The fastest tier of each leading chunk from `first` on."""
        places: list[SlowTier] = []
        for number in range(first, len(run)):
            tier = next((tier for tier in self.slow if run[number] in tier.store), None)
            if tier is None:
                break
            places.append(tier)
        return places

    def arrived(self, run: Sequence[ChunkId], coming: Coming, end: int) -> None:
        """The chunks of `coming` up to `run[:end]` are in memory now, as far as there is room."""
        held = self._index.held_run(run[:end])
        if coming.first <= held < end:
            self._insert(run, held, end)
        for number in range(coming.first, end):
            self._under_way.pop(run[number], None)

    def store(self, run: Sequence[ChunkId], now_s: float) -> None:
        """An engine has computed all of this run: keep it, and write it down as far as that keeps up."""
        held = self._index.held_run(run)
        new = self._insert(run, held, len(run))
        end = held + len(new)
        for tier in self.slow:
            room_bytes = self._unwritten_bytes_most - tier.writes.backlog_bytes(now_s)
            fitting = max(0, int(room_bytes / self._block_bytes))
            last = min(end, held + fitting)
            tier.dropped_blocks += end - last
            written = tier.store.store(run, held, last)
            tier.writes.transfer(now_s, len(written) * self._block_bytes)

    def _insert(self, run: Sequence[ChunkId], held: int, end: int) -> list[ChunkId]:
        return insert_run(
            self._index, run, held, end, capacity_blocks=self._capacity_blocks, evicted=self._evicted
        )

    def _evicted(self, chunk: ChunkId, used: bool) -> None:
        if used:
            for log in self._logs:
                log.evicted_used(chunk)
