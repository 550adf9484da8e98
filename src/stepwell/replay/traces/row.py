"""One request of a trace, and a whole trace: what every reader gives and every replay takes."""

from typing import TypeAlias

import msgspec

Block: TypeAlias = int
"""A block of a prompt, named by all tokens up to its end: a prompt is a path in a tree of these."""


class Row(msgspec.Struct, frozen=True):
    """One request. Its blocks are numbered 0, 1, 2, ... through the trace as they first appear."""

    arrival_s: float  # since the trace's first request
    input_tokens: int
    output_tokens: int
    session: int  # requests of one conversation share it
    blocks: tuple[Block, ...]  # leading blocks of the prompt; a block's parent comes before it


class Trace(msgspec.Struct, frozen=True):
    """Requests by arrival, and what was odd about their file."""

    rows: tuple[Row, ...]
    block_tokens: int | None  # tokens a block; None: the format tells nothing of shared prefixes
    blocks: int  # different ones
    sources: tuple[str, ...]  # file and format of each
    skipped_rows: int  # unreadable ones, where skipping was asked for
    warnings: tuple[str, ...]

    @property
    def asked_blocks(self) -> int:
        """Blocks of all requests, each time it is asked for."""
        return sum(len(row.blocks) for row in self.rows)


class TraceError(ValueError):
    """A trace that cannot be used; the message says which file and line, what is wrong, what to do."""
