"""What a trace holds, in figures."""

from collections.abc import Sequence

import msgspec

from stepwell.replay.traces.row import Trace

PERCENTILES = (10, 50, 90, 99)


class Summary(msgspec.Struct, frozen=True):
    """Figures of one trace. Reuse is None where the format tells nothing of it."""

    sources: tuple[str, ...]
    requests: int
    skipped_rows: int
    sessions: int
    span_s: float  # first to last arrival
    input_tokens: int
    output_tokens: int
    input_tokens_percentiles: dict[str, float]  # "p50" and so on; empty without requests
    output_tokens_percentiles: dict[str, float]
    block_tokens: int | None
    asked_blocks: int | None  # of all requests
    different_blocks: int | None
    ceiling_hit_rate_blocks: float | None  # of an infinite cache
    reuse_pause_s_percentiles: dict[str, float]  # from one use of a block to the next
    warnings: tuple[str, ...]


def summarize(trace: Trace) -> Summary:
    """Linear in blocks, but for sorting."""
    has_blocks = trace.block_tokens is not None
    asked = trace.asked_blocks
    rows = trace.rows
    return Summary(
        sources=trace.sources,
        requests=len(rows),
        skipped_rows=trace.skipped_rows,
        sessions=len({row.session for row in rows}),
        span_s=rows[-1].arrival_s - rows[0].arrival_s if rows else 0.0,
        input_tokens=sum(row.input_tokens for row in rows),
        output_tokens=sum(row.output_tokens for row in rows),
        input_tokens_percentiles=_percentiles([row.input_tokens for row in rows]),
        output_tokens_percentiles=_percentiles([row.output_tokens for row in rows]),
        block_tokens=trace.block_tokens,
        asked_blocks=asked if has_blocks else None,
        different_blocks=trace.blocks if has_blocks else None,
        ceiling_hit_rate_blocks=ceiling(trace) if has_blocks else None,
        reuse_pause_s_percentiles=_percentiles(_pauses(trace)),
        warnings=trace.warnings,
    )


def ceiling(trace: Trace) -> float:
    """The share of blocks that an infinite cache hits: all but each block's first time. 0 without blocks."""
    asked = trace.asked_blocks
    return (asked - trace.blocks) / asked if asked else 0.0


def _pauses(trace: Trace) -> list[float]:
    """Seconds from each use of a block to its next."""
    last_s: dict[int, float] = {}
    pauses = []
    for row in trace.rows:
        for block in row.blocks:
            before_s = last_s.get(block)
            if before_s is not None:
                pauses.append(row.arrival_s - before_s)
            last_s[block] = row.arrival_s
    return pauses


def _percentiles(values: Sequence[int] | Sequence[float]) -> dict[str, float]:
    """By nearest rank: each is one of the values."""
    ordered = sorted(values)
    ranks = {percent: -(-percent * len(ordered) // 100) for percent in PERCENTILES}
    return {f"p{percent}": ordered[rank - 1] for percent, rank in ranks.items()} if ordered else {}
