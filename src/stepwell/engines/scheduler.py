"""The scheduler's half of an engine connector: what to load, what to store, what is finished.

Knows vLLM's requests by their attributes only, so that `engines/fake.py` can drive it without vLLM. All
calls come from the engine's scheduler thread; each makes at most a few calls to the cache server, none
of which takes long (see `stepwell.client`).

Nothing is promised that does not lie pinned in the arena, so a promise cannot fail. A lease is taken
when the scheduler asks how much is cached, and given back when the request was not scheduled in the same
step, or when its workers have copied.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stepwell import wire
from stepwell.client import Client
from stepwell.engines.geometry import Geometry
from stepwell.engines.jobs import CopyJob, Done, StepJobs
from stepwell.engines.spaces import Adapter, Spaces
from stepwell.types import Key, Reason, RequestStats


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


@dataclass
class _Promise:
    """A lease on the chunks that a request may load in this step."""

    lease: int
    server_id: str
    first_chunk: int
    places: tuple[int, ...]
    from_tokens: int  # the engine holds so many leading tokens itself
    to_tokens: int
    scheduled: bool = False


@dataclass
class _Tracked:
    """One request between its arrival and its end."""

    request: EngineRequest
    promise: _Promise | None = None
    blocks: list[int] = field(default_factory=list)
    settled_chunks: int = 0  # leading chunks that need no storing (again)
    engine_tokens: int = 0  # prompt tokens that the engine found in its own cache
    miss: Reason | None = None  # why not all whole chunks of the prompt were promised
    asked: bool = False
    reported: bool = False
    stores: bool = True
    began_again: bool = False


class SchedulerSide:
    """One for each engine. Methods have the names and order of vLLM's scheduler connector."""

    def __init__(self, client: Client, spaces: Spaces, geometry: Geometry) -> None:
        self._client = client
        self._spaces = spaces
        self._geometry = geometry
        self._numbers = itertools.count(1)
        self._tracked: dict[str, _Tracked] = {}
        self._promised: list[_Tracked] = []  # in this step, scheduled or not
        self._leases: dict[int, int] = {}  # being loaded, by ranks still to report
        self._reservations: dict[int, int] = {}  # being stored, likewise
        self._failed: set[int] = set()  # of these, those that some rank could not store

    @property
    def copying(self) -> bool:
        """Whether workers have jobs that they did not report as finished."""
        return bool(self._leases or self._reservations)

    # -- asked by the scheduler ------------------------------------------------------------------------

    def matched_tokens(self, request: EngineRequest, engine_tokens: int) -> int:
        """How many tokens beyond `engine_tokens` are promised. May be asked again and again."""
        tracked = self._track(request)
        tracked.engine_tokens = engine_tokens
        self._take_back(tracked)
        outcome = self._promise(tracked, engine_tokens)
        if isinstance(outcome, Reason):
            tracked.miss = outcome
            return 0
        tracked.promise = outcome
        self._promised.append(tracked)
        return outcome.to_tokens - outcome.from_tokens

    def allocated(self, request: EngineRequest, blocks: Sequence[int], loaded_tokens: int) -> None:
        """The request is scheduled with these blocks, and `loaded_tokens` of what was promised."""
        tracked = self._track(request)
        tracked.blocks = list(blocks)
        promise = tracked.promise
        if promise is not None:
            if loaded_tokens > 0:
                promise.scheduled = True
                promise.to_tokens = promise.from_tokens + loaded_tokens
            else:
                self._take_back(tracked)
        self._report(tracked, loaded_tokens)

    def step(
        self,
        new_blocks: Mapping[str, tuple[bool, Sequence[int]]],
        computed_tokens: Mapping[str, int],
    ) -> StepJobs:
        """Everything that the workers are to copy in the step just scheduled.

        `new_blocks`: for each scheduled request whether its list of blocks starts anew, and the blocks.
        `computed_tokens`: how many leading tokens of each scheduled request have KV after this step.
        """
        loads = []
        for tracked in self._promised:
            promise = tracked.promise
            if promise is None:
                continue
            if promise.scheduled:
                loads.append(self._load_job(tracked, promise))
                self._leases[promise.lease] = self._geometry.ranks
                tracked.promise = None
            else:
                self._take_back(tracked)
        self._promised = []
        for request_id, (anew, blocks) in new_blocks.items():
            if (known := self._tracked.get(request_id)) is not None:
                if anew:
                    known.blocks = []
                known.blocks.extend(blocks)  # in place: most steps bring nothing, and prompts are long
        stores = self._store_jobs(computed_tokens)
        self._client.flush()
        return StepJobs(loads, stores)

    def copied(self, done: Done) -> None:
        """Workers report the jobs that they have finished since their last report."""
        for lease, ranks in done.loads.items():
            if _count_down(self._leases, lease, ranks):
                self._client.note(wire.Release(lease))
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
        if tracked is not None:
            self._take_back(tracked)

    def reset(self) -> None:
        """Forget all that this engine has stored, and never find it again, be the server there or not.

        Requests under way store nothing more: what they computed so far may be of replaced weights.
        """
        for space in self._spaces.renew():
            self._client.call(wire.Clear(space), wire.Cleared)
        for tracked in self._tracked.values():
            tracked.stores = False

    # -- loading ---------------------------------------------------------------------------------------

    def _track(self, request: EngineRequest) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = _Tracked(request)
        return tracked

    def _promise(self, tracked: _Tracked, engine_tokens: int) -> _Promise | Reason:
        request, geometry = tracked.request, self._geometry
        if request.skip_reading_prefix_cache:
            return Reason.BYPASSED
        # One token must be computed, or there is nothing to sample from.
        useful_tokens = request.num_tokens - 1
        keys = self._keys(request, 0, -(-useful_tokens // geometry.chunk_tokens))
        if not keys:
            return Reason.TOO_SHORT
        space = self._spaces.find(request.lora_request)
        server_id = self._client.server_id
        if isinstance(space, Reason) or server_id is None:
            return space if isinstance(space, Reason) else Reason.NO_SERVER
        first = engine_tokens // geometry.chunk_tokens
        lease = next(self._numbers)
        reply = self._client.call(
            wire.Load(lease, space, b"".join(keys), min(first, len(keys)), tracked.asked), wire.Loaded
        )
        if reply is None:
            return Reason.NO_SERVER
        tracked.asked = True
        if self._client.server_id != server_id:  # another server granted it than the one it was meant for
            self._client.note(wire.Release(lease))
            return Reason.NO_SERVER
        tracked.settled_chunks = reply.chunks
        to_tokens = min(reply.chunks * geometry.chunk_tokens, useful_tokens)
        if to_tokens <= engine_tokens:
            self._client.note(wire.Release(lease))
            return Reason.NOT_HELD
        tracked.miss = Reason.NOT_HELD if reply.chunks < len(keys) else None
        return _Promise(lease, server_id, first, wire.unpack_places(reply.places), engine_tokens, to_tokens)

    def _take_back(self, tracked: _Tracked) -> None:
        if tracked.promise is not None:
            self._client.note(wire.Release(tracked.promise.lease))
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
        # Bypassing is no miss, and what is not held the server counted when it was asked.
        silent = (Reason.BYPASSED, Reason.NOT_HELD)
        missed: dict[Reason, int] = (
            {} if tracked.miss is None or tracked.miss in silent else {tracked.miss: 1}
        )
        computed = request.num_prompt_tokens - tracked.engine_tokens - loaded_tokens
        stats = RequestStats(1, request.num_prompt_tokens, tracked.engine_tokens, loaded_tokens, computed)
        self._client.note(wire.Report(stats, missed))

    # -- storing ---------------------------------------------------------------------------------------

    def _store_jobs(self, computed_tokens: Mapping[str, int]) -> list[CopyJob]:
        wanted: list[tuple[_Tracked, int, wire.Run]] = []
        for request_id, tokens in computed_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or not tracked.stores:
                continue
            run = self._unsettled(tracked, tokens)
            if run is not None:
                wanted.append((tracked, tracked.settled_chunks, run))
        server_id = self._client.server_id
        if not wanted or server_id is None:
            return []
        reservation = next(self._numbers)
        reply = self._client.call(wire.Reserve(reservation, [run for _, _, run in wanted]), wire.Reserved)
        if reply is None:
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
        if first == complete:
            return None
        space = self._spaces.find(request.lora_request)
        if isinstance(space, Reason):
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
            case Reason.NO_PARENT if first_chunk > 0 and not tracked.began_again:
                # Evicted meanwhile: begin again from the first chunk, once. When the requests under way
                # need more than there is, each would else go on evicting what the others have just stored.
                tracked.began_again = True
                tracked.settled_chunks = 0
            case _:
                tracked.stores = False  # no room: asking again at every step would cost more than it gains

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
