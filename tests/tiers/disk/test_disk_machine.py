"""Any order of calls, crashes, starts and damage, against a model: every read is exact, or a miss."""

import asyncio
import os
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from disk_kit import CHUNK_BYTES, abandon, fetch, folder_bytes, segments
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stepwell.tiers.base import Put
from stepwell.tiers.disk import DiskTier
from stepwell.tiers.disk.segment import record_bytes
from stepwell.types import ChunkId, Reason
from support.chunks import chunk_id, content

CHUNKS = st.builds(chunk_id, st.integers(0, 60), st.integers(0, 1))
LIMITS = st.sampled_from([300_000, 1 << 20, 2 << 20])


class AnyOrder(RuleBasedStateMachine):
    """`held` and `gone` are exact as long as nothing was damaged."""

    @initialize(limit_bytes=LIMITS)
    def begin(self, limit_bytes: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder_owner = tempfile.TemporaryDirectory()
        self.folder = Path(self.folder_owner.name)
        self.held: set[ChunkId] = set()
        self.gone: set[ChunkId] = set()  # cleared, and not written since: never to be seen again
        self.sound = True
        self.open(limit_bytes)

    def open(self, limit_bytes: int) -> None:
        async def begin() -> DiskTier:
            tier = DiskTier(self.folder, limit_bytes)
            await tier.scan()
            return tier

        self.tier = self.wait(begin())

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.wait(self.tier.close())
            self.loop.close()
            self.folder_owner.cleanup()

    @rule(chunks=st.lists(CHUNKS, max_size=8))
    def put(self, chunks: list[ChunkId]) -> None:
        items = [Put(chunk, memoryview(content(chunk, CHUNK_BYTES))) for chunk in chunks]
        outcomes = self.wait(self.tier.put(items))
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            assert outcome in (None, Reason.NO_ROOM)
            if outcome is None:
                self.held.add(chunk)
                self.gone.discard(chunk)

    @rule(chunk=CHUNKS)
    def get(self, chunk: ChunkId) -> None:
        why = self.wait(fetch(self.tier, chunk))
        if why is None:
            assert chunk not in self.gone
        if self.sound:
            assert (why is None) == (chunk in self.held)
        elif why is not None:
            self.held.discard(chunk)

    @rule(chunks=st.lists(CHUNKS, max_size=4))
    def delete(self, chunks: list[ChunkId]) -> None:
        self.wait(self.tier.delete(chunks))
        self.held -= set(chunks)

    @rule(space=st.integers(0, 1) | st.none())
    def clear(self, space: int | None) -> None:
        name = None if space is None else chunk_id(0, space)[:16]
        self.wait(self.tier.clear(name))
        known = {chunk_id(n, s) for n in range(61) for s in (0, 1)}
        cleared = {chunk for chunk in known if name is None or chunk.startswith(name)}
        self.held -= cleared
        self.gone |= cleared
        self.check_catalogue()  # clearing a full log may reclaim

    @rule(keep=st.integers(0, 3))
    def reclaim(self, keep: int) -> None:
        kept = [one.chunk for one in self.tier.oldest()][:keep]
        has_spare = self.tier._files.spaces > 0  # not always after a start with a smaller limit
        self.wait(self.tier.reclaim(kept))
        if self.sound and has_spare:
            assert all(self.tier.holds(chunk) for chunk in kept)
        self.check_catalogue()

    def check_catalogue(self) -> None:
        now = {chunk for chunk in self.held if self.tier.holds(chunk)}
        assert not any(self.tier.holds(chunk) for chunk in self.gone)
        self.held = now

    @rule(limit_bytes=LIMITS)
    def start_anew(self, limit_bytes: int) -> None:
        self.wait(self.tier.close())
        self.open(limit_bytes)
        self.after_start()

    @rule(limit_bytes=LIMITS)
    def crash(self, limit_bytes: int) -> None:
        abandon(self.tier)
        self.open(limit_bytes)
        self.after_start()

    def after_start(self) -> None:
        # What was deleted may be there again; what does not fit any more is not; what was cleared never is.
        known = {chunk_id(n, s) for n in range(61) for s in (0, 1)}
        self.held = {chunk for chunk in known if self.tier.holds(chunk)}
        # Unless the note of it was damaged; its bytes are right all the same.
        assert not self.sound or not self.held & self.gone
        self.gone -= self.held

    @rule(file=st.integers(0, 40), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def damage(self, file: int, place: float, bit: int) -> None:
        paths = segments(self.folder)
        if paths:
            path = paths[file % len(paths)]
            with path.open("r+b") as opened:
                offset = int(place * path.stat().st_size)
                (byte,) = os.pread(opened.fileno(), 1, offset)
                os.pwrite(opened.fileno(), bytes([byte ^ 1 << bit]), offset)
                os.fsync(opened.fileno())
            self.sound = False

    @invariant()
    def the_counters_are_what_lies_on_disk(self) -> None:
        if hasattr(self, "tier"):
            assert self.tier.file_bytes == folder_bytes(self.folder) <= self.tier.limit_bytes
            chunks, used_bytes, _ = self.tier.usage()
            assert used_bytes == chunks * record_bytes(CHUNK_BYTES) <= self.tier.file_bytes
            if self.sound:
                assert chunks == len(self.held)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
