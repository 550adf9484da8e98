"""What one format's reader gives for each request, before blocks of all files are numbered."""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import TypeAlias

import msgspec


class Record(msgspec.Struct, frozen=True):
    """One request as its file tells it."""

    where: int  # line in the file, or number of the request in its session; from 1
    time_s: float  # on the file's own clock
    input_tokens: int
    output_tokens: int
    session: str  # unique in the file; "" where the format has none
    scope: str  # ids mean the same inside one scope of one file
    hash_ids: tuple[int, ...]


class BadRecord(ValueError):
    """One record that cannot be used: the line (or request) it stands in, and why."""

    def __init__(self, where: int, why: str) -> None:
        super().__init__(why)
        self.where = where
        self.why = why


Found: TypeAlias = Record | BadRecord
"""A reader gives the records that it cannot use as well: whether to skip them is not its to decide."""

NumberedLine: TypeAlias = tuple[int, bytes]

Reader: TypeAlias = Callable[[Iterable[NumberedLine], int], Iterator[Found]]
"""From lines and the tokens a block (0 where the format has no blocks)."""


class Tail(Enum):
    """Whether a prompt's last, partial block has an id in a format."""

    HAS_ID = (True,)
    HAS_NONE = (False,)
    EITHER = (False, True)


def check_blocks(
    where: int, input_tokens: int, hash_ids: tuple[int, ...], block_tokens: int, tail: Tail
) -> None:
    """Raise BadRecord when ids repeat, or are not one a block."""
    whole, rest = divmod(input_tokens, block_tokens)
    fitting = sorted({whole + (has_id and rest > 0) for has_id in tail.value})
    if len(hash_ids) not in fitting:
        raise BadRecord(
            where,
            f"{len(hash_ids)} hash_ids do not fit {input_tokens} input tokens: blocks of {block_tokens} "
            f"tokens make {' or '.join(map(str, fitting))}; where the trace has another block size, say so "
            f"with --block-tokens",
        )
    if len(set(hash_ids)) != len(hash_ids):
        seen: set[int] = set()
        for block in hash_ids:
            if block in seen:
                raise BadRecord(where, f"the id {block} stands twice in hash_ids; an id names one prefix")
            seen.add(block)
