"""Stepwell's own trace format, which every other converts to.

The first line is `{"format": "stepwell-trace/1", "block_tokens": 512}` (null: no prefixes); each further one
is a request: `{"arrival_s": 1.5, "input_tokens": 1030, "output_tokens": 52, "session": 7, "blocks": [0, 1]}`.
A block is named by all tokens up to its end; a prompt's last, partial block may have an id or not.
"""

from collections.abc import Iterable, Iterator
from typing import IO

import msgspec

from stepwell.replay.traces.decode import Count, HashId, Seconds, decode, finite
from stepwell.replay.traces.record import BadRecord, Found, NumberedLine, Record, Tail, check_blocks
from stepwell.replay.traces.row import Trace

FORMAT = "stepwell-trace/1"


class Heading(msgspec.Struct, frozen=True):
    """The first line."""

    format: str
    block_tokens: Count | None


class _Line(msgspec.Struct):
    arrival_s: Seconds
    input_tokens: Count
    output_tokens: Count
    session: int
    blocks: tuple[HashId, ...]


def read_heading(number: int, text: bytes) -> Heading:
    """Raises BadRecord, also for a version of the format that is not this one."""
    heading = decode(msgspec.json.Decoder(Heading), number, text)
    if heading.format != FORMAT:
        raise BadRecord(number, f"the format {heading.format!r} is not {FORMAT!r}")
    if heading.block_tokens == 0:
        raise BadRecord(number, "block_tokens is 0; null says that there are no prefixes")
    return heading


def read(lines: Iterable[NumberedLine], block_tokens: int) -> Iterator[Found]:
    """A `Reader`."""
    decoder = msgspec.json.Decoder(_Line)
    for number, text in _after_heading(lines):
        try:
            line = decode(decoder, number, text)
            time_s = finite(number, "arrival_s", line.arrival_s)
            if block_tokens:
                check_blocks(number, line.input_tokens, line.blocks, block_tokens, Tail.EITHER)
            elif line.blocks:
                raise BadRecord(number, "blocks in a trace whose first line says block_tokens null")
        except BadRecord as error:
            yield error
            continue
        session = str(line.session)
        yield Record(number, time_s, line.input_tokens, line.output_tokens, session, "", line.blocks)


def write(trace: Trace, file: IO[bytes]) -> None:
    """The trace in this format; `read` gives it back."""
    encoder = msgspec.json.Encoder()
    file.write(encoder.encode(Heading(FORMAT, trace.block_tokens)) + b"\n")
    for row in trace.rows:
        line = _Line(row.arrival_s, row.input_tokens, row.output_tokens, row.session, row.blocks)
        file.write(encoder.encode(line) + b"\n")


def _after_heading(lines: Iterable[NumberedLine]) -> Iterator[NumberedLine]:
    """All lines but the first."""
    rest = iter(lines)
    next(rest, None)
    yield from rest
