"""The scheduler's half of an engine connector: what to load, what to store, what is finished.

Knows vLLM's requests by their attributes only, so that `engines/fake.py` can drive it without vLLM. All
calls come from the engine's scheduler thread; each makes at most a few calls to the cache server, none
of which takes long (see `stepwell.client`).

Nothing is promised that does not lie pinned in the arena, so a promise cannot fail. A lease is taken
when the scheduler asks how much is cached, kept while the request waits, and given back when its workers
have copied, or when the request ends before. While more of its prompt is on its way up from a slower tier
the scheduler is told to ask again, until waiting has cost as much as computing would.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stepwell import wire
from stepwell.client import Client
from stepwell.engines.geometry import Geometry
from stepwell.engines.jobs import CopyJob, Done, StepJobs
from stepwell.engines.spaces import Adapter, Spaces
from stepwell.policy.canary import CANARY_CHUNKS, TOLERANCE, Canary
from stepwell.policy.cost import PrefillSpeed
from stepwell.types import Key, Reason, RequestStats, SpaceId


class EngineRequest(Protocol):
    """What is used of an engine's request."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def lora_request(self) -> Adapter | None: ...
    @property
    def skip_reading_prefix_cache(self) -> bool: ...


ASK_AGAIN_SHARE = 0.02
"""Of the scheduler's time, at most so much goes into asking again for one request that cannot start yet."""

PROMISE_KEPT_S = 1.0
"""A promise to a request that cannot start yet is as old as this before it is made anew: others may have
stored more of its prompt meanwhile."""


_SKIPPED_STEPS_MOST = 31  # a second, or less, of decoding


@dataclass
class _Promise:
    """A lease on the leading chunks that a request may load."""

    space: SpaceId
    lease: int
    server_id: str
    first_chunk: int
    places: list[int]
    chunks: int  # leading chunks that lie in memory
    coming: int  # leading chunks that will
    made_s: float
    wait_until_s: float  # for what is coming
    from_tokens: int = 0  # the engine holds so many leading tokens itself
    to_tokens: int = 0


@dataclass(frozen=True)
class _Canary:
    """A chunk that is held, and computed all the same."""

    space: SpaceId
    key: Key
    chunk: int  # its number in the prompt
    job: CopyJob  # whose blocks are known when it is computed


@dataclass
class _Tracked:
    """One request between its arrival and its end."""

    request: EngineRequest
    promise: _Promise | None = None
    sampled: bool | None = None  # whether a chunk of it is compared; None: not decided
    canary: _Canary | None = None
    wait_until_s: float | None = None  # for what comes from slower tiers; set when it is first known
    ask_again_at_s: float = 0.0  # after a look-up that found nothing
    skip_steps: int = 0  # before it is asked again for chunks that others are writing
    skipped_steps: int = 0  # the last time
    blocks: list[int] = field(default_factory=list)
    settled_chunks: int = 0  # leading chunks that need no storing (again)
    complete_chunks: int = 0  # leading chunks that are computed, as far as storing has looked
    unstored: Reason | None = None  # why the last attempt to store stored nothing
    engine_tokens: int = 0  # prompt tokens that the engine found in its own cache
    miss: Reason | None = None  # why not all whole chunks of the prompt were promised
    asked: bool = False
    reported: bool = False
    stores: bool = True
    began_again: bool = False


