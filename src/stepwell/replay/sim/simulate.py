"""The simulation: a heap of events, a clock that jumps, and who is asked at each."""

import itertools
from collections.abc import Callable
from heapq import heappop, heappush

from stepwell.replay.sim.cache import Cache
from stepwell.replay.sim.engine import Engine
from stepwell.replay.sim.job import Job
from stepwell.replay.sim.result import Served, SimResult, TierUse, summarize
from stepwell.replay.sim.spec import SimSpec
from stepwell.replay.traces.row import Trace


class SimError(ValueError):
    """What cannot be simulated; the message says why."""


def simulate(trace: Trace, spec: SimSpec) -> SimResult:
    """Every request of the trace, at its time of arrival. Raises SimError."""
    if trace.block_tokens is None and trace.rows:
        raise SimError("this trace has no prefix information: reuse cannot be studied with it")
    if spec.engine.gpu_blocks < 1:
        raise SimError(
            f"the model leaves no room for its cache on {spec.engine.gpus} GPU(s) of "
            f"{spec.engine.gpu.memory_gib:g} GiB: use more a replica"
        )
    return _Sim(trace, spec).run()


class _Sim:
    def __init__(self, trace: Trace, spec: SimSpec) -> None:
        self._spec = spec
        self._trace = trace
        # Memory that holds not one block is no cache at all.
        has_cache = bool(spec.tiers) and spec.tiers[0].size_bytes >= spec.engine.block_bytes
        self._cache = Cache(spec) if has_cache else None
        self._engines = [Engine(spec.engine) for _ in range(spec.engines)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._served: list[Served] = []
        self._refused = 0
        self._now_s = 0.0

    def run(self) -> SimResult:
        chunks = [block.to_bytes(8, "big") for block in range(self._trace.blocks)]
        block_tokens = self._spec.engine.block_tokens
        rows = enumerate(self._trace.rows)
        arriving = next(rows, None)
        while arriving is not None or self._events:
            if arriving is not None and (not self._events or arriving[1].arrival_s <= self._events[0][0]):
                number, row = arriving
                self._now_s = row.arrival_s
                run = [chunks[block] for block in row.blocks[: row.input_tokens // block_tokens]]
                self._arrive(Job(number, row, run, block_tokens), row.arrival_s)
                arriving = next(rows, None)
            else:
                now_s, _, act = heappop(self._events)
                self._now_s = now_s
                act(now_s)
        return self._result()

    def _at(self, time_s: float, act: Callable[[float], None]) -> None:
        heappush(self._events, (time_s, next(self._numbers), act))

    def _arrive(self, job: Job, now_s: float) -> None:
        engine = min(self._engines, key=lambda each: each.unfinished)
        if not engine.gpu.fits_ever(job.run, job.private_blocks):
            self._refused += 1
            return
        engine.unfinished += 1
        if self._cache is not None:
            job.coming = self._cache.bring(job.run, engine.gpu.held(job.run), now_s)
        if job.coming is None:
            self._ready(engine, job, now_s)
            return
        coming, block_tokens = job.coming, self._spec.engine.block_tokens
        # As the server's own scheduler: it waits as long as computing the same would take.
        wait_until_s = now_s + engine.speed.seconds(len(coming.done_s) * block_tokens)
        if coming.end_s <= wait_until_s:
            self._at(coming.end_s, lambda at_s: self._all_came(engine, job, at_s))
        else:
            self._at(wait_until_s, lambda at_s: self._waited(engine, job, at_s))
            self._at(coming.end_s, lambda at_s: self._came_late(job))

    def _all_came(self, engine: Engine, job: Job, now_s: float) -> None:
        self._take_arrived(job, now_s)
        self._ready(engine, job, now_s)

    def _waited(self, engine: Engine, job: Job, now_s: float) -> None:
        self._take_arrived(job, now_s)
        self._ready(engine, job, now_s)

    def _came_late(self, job: Job) -> None:
        if self._cache is not None and job.coming is not None:
            self._cache.arrived(job.run, job.coming, job.coming.first + len(job.coming.done_s))

    def _take_arrived(self, job: Job, now_s: float) -> None:
        coming = job.coming
        if self._cache is None or coming is None:
            return
        count = sum(done_s <= now_s for done_s in coming.done_s)
        self._cache.arrived(job.run, coming, coming.first + count)
        for tier in coming.tiers[:count]:
            job.slow_blocks[tier] = job.slow_blocks.get(tier, 0) + 1

    def _ready(self, engine: Engine, job: Job, now_s: float) -> None:
        engine.wait(job)
        if not engine.is_stepping:
            self._step(engine, now_s)
            return
        end_s = engine.cut_short(now_s)
        if end_s is not None:
            self._at_step_end(engine, end_s)

    def _step(self, engine: Engine, now_s: float) -> None:
        """Admit who may run now, and begin the next step."""
        while (job := engine.next_waiting()) is not None and self._admit(engine, job, now_s):
            pass
        end_s = engine.begin(now_s)
        if end_s is not None:
            self._at_step_end(engine, end_s)

    def _at_step_end(self, engine: Engine, end_s: float) -> None:
        turn = engine.turn
        self._at(end_s, lambda at_s: self._step_end(engine, turn, at_s))

    def _step_end(self, engine: Engine, turn: int, now_s: float) -> None:
        if turn != engine.turn:
            return  # it was cut short
        first, ended = engine.step_end(now_s)
        if self._cache is not None:
            for job in first:
                self._cache.store(job.run, now_s)
        for job in ended:
            self._served.append(Served.of(job, self._spec.engine.block_tokens))
        self._step(engine, now_s)

    def _admit(self, engine: Engine, job: Job, now_s: float) -> bool:
        """Give it its blocks, and begin to load what memory has of them. False: no room yet."""
        if not engine.gpu.has_room(job.run, job.private_blocks):
            return False
        held = engine.gpu.held(job.run)
        job.entry = engine.gpu.admit(job.run, held, job.private_blocks)
        in_memory = held if self._cache is None else max(held, self._cache.held(job.run))
        self._count_hits(job, held, in_memory)
        engine.take_waiting(is_loading=in_memory > held)
        if self._cache is not None and in_memory > held:
            self._cache.use(job.run[:in_memory])
            nbytes = (in_memory - held) * self._spec.engine.block_bytes
            loaded_s = max(
                self._cache.memory_reads.transfer(now_s, nbytes), engine.host_reads.transfer(now_s, nbytes)
            )
            self._at(loaded_s, lambda at_s: self._loaded(engine, job, at_s))
        return True

    def _count_hits(self, job: Job, held: int, in_memory: int) -> None:
        """Whose hits they are: the GPU's own, then of those in memory, what came up for this request."""
        block_tokens = self._spec.engine.block_tokens
        # One token has to be computed even where all are held.
        job.computed_tokens = max(1, job.computed_tokens - in_memory * block_tokens)
        job.left_tokens = job.computed_tokens
        job.gpu_blocks = held
        came = sum(job.slow_blocks.values())
        too_many = max(0, came - (in_memory - held))
        for tier in sorted(job.slow_blocks):
            taken = min(too_many, job.slow_blocks[tier])
            job.slow_blocks[tier] -= taken
            too_many -= taken
        job.memory_blocks = in_memory - held - sum(job.slow_blocks.values())

    def _loaded(self, engine: Engine, job: Job, now_s: float) -> None:
        engine.loaded(job)
        if not engine.is_stepping:
            self._step(engine, now_s)
            return
        end_s = engine.cut_short(now_s)
        if end_s is not None:
            self._at_step_end(engine, end_s)

    def _result(self) -> SimResult:
        uses = []
        if self._cache is not None:
            memory = self._cache.memory_reads
            uses.append(
                TierUse("memory", self._cache.memory_blocks, memory.moved_bytes, memory.busy_s, 0.0, 0)
            )
            for tier in self._cache.slow:
                uses.append(
                    TierUse(
                        tier.spec.name,
                        len(tier.store),
                        tier.reads.moved_bytes,
                        tier.reads.busy_s,
                        tier.writes.moved_bytes,
                        tier.dropped_blocks,
                    )
                )
        busy_s = sum(engine.busy_s for engine in self._engines)
        return summarize(self._served, self._refused, self._now_s, busy_s / self._spec.engines, uses)
