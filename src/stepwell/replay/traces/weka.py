"""WEKA's agent sessions: one JSON object a session, ids local to it.

`{"id": "trace_0095", "block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0.0, "in": 68244,
"out": 131, "hash_ids": [1, 2, …]}, …]}`, with `t` in seconds since the session began. A file holds one
session, or one a line. Source: WEKA, kv-cache-tester, its published traces.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal

import msgspec

from stepwell.replay.traces.decode import Count, HashId, Seconds, decode, finite
from stepwell.replay.traces.record import BadRecord, Found, NumberedLine, Record, Tail, check_blocks

BLOCK_TOKENS = 64


class _Request(msgspec.Struct):
    t: Seconds
    input_tokens: Count = msgspec.field(name="in")
    output_tokens: Count = msgspec.field(name="out")
    hash_ids: tuple[HashId, ...]


class _Session(msgspec.Struct):
    id: str
    block_size: Count
    hash_id_scope: Literal["local", "global"]
    requests: list[msgspec.Raw]


def read(lines: Iterable[NumberedLine], block_tokens: int) -> Iterator[Found]:
    """A `Reader`. The session's own block size must be `block_tokens`."""
    sessions = msgspec.json.Decoder(_Session)
    for number, text in _documents(lines):
        try:
            session = decode(sessions, number, text)
            if session.block_size != block_tokens:
                raise BadRecord(
                    number,
                    f"session {session.id!r} has blocks of {session.block_size} tokens, not {block_tokens}: "
                    f"say --block-tokens {session.block_size}, and replay other sizes apart",
                )
        except BadRecord as error:
            yield error
            continue
        yield from _requests(session, number)


def _requests(session: _Session, number: int) -> Iterator[Found]:
    decoder = msgspec.json.Decoder(_Request)
    name = f"{number}:{session.id}"  # two sessions of one id are two sessions
    scope = name if session.hash_id_scope == "local" else ""
    for position, raw in enumerate(session.requests, 1):
        try:
            request = decode(decoder, number, bytes(raw))
            time_s = finite(number, "t", request.t)
            check_blocks(number, request.input_tokens, request.hash_ids, session.block_size, Tail.HAS_NONE)
        except BadRecord as error:
            yield BadRecord(number, f"session {session.id!r}, request {position}: {error.why}")
            continue
        yield Record(
            number, time_s, request.input_tokens, request.output_tokens, name, scope, request.hash_ids
        )


def _documents(lines: Iterable[NumberedLine]) -> Iterator[NumberedLine]:
    """One session a line; or all lines as one session, where the first alone is no JSON (indented)."""
    rest = iter(lines)
    first = next(rest, None)
    if first is None:
        return
    try:
        msgspec.json.decode(first[1], type=msgspec.Raw)
    except msgspec.DecodeError:
        yield first[0], b"\n".join(text for _, text in chain([first], rest))
        return
    yield first
    yield from rest