class SchedulerSide:
    """One for each engine. Methods have the names and order of vLLM's scheduler connector."""

    def __init__(
        self,
        client: Client,
        spaces: Spaces,
        geometry: Geometry,
        clock: Callable[[], float] = time.monotonic,
        canary_chunks: int = CANARY_CHUNKS,
    ) -> None:
        """`clock` counts seconds from anywhere; of `canary_chunks` chunks found one is compared (0: none)."""
        self._client = client
        self._spaces = spaces
        self._geometry = geometry
        self._clock = clock
        self._speed = PrefillSpeed()
        self._steps: deque[tuple[float, int]] = deque()  # under way: when scheduled, and their tokens
        self._step_ended_s = 0.0
        self._numbers = itertools.count(1)
        self._tracked: dict[str, _Tracked] = {}
        self._scheduled: list[_Tracked] = []  # in this step, with something to load
        self._leases: dict[int, int] = {}  # being loaded, by ranks still to report
        self._sample = Canary(canary_chunks)
        self._canaries: dict[int, _Canary] = {}  # leases kept until their chunk is compared
        self._comparing: dict[int, int] = {}  # likewise, by ranks still to report
        self._differences: dict[int, float] = {}
        self._reservations: dict[int, int] = {}  # being stored, likewise
        self._failed: set[int] = set()  # of these, those that some rank could not store

    @property
    def copying(self) -> bool:
        """Whether workers have jobs that they did not report as finished."""
        return bool(self._leases or self._reservations or self._comparing)

    # -- asked by the scheduler ------------------------------------------------------------------------

    def arrived(self, request: EngineRequest) -> None:
        """The request waits in the engine's queue: time for slower tiers to bring up what they hold of it."""
        if not self._client.promotes or request.skip_reading_prefix_cache:
            return
        space = self._spaces.find(request.lora_request)
        keys = self._useful_keys(request)
        if keys and not isinstance(space, Reason):
            self._client.note(wire.Prefetch(space, b"".join(keys)))
            self._client.flush()

    def matched_tokens(self, request: EngineRequest, engine_tokens: int) -> int | None:
        """How many tokens beyond `engine_tokens` are promised; None: ask again at the next step.

        May be asked again and again.
        """
        tracked = self._track(request)
        tracked.engine_tokens = engine_tokens
        outcome = self._promise(tracked, engine_tokens)
        if outcome is None or isinstance(outcome, Reason):
            tracked.miss = outcome
            if outcome is not None:
                self._take_back(tracked)
            return None if outcome is None else 0
        return outcome.to_tokens - outcome.from_tokens

    def allocated(self, request: EngineRequest, blocks: Sequence[int], loaded_tokens: int) -> None:
        """The request is scheduled with these blocks, and `loaded_tokens` of what was promised."""
        tracked = self._track(request)
        tracked.blocks = list(blocks)
        promise = tracked.promise
        if promise is not None and (loaded_tokens > 0 or tracked.sampled):
            if tracked.sampled and promise.from_tokens + loaded_tokens == promise.to_tokens:
                self._keep_for_compare(tracked, promise)
            promise.to_tokens = promise.from_tokens + loaded_tokens
            self._scheduled.append(tracked)
        else:
            self._take_back(tracked)
        self._report(tracked, loaded_tokens)

    def _keep_for_compare(self, tracked: _Tracked, promise: _Promise) -> None:
        chunk, geometry = promise.chunks - 1, self._geometry
        tracked.sampled = False
        if promise.to_tokens != chunk * geometry.chunk_tokens:
            return
        place = promise.places[chunk - promise.first_chunk]
        offsets = [place + block * geometry.block_bytes for block in range(geometry.chunk_blocks)]
        (key,) = self._keys(tracked.request, chunk, chunk + 1)
        job = CopyJob(promise.lease, promise.server_id, offsets, [])
        tracked.canary = self._canaries[promise.lease] = _Canary(promise.space, key, chunk, job)

    def step(
        self,
        new_blocks: Mapping[str, tuple[bool, Sequence[int]]],
        computed_tokens: Mapping[str, int],
        scheduled_tokens: int = 0,
    ) -> StepJobs:
        """Everything that the workers are to copy in the step just scheduled.

        `new_blocks`: for each scheduled request whether its list of blocks starts anew, and the blocks.
        `computed_tokens`: how many leading tokens of each scheduled request have KV after this step.
        `scheduled_tokens`: how many the step computes, of all requests.
        """
        loads = []
        for tracked in self._scheduled:
            promise = tracked.promise
            if promise is not None and promise.to_tokens == promise.from_tokens:  # only to be compared
                if promise.lease not in self._canaries:
                    self._take_back(tracked)
                tracked.promise = None
            elif promise is not None:  # else it was aborted since
                loads.append(self._load_job(tracked, promise))
                self._leases[promise.lease] = self._geometry.ranks
                tracked.promise = None
        self._scheduled = []
        for request_id, (anew, blocks) in new_blocks.items():
            if (known := self._tracked.get(request_id)) is not None:
                if anew:
                    known.blocks = []
                known.blocks.extend(blocks)  # in place: most steps bring nothing, and prompts are long
        if scheduled_tokens:
            self._steps.append((self._clock(), scheduled_tokens))
        compares = self._compare_jobs(computed_tokens)
        stores = self._store_jobs(computed_tokens)
        self._client.flush()
        return StepJobs(loads, stores, compares)

    def step_ended(self) -> None:
        """The engine has the result of the oldest step that computed something."""
        if self._steps:
            now_s = self._clock()
            begun_s, tokens = self._steps.popleft()
            # Where steps are scheduled ahead, this one began when the one before it ended.
            self._speed.observe(tokens, now_s - max(begun_s, self._step_ended_s))
            self._step_ended_s = now_s

    def copied(self, done: Done) -> None:
        """Workers report the jobs that they have finished since their last report."""
        for lease, ranks in done.loads.items():
            if _count_down(self._leases, lease, ranks) and lease not in self._canaries:
                self._client.note(wire.Release(lease))
        for lease, ranks in done.compares.items():
            self._differences[lease] = max(done.differences[lease], self._differences.get(lease, 0.0))
            if _count_down(self._comparing, lease, ranks):
                self._compared(lease)
        self._failed |= done.failed_stores & self._reservations.keys()
        for reservation, ranks in done.stores.items():
            # Not before the last rank, not even when another has failed: it may still copy into the slots.
            if _count_down(self._reservations, reservation, ranks):
                failed = reservation in self._failed
                self._failed.discard(reservation)
                self._client.note(wire.Abort(reservation) if failed else wire.Commit(reservation))
        self._client.flush()

    def finished(self, request_id: str) -> None:
        """The request ended, or was aborted in any state. Copies that are under way finish by themselves."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        if tracked.canary is not None:  # never computed
            if tracked.promise is None:
                self._end_canary(tracked.canary)
            else:
                del self._canaries[tracked.canary.job.number]
        self._take_back(tracked)
        if tracked.unstored is not None:
            dropped = {tracked.unstored: tracked.complete_chunks - tracked.settled_chunks}
            self._client.note(wire.Report(RequestStats(), {}, dropped))

    def reset(self) -> None:
        """Forget all that this engine has stored, and never find it again, be the server there or not.

        Requests under way store nothing more: what they computed so far may be of replaced weights.
        """
        for space in self._spaces.renew():
            self._client.note(wire.Forget(space))
        self._client.flush()
        for tracked in self._tracked.values():
            tracked.stores = False

    # -- loading ---------------------------------------------------------------------------------------

    def _track(self, request: EngineRequest) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = _Tracked(request)
        return tracked

    def _promise(self, tracked: _Tracked, engine_tokens: int) -> _Promise | Reason | None:
        """What is promised, why nothing is, or None while it is worth waiting for."""
        now_s = self._clock()
        promise = tracked.promise
        if promise is not None and not self._is_good(promise, engine_tokens, now_s):
            self._take_back(tracked)
            promise = None
        if promise is None:
            if now_s < tracked.ask_again_at_s:
                return tracked.miss or Reason.NOT_HELD
            outcome = self._ask(tracked, engine_tokens, now_s)
            if isinstance(outcome, Reason):
                asked_s = self._clock()
                tracked.ask_again_at_s = asked_s + (asked_s - now_s) / ASK_AGAIN_SHARE
                return outcome
            promise = tracked.promise = outcome
        elif promise.coming > promise.chunks and not self._ask_more(promise):
            return Reason.NO_SERVER
        tracked.settled_chunks = promise.chunks
        if promise.coming > promise.chunks and now_s < promise.wait_until_s:
            return None
        promise.coming = promise.chunks
        promise.from_tokens = engine_tokens
        # One token must be computed, or there is nothing to sample from.
        promise.to_tokens = min(promise.chunks * self._geometry.chunk_tokens, tracked.request.num_tokens - 1)
        if promise.to_tokens <= engine_tokens:
            return Reason.NOT_HELD
        last_tokens = (promise.chunks - 1) * self._geometry.chunk_tokens
        if tracked.sampled is None:
            tracked.sampled = self._sample.due(promise.chunks - promise.first_chunk)
        if tracked.sampled and last_tokens >= engine_tokens:
            promise.to_tokens = last_tokens
        return promise

    def _is_good(self, promise: _Promise, engine_tokens: int, now_s: float) -> bool:
        return (
            promise.server_id == self._client.server_id
            and promise.first_chunk * self._geometry.chunk_tokens <= engine_tokens
            and (promise.coming > promise.chunks or now_s - promise.made_s < PROMISE_KEPT_S)
        )

    def _ask(self, tracked: _Tracked, engine_tokens: int, now_s: float) -> _Promise | Reason:
        request, geometry = tracked.request, self._geometry
        if request.skip_reading_prefix_cache:
            return Reason.BYPASSED
        keys = self._useful_keys(request)
        if not keys:
            return Reason.TOO_SHORT
        space = self._spaces.find(request.lora_request)
        server_id = self._client.server_id
        if isinstance(space, Reason) or server_id is None:
            return space if isinstance(space, Reason) else Reason.NO_SERVER
        first = min(engine_tokens // geometry.chunk_tokens, len(keys))
        lease = next(self._numbers)
        reply = self._client.call(wire.Load(lease, space, b"".join(keys), first, tracked.asked), wire.Loaded)
        if reply is None:
            return Reason.NO_SERVER
        tracked.asked = True
        if self._client.server_id != server_id:  # another server granted it than the one it was meant for
            self._client.note(wire.Release(lease))
            return Reason.NO_SERVER
        if tracked.wait_until_s is None and reply.coming > reply.chunks:
            # Once for each request. Loading all or nothing is the best plan where both cost in proportion;
            # where the price was wrong, waiting costs at most as much again as computing.
            coming_tokens = (reply.coming - max(first, reply.chunks)) * geometry.chunk_tokens
            compute_s = self._speed.seconds(coming_tokens)
            tracked.wait_until_s = now_s + (compute_s if reply.ready_in_s < compute_s else 0.0)
        return _Promise(
            space,
            lease,
            server_id,
            first,
            list(wire.unpack_places(reply.places)),
            reply.chunks,
            reply.coming,
            now_s,
            tracked.wait_until_s or now_s,
        )

    def _ask_more(self, promise: _Promise) -> bool:
        reply = self._client.call(wire.More(promise.lease), wire.Loaded)
        if reply is None:
            return False
        promise.places += wire.unpack_places(reply.places)
        promise.chunks, promise.coming = reply.chunks, reply.coming
        return True

    def _take_back(self, tracked: _Tracked) -> None:
        promise = tracked.promise
        if promise is not None:
            if promise.server_id == self._client.server_id:  # else it went with its server
                self._client.note(wire.Release(promise.lease))
            tracked.promise = None

    def _load_job(self, tracked: _Tracked, promise: _Promise) -> CopyJob:
        geometry = self._geometry
        first_block = promise.from_tokens // geometry.block_tokens
        last_block = -(-promise.to_tokens // geometry.block_tokens)
        offsets = []
        for block in range(first_block, last_block):
            chunk, block_in_chunk = divmod(block, geometry.chunk_blocks)
            place = promise.places[chunk - promise.first_chunk]
            offsets.append(place + block_in_chunk * geometry.block_bytes)
        return CopyJob(promise.lease, promise.server_id, offsets, tracked.blocks[first_block:last_block])

    def _report(self, tracked: _Tracked, loaded_tokens: int) -> None:
        # Once, when the request is first scheduled: a preempted request that comes back is no new prompt.
        if tracked.reported:
            return
        tracked.reported = True
        request = tracked.request
        missed: dict[Reason, int] = {}
        # Bypassing is no miss, and what is not held the server counted when it was asked.
        if tracked.miss not in (None, Reason.BYPASSED, Reason.NOT_HELD):
            wanted = len(self._useful_keys(request)) - tracked.engine_tokens // self._geometry.chunk_tokens
            missed[tracked.miss] = max(1, wanted)  # a prompt without a whole chunk counts as one
        computed = request.num_prompt_tokens - tracked.engine_tokens - loaded_tokens
        stats = RequestStats(1, request.num_prompt_tokens, tracked.engine_tokens, loaded_tokens, computed)
        self._client.note(wire.Report(stats, missed))

    # -- comparing -------------------------------------------------------------------------------------

    def _compare_jobs(self, computed_tokens: Mapping[str, int]) -> list[CopyJob]:
        if not self._canaries:
            return []
        jobs = []
        for request_id, tokens in computed_tokens.items():
            tracked = self._tracked.get(request_id)
            canary = None if tracked is None else tracked.canary
            if tracked is None or canary is None:
                continue
            if tokens < (canary.chunk + 1) * self._geometry.chunk_tokens:
                continue
            first = canary.chunk * self._geometry.chunk_blocks
            blocks = tracked.blocks[first : first + self._geometry.chunk_blocks]
            tracked.canary = None
            self._comparing[canary.job.number] = self._geometry.ranks
            jobs.append(CopyJob(canary.job.number, canary.job.server_id, canary.job.offsets, blocks))
        return jobs

    def _compared(self, lease: int) -> None:
        canary = self._canaries[lease]
        difference = self._differences.pop(lease)
        if canary.job.server_id == self._client.server_id:
            matches = difference <= TOLERANCE
            self._client.note(wire.Checked(canary.space, canary.key, difference, matches))
        self._end_canary(canary)

    def _end_canary(self, canary: _Canary) -> None:
        lease = canary.job.number
        del self._canaries[lease]
        if lease not in self._leases and canary.job.server_id == self._client.server_id:
            self._client.note(wire.Release(lease))

    # -- storing ---------------------------------------------------------------------------------------

    def _store_jobs(self, computed_tokens: Mapping[str, int]) -> list[CopyJob]:
        wanted: list[tuple[_Tracked, int, wire.Run]] = []
        for request_id, tokens in computed_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or not tracked.stores:
                continue
            if tracked.skip_steps > 0:
                tracked.skip_steps -= 1
                continue
            run = self._unsettled(tracked, tokens)
            if run is not None:
                wanted.append((tracked, tracked.settled_chunks, run))
        if not wanted:
            return []
        server_id = self._client.server_id
        reservation = next(self._numbers)
        reply = self._client.call(wire.Reserve(reservation, [run for _, _, run in wanted]), wire.Reserved)
        for tracked, _, _ in wanted:
            tracked.unstored = Reason.NO_SERVER if reply is None else None
        if reply is None or server_id is None:
            return []
        if self._client.server_id != server_id:
            self._client.note(wire.Abort(reservation))
            return []
        offsets: list[int] = []
        blocks: list[int] = []
        for (tracked, first_chunk, _), granted in zip(wanted, reply.runs, strict=True):
            self._settle(tracked, first_chunk, granted)
            for number, place in zip(granted.chunks, wire.unpack_places(granted.places), strict=True):
                start = (first_chunk + number) * self._geometry.chunk_blocks
                blocks += tracked.blocks[start : start + self._geometry.chunk_blocks]
                offsets += [
                    place + block * self._geometry.block_bytes for block in range(self._geometry.chunk_blocks)
                ]
        if not offsets:
            self._client.note(wire.Abort(reservation))
            return []
        self._reservations[reservation] = self._geometry.ranks
        return [CopyJob(reservation, server_id, offsets, blocks)]

    def _unsettled(self, tracked: _Tracked, computed_tokens: int) -> wire.Run | None:
        request = tracked.request
        known = len(request.block_hashes) // self._geometry.chunk_blocks
        complete = min(known, computed_tokens // self._geometry.chunk_tokens)
        complete = min(complete, len(tracked.blocks) // self._geometry.chunk_blocks)
        first = tracked.settled_chunks = min(tracked.settled_chunks, complete)
        tracked.complete_chunks = complete
        if first == complete:
            return None
        space = self._spaces.find(request.lora_request)
        if isinstance(space, Reason):
            tracked.unstored = space
            return None
        keys = self._keys(request, max(first - 1, 0), complete)
        parent = keys.pop(0) if first else None
        return wire.Run(space, parent, b"".join(keys))

    def _settle(self, tracked: _Tracked, first_chunk: int, granted: wire.Granted) -> None:
        """Move on past the chunks that are held or ours; those that others are writing are asked for again.

        So when another engine gives up on a chunk that we computed too, we store it with the next step.
        """
        match granted.stopped:
            case None:
                settled = granted.held
                for number in granted.chunks:
                    if number != settled:
                        break
                    settled = number + 1
                tracked.settled_chunks = first_chunk + settled
                # Others write the rest, and may hang: ask less and less often.
                tracked.skipped_steps = (
                    0 if settled else min(2 * tracked.skipped_steps + 1, _SKIPPED_STEPS_MOST)
                )
                tracked.skip_steps = tracked.skipped_steps
            case Reason.NO_PARENT if first_chunk > 0 and not tracked.began_again:
                # Evicted meanwhile: begin again from the first chunk, once. When the requests under way
                # need more than there is, each would else go on evicting what the others have just stored.
                tracked.began_again = True
                tracked.settled_chunks = 0
            case _:
                tracked.stores = False  # no room: asking again at every step would cost more than it gains

    def _useful_keys(self, request: EngineRequest) -> list[Key]:
        return self._keys(request, 0, -(-(request.num_tokens - 1) // self._geometry.chunk_tokens))

    def _keys(self, request: EngineRequest, first: int, last: int) -> list[Key]:
        """Keys of the whole chunks from `first` up to `last`: the engine's hash of each one's last block."""
        step = self._geometry.chunk_blocks
        hashes = request.block_hashes
        last = min(last, len(hashes) // step)
        return [_key(hashes[chunk * step + step - 1]) for chunk in range(first, last)]


def _key(block_hash: bytes) -> Key:
    # sha256 gives 32 bytes; the shorter, non-cryptographic hashes that an operator may choose are padded.
    return bytes(block_hash).ljust(32, b"\0")


def _count_down(left: dict[int, int], number: int, ranks: int) -> bool:
    if number not in left:
        return False
    left[number] -= ranks
    if left[number] > 0:
        return False
    del left[number]
    return True
