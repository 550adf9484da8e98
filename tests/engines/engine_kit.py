"""What the engine tests share: a cache with everything counted, and a copier whose copies take time."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from stepwell import wire
from stepwell.client import Client
from stepwell.embedded import EmbeddedServer
from stepwell.engines.fake import FakeEngine, FakeRequest
from stepwell.engines.pages import Bytes, HostCopier
from stepwell.server.host import DiskSetting
from stepwell.tiers.arena import ArenaMap
from stepwell.types import CacheStats, TierStats
from support.waiting import wait_until

PATIENT_S = 20.0
"""Time for a call where the test is not about time: this machine may be busy."""

SLOT_BYTES = 4096
"""The arena's alignment: what a small chunk takes."""


def prompt(tokens: int, start: int = 1000) -> list[int]:
    """Tokens that no prompt with another start shares."""
    return list(range(start, start + tokens))


class Cache:
    """An embedded server, the engines on it, and somebody who only watches."""

    def __init__(
        self, memory_bytes: int = 1 << 20, eviction: str = "lru", disk: DiskSetting | None = None
    ) -> None:
        self.server = EmbeddedServer(memory_bytes, eviction, disk)
        self.engines: list[FakeEngine] = []
        self._watch = Client(self.server.dial, "watch", PATIENT_S)
        assert self._watch.connect()

    def engine(self, **options: Any) -> FakeEngine:
        engine = FakeEngine(self.server.dial, call_timeout_s=PATIENT_S, **options)
        self.engines.append(engine)
        return engine

    def stop(self, engine: FakeEngine) -> None:
        """As when its process ends: nothing is finished first. Returns when the server has noticed."""
        sessions = self.stats().sessions
        self.engines.remove(engine)
        engine.close()
        wait_until(lambda: self.stats().sessions == sessions - 1)

    def stats(self) -> CacheStats:
        """After everything that the engines have said so far."""
        for engine in self.engines:
            assert engine.client is not None
            engine.client.flush()
            assert engine.client.call(wire.Ping(), wire.Pong) is not None
        reply = self._watch.call(wire.GetStats(), wire.Stats)
        assert reply is not None
        return reply.stats

    @property
    def memory(self) -> TierStats:
        return self.stats().tiers["memory"]

    def clear(self) -> int:
        reply = self._watch.call(wire.Clear(None), wire.Cleared)
        assert reply is not None
        return reply.chunks

    def check_idle(self, slot_bytes: int = SLOT_BYTES) -> None:
        """Nothing is leased, reserved or pinned, and only held chunks take room."""
        stats = self.stats()
        memory = stats.tiers["memory"]
        assert (stats.leases, stats.reservations, memory.pinned_chunks) == (0, 0, 0)
        assert memory.used_bytes == memory.chunks * slot_bytes

    def close(self, clear: bool = True) -> None:
        for engine in list(self.engines):
            self.stop(engine)
        wait_until(lambda: self.stats().sessions == 1)
        stats = self.stats()
        assert (stats.leases, stats.reservations) == (0, 0)
        if clear:
            self.clear()
            assert (self.memory.used_bytes, self.memory.pinned_chunks) == (0, 0)
        self._watch.close()
        self.server.close()


def counts(request: FakeRequest) -> tuple[int, int, int]:
    """Prompt tokens found in the engine, found in Stepwell, computed: all of the prompt."""
    found = (request.engine_hit_tokens, request.stepwell_hit_tokens, request.prompt_computed_tokens)
    assert sum(found) == request.num_prompt_tokens
    return found


class GatedCopier:
    """Like a GPU: what is stored is read when the copy runs, not when it is asked for.

    Copies wait until the test opens the gate, or the engine fences.
    """

    def __init__(self, layers: Sequence[Bytes]) -> None:
        self._copier = HostCopier(layers)
        self._queue: deque[tuple[ArenaMap, list[int], list[int]]] = deque()
        self._begun = 0
        self.fences = 0
        self.during: Callable[[], object] = lambda: None  # called in the middle of each load and each copy

    @property
    def queued(self) -> int:
        return len(self._queue)

    def load(self, arena: ArenaMap, offsets: Sequence[int], blocks: Sequence[int]) -> int:
        half = len(blocks) // 2
        self._copier.load(arena, offsets[:half], blocks[:half])
        self.during()
        self._copier.load(arena, offsets[half:], blocks[half:])
        self._begun += 1
        return self._begun

    def store(self, arena: ArenaMap, offsets: Sequence[int], blocks: Sequence[int]) -> int:
        self._queue.append((arena, list(offsets), list(blocks)))
        self._begun += 1
        return self._begun

    def open(self) -> None:
        """Let every waiting copy run."""
        while self._queue:
            arena, offsets, blocks = self._queue[0]
            half = len(blocks) // 2
            self._copier.store(arena, offsets[:half], blocks[:half])
            self.during()
            self._copier.store(arena, offsets[half:], blocks[half:])
            self._queue.popleft()

    def fence(self) -> None:
        self.fences += 1
        self.open()

    def finished(self) -> int:
        return self._begun - len(self._queue)
