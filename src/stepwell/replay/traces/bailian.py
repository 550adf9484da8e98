"""Qwen-Bailian traces: as Mooncake's, with seconds, blocks of 16 tokens and conversations.

`{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132,
"type": "text", "turn": 2, "hash_ids": [1089, …]}`; the parent of a first turn is -1. Source: Wang et al.,
"KVCache Cache in the Wild", USENIX ATC 2025, and the README of its published traces.
"""

from collections.abc import Iterable, Iterator

import msgspec

from stepwell.replay.traces.decode import Count, HashId, Seconds, decode, finite
from stepwell.replay.traces.record import BadRecord, Found, NumberedLine, Record, Tail, check_blocks

BLOCK_TOKENS = 16


class _Line(msgspec.Struct):
    timestamp: Seconds
    input_length: Count
    output_length: Count
    hash_ids: tuple[HashId, ...]
    chat_id: int
    parent_chat_id: int


def read(lines: Iterable[NumberedLine], block_tokens: int) -> Iterator[Found]:
    """A `Reader`. A turn whose parent is not in the trace begins a conversation."""
    decoder = msgspec.json.Decoder(_Line)
    first_turn: dict[int, int] = {}  # chat id -> that of its conversation's first turn
    for number, text in lines:
        try:
            line = decode(decoder, number, text)
            time_s = finite(number, "timestamp", line.timestamp)
            check_blocks(number, line.input_length, line.hash_ids, block_tokens, Tail.EITHER)
        except BadRecord as error:
            yield error
            continue
        first = first_turn[line.chat_id] = first_turn.get(line.parent_chat_id, line.chat_id)
        yield Record(number, time_s, line.input_length, line.output_length, str(first), "", line.hash_ids)
