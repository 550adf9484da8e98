"""One engine: continuous batching with chunked prefill, step by step, many equal steps at once.

Steps are as vLLM's: running decodes first, then parts of prompts in order of arrival until the step is full.
While no prompt is being computed, nothing changes from one step to the next but the lengths of contexts, so
the engine goes to the next end of a request in one event; who arrives meanwhile cuts that short at a step's
end.
"""

from heapq import heapify, heappop, heappush
from typing import TypeAlias

from stepwell.policy.cost import PrefillSpeed
from stepwell.replay.sim.gpu import GpuCache
from stepwell.replay.sim.job import Job
from stepwell.replay.sim.link import Link
from stepwell.replay.sim.prices import StepPrices
from stepwell.replay.sim.spec import EngineSpec

_Part: TypeAlias = tuple[Job, int]  # tokens of its prompt


class Engine:
    """`Sim` calls `ready`, `loaded`, and `step_end` when the time that `begin` gave has come."""

    def __init__(self, spec: EngineSpec) -> None:
        self.gpu = GpuCache(spec.gpu_blocks)
        self.host_reads = Link(spec.host_bytes_per_s, 0.0)
        self.speed = PrefillSpeed()
        self.busy_s = 0.0
        self.unfinished = 0  # requests, for the choice of an engine
        self._spec = spec
        self._prices = StepPrices(spec)
        self._waiting: list[tuple[int, Job]] = []  # by arrival
        self._loading = 0  # admitted; their blocks come from memory
        self._prompts: list[tuple[int, Job]] = []  # admitted and being computed, by arrival
        self._decodes: list[tuple[int, int, Job]] = []  # (step of its last token, number, job)
        self._steps = 0
        self._context_tokens = 0.0  # of all decodes
        self._parts: list[_Part] = []  # of the step under way
        self._begun_s = 0.0
        self._step_s = 0.0  # one of those under way
        self._steps_under_way = 0
        self.turn = 0  # of steps under way: an end that was put off is told by its number

    @property
    def running(self) -> int:
        return self._loading + len(self._prompts) + len(self._decodes)

    @property
    def is_stepping(self) -> bool:
        return self._steps_under_way > 0

    def wait(self, job: Job) -> None:
        """It waits for its turn from now on."""
        heappush(self._waiting, (job.number, job))

    def next_waiting(self) -> Job | None:
        """The first that waits, while one more may run."""
        return self._waiting[0][1] if self._waiting and self.running < self._spec.batch_requests else None

    def take_waiting(self, is_loading: bool) -> None:
        """The first that waits has its blocks."""
        job = heappop(self._waiting)[1]
        if is_loading:
            self._loading += 1
        else:
            heappush(self._prompts, (job.number, job))

    def loaded(self, job: Job) -> None:
        self._loading -= 1
        heappush(self._prompts, (job.number, job))

    def begin(self, now_s: float) -> float | None:
        """Begin a step, or many equal ones: when they end. None: nothing to do."""
        self._parts = self._next_parts()
        if not self._parts and not self._decodes:
            return None
        decodes = len(self._decodes)
        tokens = sum(part[1] for part in self._parts)
        flop = 0.0
        for job, part in self._parts:
            context = len(job.run) * self._spec.block_tokens - job.left_tokens
            flop += self._prices.prefill_flop(part, max(0, context))
        steps = 1
        context_tokens = self._context_tokens
        if not self._parts:
            steps = self._decodes[0][0] - self._steps
            context_tokens += decodes * steps / 2
        self._step_s = self._prices.step_s(flop, tokens, decodes, context_tokens)
        self._steps_under_way = steps
        self._begun_s = now_s
        self.turn += 1
        return now_s + steps * self._step_s

    def cut_short(self, now_s: float) -> float | None:
        """Somebody has come: the end of the step under way. None: nothing was cut."""
        if self._steps_under_way <= 1:
            return None
        done = min(self._steps_under_way, int((now_s - self._begun_s) / self._step_s) + 1)
        if done == self._steps_under_way:
            return None
        self._steps_under_way = done
        self.turn += 1
        return self._begun_s + done * self._step_s

    def step_end(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """The jobs that have their first token now, and those that have ended."""
        steps, self._steps_under_way = self._steps_under_way, 0
        self._steps += steps
        self.busy_s += now_s - self._begun_s
        self._context_tokens += len(self._decodes) * steps
        tokens = sum(part[1] for part in self._parts)
        if tokens:
            self.speed.observe(tokens, now_s - self._begun_s)
        first: list[Job] = []
        for job, part in self._parts:
            job.left_tokens -= part
            if job.left_tokens == 0:
                first.append(job)
        ended = self._end_decodes()
        if first:
            # Not simply the front: an earlier prompt may have come from memory during the step.
            self._prompts = [(number, job) for number, job in self._prompts if job.left_tokens]
            heapify(self._prompts)
        for job in first:
            job.first_token_s = now_s
            if job.output_tokens == 1:
                ended.append(job)
            else:
                heappush(self._decodes, (self._steps + job.output_tokens - 1, job.number, job))
                self._context_tokens += len(job.run) * self._spec.block_tokens
        for job in ended:
            job.end_s = now_s
            self.gpu.release(job.run, job.entry, job.private_blocks)
            self.unfinished -= 1
        return first, ended

    def _end_decodes(self) -> list[Job]:
        ended = []
        while self._decodes and self._decodes[0][0] <= self._steps:
            job = heappop(self._decodes)[2]
            self._context_tokens -= len(job.run) * self._spec.block_tokens + job.output_tokens - 1
            ended.append(job)
        return ended

    def _next_parts(self) -> list[_Part]:
        room = self._spec.batch_tokens - len(self._decodes)
        parts: list[_Part] = []
        taken: list[tuple[int, Job]] = []
        while room > 0 and self._prompts:
            number, job = heappop(self._prompts)
            taken.append((number, job))
            part = min(room, job.left_tokens)
            parts.append((job, part))
            room -= part
        for each in taken:
            heappush(self._prompts, each)
        return parts
