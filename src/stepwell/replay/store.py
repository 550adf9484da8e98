"""Storing a run in an index of so many blocks, in the server's own order of events."""

from collections.abc import Callable, Sequence

from stepwell.policy.index import Index
from stepwell.types import ChunkId


def insert_run(
    index: Index,
    run: Sequence[ChunkId],
    held: int,
    end: int,
    *,
    capacity_blocks: int,
    evicted: Callable[[ChunkId, bool], None] | None = None,
) -> list[ChunkId]:
    """Hold `run[held:end]` behind its first `held` chunks, as far as there is room beside itself.

    Gives those that are held now and were not before. As in the server, room for all of them is made before
    any is there: slots are reserved for a run, and its chunks are known to the index once they are written.
    """
    last = index.get(run[held - 1]) if held else None
    if last is not None:
        index.pin(last)
    while len(index) + end - held > capacity_blocks:
        victim = index.evict()
        if victim is None:
            end = held + max(0, capacity_blocks - len(index))
            break
        if evicted is not None:
            evicted(victim.chunk, victim.used)
    if last is not None:
        index.unpin(last)
    parent = None if last is None else last.chunk
    for chunk in run[held:end]:
        index.insert(chunk, parent, 0)
        parent = chunk
    return list(run[held:end])
