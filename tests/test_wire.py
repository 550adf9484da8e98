"""Frames: what is said is what is heard, and anything else is a ProtocolError."""

import random
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell import wire
from stepwell.types import CacheStats, Hit, Reason, RequestStats, SpaceSpec, TierStats

TIER = TierStats(1, 2, 3, 4, 5, 6, 7)
STATS = CacheStats(
    "0.1",
    "id",
    1.5,
    1,
    2,
    3,
    4,
    5,
    6,
    {Reason.NOT_HELD: 7},
    {Reason.NO_ROOM: 8},
    RequestStats(1, 2, 3, 4, 5),
    {"memory": TIER},
)
REQUESTS: list[wire.Message] = [
    wire.Hello(1, "s", True, 3, b"layout"),
    wire.Mapped(),
    wire.Workers(),
    wire.OpenSpace(SpaceSpec(b"f" * 32, 16, 4096)),
    wire.Lookup(b"s" * 16, b"k" * 64),
    wire.Prefetch(b"s" * 16, b"k" * 64),
    wire.Load(7, b"s" * 16, b"k" * 64, 1, True),
    wire.More(7),
    wire.Forget(b"s" * 16),
    wire.Checked(b"s" * 16, b"k" * 32, 0.5, False),
    wire.Reserve(8, [wire.Run(b"s" * 16, None, b"k" * 32), wire.Run(b"s" * 16, b"p" * 32, b"")]),
    wire.Commit(8),
    wire.Abort(8),
    wire.Release(7),
    wire.Report(RequestStats(1, 10, 2, 3, 5), {Reason.TOO_SLOW: 1}, {Reason.NO_WORKER: 2}),
    wire.Clear(None),
    wire.Clear(b"s" * 16),
    wire.Ping(),
    wire.GetStats(),
]
REPLIES: list[wire.Message] = [
    wire.Welcome(1, "0.1", "id", 4096, True),
    wire.Refused("why"),
    wire.Attached({0: b"a", 1: b""}),
    wire.SpaceOpened(b"s" * 16),
    wire.Found(Hit(2, ("memory", "disk"))),
    wire.Loaded(2, wire.pack_places([0, 4096]), 5, 0.25),
    wire.Reserved([wire.Granted(1, [1, 2], wire.pack_places([0, 8192]), Reason.NO_ROOM)]),
    wire.Cleared(3),
    wire.Pong(4),
    wire.Stats(STATS),
]


def payload(message: wire.Message) -> bytes:
    frame = wire.encode(message)
    assert wire.frame_bytes(frame[:4]) == len(frame) - 4
    return frame[4:]


def test_every_message_is_tried() -> None:
    assert {type(m) for m in REQUESTS} == set(wire.Request.__args__)
    assert {type(m) for m in REPLIES} == set(wire.Reply.__args__)


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: type(m).__name__)
def test_requests_arrive_as_they_were(message: wire.Message) -> None:
    assert wire.decode_request(payload(message)) == message


@pytest.mark.parametrize("message", REPLIES, ids=lambda m: type(m).__name__)
def test_replies_arrive_as_they_were(message: wire.Message) -> None:
    assert wire.decode_reply(payload(message)) == message


def test_a_request_is_no_reply_and_the_other_way_round() -> None:
    for message in REQUESTS:
        with pytest.raises(wire.ProtocolError):
            wire.decode_reply(payload(message))
    for message in REPLIES:
        with pytest.raises(wire.ProtocolError):
            wire.decode_request(payload(message))


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(garbage: bytes) -> None:
    # No garbage of this kind is a message: that would be an array beginning with a tag.
    for decode in (wire.decode_request, wire.decode_reply):
        with pytest.raises(wire.ProtocolError):
            decode(garbage)


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: type(m).__name__)
def test_a_damaged_message_is_an_error_or_another_message(message: wire.Message) -> None:
    """Never another exception: whoever reads catches one."""
    whole = payload(message)
    for end in range(len(whole)):
        with pytest.raises(wire.ProtocolError):
            wire.decode_request(whole[:end])
    chance = random.Random(1)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] = chance.randrange(256)
        try:
            wire.decode_request(damaged)
        except wire.ProtocolError:
            continue


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x91" * 100_000 + b"\xc0",
        b"\x92\xa4ping" + b"\x91" * 100_000 + b"\xc0",
        b"\x92\xa4ping\xdd\xff\xff\xff\xff",
        b"\x92\xa5hello\xdb\xff\xff\xff\xff",
    ],
    ids=["nested", "nested behind a tag", "a length of 4 Gi items", "a text of 4 GiB"],
)
def test_a_bomb_is_a_protocol_error(bomb: bytes) -> None:
    with pytest.raises(wire.ProtocolError):
        wire.decode_request(bomb)


def test_a_text_that_is_no_utf8_is_a_protocol_error() -> None:
    with pytest.raises(wire.ProtocolError):
        wire.decode_request(b"\x93\xa5hello\x01\xa2\xff\xfe")


def test_a_frame_has_a_largest_size() -> None:
    most = wire.MAX_FRAME_BYTES
    assert wire.frame_bytes(struct.pack("<I", most)) == most
    with pytest.raises(wire.ProtocolError, match=f"a frame of {most + 1} bytes is larger than {most}"):
        wire.frame_bytes(struct.pack("<I", most + 1))


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_places_come_back(offsets: list[int]) -> None:
    packed = wire.pack_places(offsets)
    assert len(packed) == 8 * len(offsets)
    assert wire.unpack_places(packed) == tuple(offsets)


@given(st.integers(0, 12), st.integers(0, 5), st.integers(-15, 15), st.integers(-15, 15))
def test_a_run_of_chunks_is_a_sequence(count: int, first: int, start: int, stop: int) -> None:
    first = min(first, count)
    keys = [bytes([n]) * 32 for n in range(count)]
    ids = [b"s" * 16 + key for key in keys][first:]
    run = wire.ChunkRun(b"s" * 16, b"".join(keys), first)
    assert (list(run), len(run)) == (ids, len(ids))
    assert list(run[start:stop]) == ids[start:stop]
    assert list(run[1:][start:stop]) == ids[1:][start:stop]
    for at in range(-count - 2, count + 2):
        if -len(ids) <= at < len(ids):
            assert run[at] == ids[at]
        else:
            with pytest.raises(IndexError):
                run[at]


def test_a_run_of_chunks_takes_whole_keys_and_no_steps() -> None:
    with pytest.raises(wire.ProtocolError, match="33 bytes are not a whole number of 32-byte keys"):
        wire.ChunkRun(b"s" * 16, b"k" * 33)
    with pytest.raises(ValueError, match="no steps"):
        wire.ChunkRun(b"s" * 16, b"k" * 64)[::2]


def test_stats_are_plain_data_for_json() -> None:
    plain = msgspec.to_builtins(STATS)
    assert plain["missed"] == {"not_held": 7}
    assert msgspec.json.decode(msgspec.json.encode(plain)) == plain


def test_ids_of_a_part_are_those_asked_for_one_by_one() -> None:
    run = wire.ChunkRun(b"s" * 16, b"".join(bytes([n]) * 32 for n in range(10)))
    for part in (run, run[2:], run[2:7][1:]):
        for first in range(len(part) + 1):
            for end in range(first, len(part) + 1):
                assert list(part.ids(first, end)) == [part[n] for n in range(first, end)]
