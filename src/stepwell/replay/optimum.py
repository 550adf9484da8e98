"""The most that any cache of so many blocks can hit: it knows the future.

Source: Belady, "A study of replacement algorithms", IBM Systems Journal 1966, with bypass: what is needed
again last goes, be it the block that just came. Whoever needs a block needs all before it, so a parent is
needed no later than its child; with the deeper one first where both are needed by one request, what is kept
is always closed under parents, and each hit is part of a leading run: this is the optimum for prefixes too.
"""

from heapq import heappop, heappush

from stepwell.replay.traces.row import Trace

_NEVER = -1


def optimal_hits(trace: Trace, capacity_blocks: int) -> list[int]:
    """Leading blocks held of each request, in order. Linear in blocks, but for a heap of the reused ones."""
    longest = max((len(row.blocks) for row in trace.rows), default=0) + 1
    due = [_NEVER] * trace.blocks  # held block -> its next request, then its depth, as one number
    heap: list[tuple[int, int]] = []  # (-due, block); outdated where the block is due otherwise by now
    held = 0
    hits = []
    for row, next_requests in zip(trace.rows, _next_requests(trace), strict=True):
        run = 0
        while run < len(row.blocks) and due[row.blocks[run]] != _NEVER:
            run += 1
        hits.append(run)
        for depth, (block, request) in enumerate(zip(row.blocks, next_requests, strict=True)):
            held -= due[block] != _NEVER
            due[block] = _NEVER
            if request != _NEVER:
                due[block] = request * longest + depth
                heappush(heap, (-due[block], block))
                held += 1
        while held > capacity_blocks:
            latest, block = heappop(heap)
            if due[block] == -latest:
                due[block] = _NEVER
                held -= 1
    return hits


def _next_requests(trace: Trace) -> list[list[int]]:
    """For each request and block of it, the next request with that block."""
    upcoming = [_NEVER] * trace.blocks
    found = []
    for request in range(len(trace.rows) - 1, -1, -1):
        blocks = trace.rows[request].blocks
        found.append([upcoming[block] for block in blocks])
        for block in blocks:
            upcoming[block] = request
    found.reverse()
    return found
