"""A trace's requests through an index of so many chunks."""

from collections.abc import Iterable, Sequence

from stepwell.policy.evict import make_evictor
from stepwell.policy.index import Index


def missed_chunks(policy: str, capacity: int, requests: Iterable[Sequence[bytes]]) -> int:
    """Each request looks up its run, uses what is held, and stores the rest as far as there is room."""
    index = Index(make_evictor(policy))
    missed = 0
    for run in requests:
        held = index.held_run(run)
        missed += len(run) - held
        index.use(run[:held])
        last = index.get(run[held - 1]) if held else None
        if last is not None:
            index.pin(last)
        for chunk in run[held:]:
            if len(index) == capacity and index.evict() is None:
                break
            parent, last = last, index.insert(chunk, last.chunk if last else None, 0)
            index.pin(last)
            if parent is not None:
                index.unpin(parent)
        if last is not None:
            index.unpin(last)
    assert index.pinned_chunks == 0
    return missed
