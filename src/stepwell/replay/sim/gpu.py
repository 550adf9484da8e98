"""GPU memory of one engine: its own prefix cache, and what running requests hold of it."""

from collections import Counter
from collections.abc import Sequence

from stepwell.policy.evict.lru import Lru
from stepwell.policy.index import Entry, Index
from stepwell.types import ChunkId


class GpuCache:
    """Blocks of running requests stay; those of ended ones are kept, least recently used go first."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._index = Index(Lru())
        self._running: Counter[ChunkId] = Counter()  # blocks of running requests' prompts
        self._private_blocks = 0  # of running requests' outputs

    def held(self, run: Sequence[ChunkId]) -> int:
        return self._index.held_run(run)

    def fits_ever(self, run: Sequence[ChunkId], private_blocks: int) -> bool:
        return len(run) + private_blocks <= self.blocks

    def has_room(self, run: Sequence[ChunkId], private_blocks: int) -> bool:
        """Beside what runs now."""
        running = self._running
        fresh = sum(chunk not in running for chunk in run)
        return len(running) + fresh + self._private_blocks + private_blocks <= self.blocks

    def admit(self, run: Sequence[ChunkId], held: int, private_blocks: int) -> Entry | None:
        """Take the blocks of a request whose first `held` are here, and give its pin. It must have room."""
        self._private_blocks += private_blocks
        self._running.update(run)
        self._index.use(run[:held])
        entry = self._index.get(run[held - 1]) if held else None
        for chunk in run[held:]:
            entry = self._index.insert(chunk, entry.chunk if entry else None, 0)
        if entry is not None:
            self._index.pin(entry)
        while len(self._index) + self._private_blocks > self.blocks:
            self._index.evict()  # there is one: what runs fits by itself
        return entry

    def release(self, run: Sequence[ChunkId], entry: Entry | None, private_blocks: int) -> None:
        """The request has ended."""
        self._private_blocks -= private_blocks
        running = self._running
        for chunk in run:
            if running[chunk] == 1:
                del running[chunk]
            else:
                running[chunk] -= 1
        if entry is not None:
            self._index.unpin(entry)
