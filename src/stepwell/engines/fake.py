"""An engine without a model, for tests and trials: it schedules, preempts and forgets like a real one.

Its "attention state" of a token is a hash of all tokens up to it, so every page that it reads shows
whether it holds exactly what this prompt computed. It reads all pages of a request before each step, as
attention does, and raises WrongBytes when one is not right.

It drives the same `SchedulerSide` and `WorkerSide` as vLLM's connector, in the order of vLLM's calls.
"""

import hashlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stepwell.client import CALL_TIMEOUT_S, ArenaClient, Client, Dial
from stepwell.engines.geometry import Geometry
from stepwell.engines.jobs import StepJobs
from stepwell.engines.pages import Bytes, HostCopier
from stepwell.engines.scheduler import SchedulerSide
from stepwell.engines.spaces import Adapter, Spaces
from stepwell.engines.worker import Copier, WorkerSide
from stepwell.layout import EngineSpace, fingerprint
from stepwell.types import Reason

_TOKEN_BYTES = 32


class WrongBytes(AssertionError):
    """A page does not hold what its tokens would compute."""


@dataclass(frozen=True)
class FakeAdapter:
    """A LoRA adapter, as far as it matters here."""

    lora_path: str


@dataclass(eq=False)
class FakeRequest:
    """Has the attributes of vLLM's request that connectors read."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    max_new_tokens: int
    salt: str | None
    lora_request: FakeAdapter | None
    skip_reading_prefix_cache: bool
    block_tokens: int
    image: tuple[int, bytes] | None = None  # position of its first token, and what it shows
    state: str = "waiting"  # waiting, running, finished, aborted
    blocks: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    engine_hit_tokens: int = 0  # of the prompt, when it was first scheduled
    stepwell_hit_tokens: int = 0
    prompt_computed_tokens: int = 0  # counted as they are computed, again after a preemption
    first_scheduled: bool = False
    preemptions: int = 0
    told_blocks: int = 0  # how many of its blocks the connector has been told of
    block_hashes: list[bytes] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)  # per token: what its attention state is made of

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def new_tokens(self) -> list[int]:
        """The answer so far."""
        return self.tokens[self.num_prompt_tokens :]

    def extend(self) -> None:
        """Bring hashes up to the tokens there are."""
        adapter = None if self.lora_request is None else self.lora_request.lora_path
        previous = self.chain[-1] if self.chain else fingerprint(("fake", self.salt, adapter))
        for position, token in enumerate(self.tokens[len(self.chain) :], len(self.chain)):
            if self.image is not None and position == self.image[0]:
                previous = fingerprint(("image", previous, self.image[1]))
            previous = hashlib.sha256(previous + token.to_bytes(4, "little")).digest()
            self.chain.append(previous)
        whole = len(self.tokens) // self.block_tokens
        for block in range(len(self.block_hashes), whole):
            self.block_hashes.append(self.chain[(block + 1) * self.block_tokens - 1])


@dataclass(frozen=True)
class _Work:
    """What one step computes of one request; its blocks as they were when the step was scheduled."""

    request: FakeRequest
    tokens: int
    blocks: list[int]


@dataclass(frozen=True)
class FakeStep:
    """One step, scheduled and not yet executed: what a worker has been sent."""

    work: list[_Work]
    jobs: StepJobs


class FakeEngine:
    """One scheduler and one worker in this process, on a cache server reached by `dial` (None: uncached)."""

    def __init__(
        self,
        dial: Dial | None,
        *,
        num_blocks: int = 64,
        block_tokens: int = 16,
        layers: int = 2,
        chunk_blocks: int = 1,
        step_tokens: int = 64,
        model: str = "fake",
        prefix_caching: bool = True,
        adapter_files: bytes = b"",
        copier: Callable[[Sequence[Bytes]], Copier] = HostCopier,
        call_timeout_s: float = CALL_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.block_tokens = block_tokens
        self.step_tokens = step_tokens
        self.prefix_caching = prefix_caching
        self._adapter_files = adapter_files
        self.requests: list[FakeRequest] = []
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        # Block 0 is never used, as in vLLM. Free blocks keep their content until they are taken again.
        self.free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self._holders: dict[int, int] = {}
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        page_bytes = block_tokens * _TOKEN_BYTES
        self.layers = [np.zeros((num_blocks, page_bytes), np.uint8) for _ in range(layers)]
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        self.client: Client | None = None
        self._arenas: ArenaClient | None = None
        if dial is not None:
            geometry = Geometry(block_tokens, layers * page_bytes, chunk_blocks, ranks=1)
            self._connect(dial, geometry, model, copier(self.layers), call_timeout_s)

    def _connect(
        self, dial: Dial, geometry: Geometry, model: str, copier: Copier, call_timeout_s: float
    ) -> None:
        identity = EngineSpace(
            "fake",
            "1",
            model,
            b"",
            None,
            "uint8",
            geometry.block_tokens,
            geometry.chunk_blocks,
            (),
            b"",
            "sha256",
            1,
            1,
        )
        session = f"fake-{uuid.uuid4().hex}"
        self._arenas = ArenaClient(dial, session, layout=fingerprint(("fake", len(self.layers))))
        self._arenas.connect()
        self.client = Client(dial, session, call_timeout_s)
        self.client.connect()
        self.worker = WorkerSide(self._arenas, copier, 0, geometry.stripe_bytes)
        spaces = Spaces(self.client, geometry, lambda: identity, self._adapter_digest)
        self.scheduler = SchedulerSide(self.client, spaces, geometry, self._clock)

    def _adapter_digest(self, adapter: Adapter) -> bytes | Reason:
        return fingerprint(("adapter", adapter.lora_path, self._adapter_files))

    # -- what a user does ------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 1,
        *,
        salt: str | None = None,
        adapter: str | None = None,
        bypass: bool = False,
        image: tuple[int, bytes] | None = None,
    ) -> FakeRequest:
        """Queue a prompt."""
        request = FakeRequest(
            uuid.uuid4().hex,
            list(prompt),
            len(prompt),
            max_new_tokens,
            salt,
            None if adapter is None else FakeAdapter(adapter),
            bypass,
            self.block_tokens,
            image,
        )
        request.extend()
        self.requests.append(request)
        self.waiting.append(request)
        if self.scheduler is not None:
            self.scheduler.arrived(request)
        return request

    def ask(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 1,
        *,
        salt: str | None = None,
        adapter: str | None = None,
        bypass: bool = False,
        image: tuple[int, bytes] | None = None,
    ) -> FakeRequest:
        """Queue a prompt and run until everything is done."""
        request = self.add(prompt, max_new_tokens, salt=salt, adapter=adapter, bypass=bypass, image=image)
        self.run()
        return request

    def run(self, most_steps: int = 100_000) -> None:
        """Step until nothing is left, copies included. Raises RuntimeError when that does not end."""
        for _ in range(most_steps):
            copying = self.scheduler is not None and self.scheduler.copying
            if not self.waiting and not self.running and not copying:
                return
            self.step()
        raise RuntimeError(f"not done after {most_steps} steps")

    def abort(self, request: FakeRequest) -> None:
        """As when a client goes away, at any moment between two steps."""
        if request.state in ("waiting", "running"):
            self._end(request, "aborted")

    def close(self) -> None:
        """Stop in an orderly way."""
        if self.client is not None:
            self.client.close()
        if self._arenas is not None:
            self._arenas.close()

    # -- one step --------------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule, load, compute, store, tell."""
        self.execute(self.schedule())

    def schedule(self) -> FakeStep:
        """The scheduler's half of a step. Requests may be aborted before the other half runs."""
        scheduled = self._schedule()
        work = [_Work(request, tokens, list(request.blocks)) for request, tokens in scheduled]
        if self.scheduler is None:
            return FakeStep(work, StepJobs())
        tokens = sum(tokens for _, tokens in scheduled)
        anew = {w.request.request_id: self._news(w) for w in work}
        computed = {w.request.request_id: w.request.computed_tokens + w.tokens for w in work}
        return FakeStep(work, self.scheduler.step(anew, computed, tokens))

    @staticmethod
    def _news(work: _Work) -> tuple[bool, list[int]]:
        told, work.request.told_blocks = work.request.told_blocks, len(work.blocks)
        return told == 0, work.blocks[told:]

    def execute(self, step: FakeStep) -> None:
        """The worker's half, and what the scheduler makes of its output."""
        if self.worker is not None:
            self.worker.begin_step()
            self.worker.load(step.jobs)
        for work in step.work:
            self._compute(work)
        if self.worker is not None and self.scheduler is not None:
            self.worker.store(step.jobs)
            if failed := self.worker.take_failed_blocks():
                raise WrongBytes(f"blocks {sorted(failed)} were promised and not loaded")
            self.scheduler.step_ended()
            if done := self.worker.take_done():
                self.scheduler.copied(done)
        for work in step.work:
            request = work.request
            if request.state == "running" and len(request.new_tokens) >= request.max_new_tokens:
                self._end(request, "finished")

    def _schedule(self) -> list[tuple[FakeRequest, int]]:
        budget = self.step_tokens
        scheduled: list[tuple[FakeRequest, int]] = []
        for request in list(self.running):
            if request.state != "running" or budget == 0:
                continue
            tokens = min(budget, request.num_tokens - request.computed_tokens)
            while not self._grow(request, request.computed_tokens + tokens):
                victim = self.running[-1]
                self._preempt(victim)
                scheduled = [(r, n) for r, n in scheduled if r is not victim]
                if victim is request:
                    break
            if request.state == "running":
                scheduled.append((request, tokens))
                budget -= tokens
        preempted = any(r.state == "waiting" and r.preemptions for r in self.waiting)
        for request in list(self.waiting):
            if budget == 0 or (preempted and self.running):
                break
            admitted = self._admit(request, budget)
            if admitted is None:
                continue  # not yet: the next may begin before it
            if admitted == 0:
                break
            self.waiting.remove(request)
            scheduled.append((request, admitted))
            budget -= admitted
        return scheduled

    def _admit(self, request: FakeRequest, budget: int) -> int | None:
        """Tokens to compute in this step; 0 when there is no room, None when it has to be asked again."""
        hits = self._own_hits(request)
        hit_tokens = len(hits) * self.block_tokens
        external = 0 if self.scheduler is None else self.scheduler.matched_tokens(request, hit_tokens)
        if external is None:
            return None
        if request.skip_reading_prefix_cache:
            external = 0
        start = hit_tokens + external
        tokens = min(budget, request.num_tokens - start)
        for block in hits:
            self._hold(block)
        request.blocks = list(hits)
        if not self._grow(request, start + tokens):
            for block in request.blocks:
                self._let_go(block)
            request.blocks = []
            return 0
        if self.scheduler is not None:
            self.scheduler.allocated(request, request.blocks, external)
        request.computed_tokens = start
        request.told_blocks = 0
        if not request.first_scheduled:
            request.first_scheduled = True
            request.engine_hit_tokens, request.stepwell_hit_tokens = hit_tokens, external
        request.state = "running"
        self.running.append(request)
        return tokens

    def _compute(self, work: _Work) -> None:
        request, end = work.request, work.request.computed_tokens + work.tokens
        self._check(work)
        for position in range(request.computed_tokens, end):
            block, place = self._where(work, position)
            for number, layer in enumerate(self.layers):
                layer[block, place] = _state(request.chain[position], number)
        request.prompt_computed_tokens += max(
            0, min(end, request.num_prompt_tokens) - request.computed_tokens
        )
        if request.state != "running":
            return  # aborted meanwhile: nobody wants the result
        request.computed_tokens = end
        self._remember(request)
        if request.computed_tokens == request.num_tokens:
            request.tokens.append(int.from_bytes(request.chain[-1][:2], "little"))
            request.extend()

    def _check(self, work: _Work) -> None:
        for position in range(work.request.computed_tokens):
            block, place = self._where(work, position)
            for number, layer in enumerate(self.layers):
                if not np.array_equal(layer[block, place], _state(work.request.chain[position], number)):
                    raise WrongBytes(f"token {position}, layer {number} of request {work.request.request_id}")

    def _where(self, work: _Work, position: int) -> tuple[int, slice]:
        block, token = divmod(position, self.block_tokens)
        return work.blocks[block], slice(token * _TOKEN_BYTES, (token + 1) * _TOKEN_BYTES)

    # -- blocks ----------------------------------------------------------------------------------------

    def _own_hits(self, request: FakeRequest) -> list[int]:
        if not self.prefix_caching or request.skip_reading_prefix_cache:
            return []
        hits = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_tokens]:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def _grow(self, request: FakeRequest, tokens: int) -> bool:
        missing = -(-tokens // self.block_tokens) - len(request.blocks)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            block, _ = self.free.popitem(last=False)
            if (block_hash := self._hash_of.pop(block, None)) is not None:
                del self._by_hash[block_hash]
            self._holders[block] = 1
            request.blocks.append(block)
        return True

    def _hold(self, block: int) -> None:
        self.free.pop(block, None)
        self._holders[block] = self._holders.get(block, 0) + 1

    def _let_go(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            del self._holders[block]
            self.free[block] = None

    def _remember(self, request: FakeRequest) -> None:
        whole = min(request.computed_tokens // self.block_tokens, len(request.block_hashes))
        for block, block_hash in zip(request.blocks[:whole], request.block_hashes, strict=False):
            if self.prefix_caching and block_hash not in self._by_hash and block not in self._hash_of:
                self._by_hash[block_hash] = block
                self._hash_of[block] = block_hash

    def _release(self, request: FakeRequest) -> None:
        for block in reversed(request.blocks):
            self._let_go(block)
        request.blocks = []

    def _preempt(self, request: FakeRequest) -> None:
        self._release(request)
        request.computed_tokens = 0
        request.preemptions += 1
        request.state = "waiting"
        self.running.remove(request)
        self.waiting.insert(0, request)

    def _end(self, request: FakeRequest, state: str) -> None:
        if self.scheduler is not None:
            self.scheduler.finished(request.request_id)
        (self.running if request.state == "running" else self.waiting).remove(request)
        self._release(request)
        request.state = state


def _state(chain: bytes, layer: int) -> Bytes:
    return np.frombuffer(chain, np.uint8) ^ np.uint8(layer)
