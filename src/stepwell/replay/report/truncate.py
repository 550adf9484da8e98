"""What-if: the client keeps only the newest tokens of a conversation, so prompts begin somewhere else."""

from collections.abc import Sequence

import msgspec

from stepwell.replay.traces.row import Trace


class Truncated(msgspec.Struct, frozen=True):
    """An infinite cache, where clients keep so many of the newest tokens."""

    kept_tokens: int | None  # None: all
    hit_rate_tokens: float
    truncated_requests: int


def truncation(trace: Trace, windows: Sequence[int]) -> list[Truncated]:
    """Untruncated first, then each window. Needs a trace with prefixes.

    A prompt cut at block o shares its block j with another that was cut at the same o and had the same
    block j: what a block's name says of all before it holds for all from o on too. A cut elsewhere shares
    nothing, as in a real cache: every token's context is another.
    """
    return [_at(trace, None), *(_at(trace, window) for window in windows)]


def _at(trace: Trace, window: int | None) -> Truncated:
    block_tokens = trace.block_tokens or 1
    seen: set[tuple[int, int]] = set()
    hit = tokens = truncated = 0
    for row in trace.rows:
        kept = row.input_tokens if window is None else min(window, row.input_tokens)
        cut = -(-(row.input_tokens - kept) // block_tokens)
        truncated += cut > 0
        tokens += row.input_tokens - cut * block_tokens if cut else kept
        is_held = True
        for block in row.blocks[cut : row.input_tokens // block_tokens]:
            known = (cut, block) in seen
            is_held = is_held and known
            hit += is_held * block_tokens
            if not known:
                seen.add((cut, block))
    return Truncated(window, hit / tokens if tokens else 0.0, truncated)
