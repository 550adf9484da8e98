"""Mooncake's traces: one JSON object a line, ids in one space through the file.

`{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}`, the timestamp in
milliseconds, blocks of 512 tokens. Source: Qin et al., "Mooncake", FAST 2025, and its published traces.
"""

from collections.abc import Iterable, Iterator

import msgspec

from stepwell.replay.traces.decode import Count, HashId, Seconds, decode, finite
from stepwell.replay.traces.record import BadRecord, Found, NumberedLine, Record, Tail, check_blocks

BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    timestamp: Seconds  # milliseconds
    input_length: Count
    output_length: Count
    hash_ids: tuple[HashId, ...]


def read(lines: Iterable[NumberedLine], block_tokens: int) -> Iterator[Found]:
    """A `Reader`."""
    decoder = msgspec.json.Decoder(_Line)
    for number, text in lines:
        try:
            line = decode(decoder, number, text)
            time_s = finite(number, "timestamp", line.timestamp) / 1e3
            check_blocks(number, line.input_length, line.hash_ids, block_tokens, Tail.HAS_ID)
        except BadRecord as error:
            yield error
            continue
        yield Record(number, time_s, line.input_length, line.output_length, "", "", line.hash_ids)
