"""What clients and the cache server say to each other over the unix socket.

A frame is 4 bytes of length (little-endian) and a msgpack array whose first item is the message's tag.
Bulk bytes never pass: replies carry offsets into the arena, whose descriptor comes with `Welcome`.

Replies come in the order of requests. Messages derived from `Note` have no reply. Ids of leases and
reservations are chosen by the client, so that it can end one whose reply it never saw.
"""

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias, overload

import msgspec

from stepwell.types import KEY_BYTES, CacheStats, ChunkId, Hit, Key, Reason, RequestStats, SpaceId, SpaceSpec

PROTOCOL = 2
MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="t"):
    """Base of all messages."""


class Note(Message, frozen=True):
    """Base of the messages that have no reply."""


class Hello(Message, frozen=True, tag="hello"):
    """First on every connection. `Welcome` follows, with the arena's descriptor when `maps_arena`."""

    protocol: int
    session: str  # the connections of one engine share it; what they hold ends with the last of them
    maps_arena: bool = False
    rank: int = 0
    layout: bytes = b""  # digest of this worker's KV layout, empty for clients without KV pages


class Welcome(Message, frozen=True, tag="welcome"):
    protocol: int
    version: str
    server_id: str  # new with every start of a server
    arena_bytes: int
    promotes: bool = False  # whether there are slower tiers, so that a `Prefetch` may help


class Refused(Message, frozen=True, tag="refused"):
    """The request cannot be answered; the connection ends. `why` is for people."""

    why: str


class Mapped(Note, frozen=True, tag="mapped"):
    """The arena of this connection is mapped: copies can begin."""


class Workers(Message, frozen=True, tag="workers"):
    """Which workers of this session have said `Mapped`?"""


class Attached(Message, frozen=True, tag="attached"):
    layouts: dict[int, bytes]  # by rank


class OpenSpace(Message, frozen=True, tag="space"):
    spec: SpaceSpec


class SpaceOpened(Message, frozen=True, tag="opened"):
    space: SpaceId


class Lookup(Message, frozen=True, tag="lookup"):
    space: SpaceId
    keys: bytes  # whole keys, one after the other, first chunk first


class Found(Message, frozen=True, tag="found"):
    hit: Hit


class Prefetch(Note, frozen=True, tag="prefetch"):
    """A prompt is on its way: bring what slower tiers hold of it up to memory."""

    space: SpaceId
    keys: bytes


class Load(Message, frozen=True, tag="load"):
    """Pin the leading chunks that are verified in memory, from chunk number `first` on.

    Those that only slower tiers hold are brought up; `More` says how far that has come.
    """

    lease: int
    space: SpaceId
    keys: bytes
    first: int = 0
    again: bool = False  # the same request asked before: do not count it once more


class More(Message, frozen=True, tag="more"):
    """Pin what has come up for this lease since the last answer."""

    lease: int


class Loaded(Message, frozen=True, tag="loaded"):
    chunks: int  # leading chunks that lie in memory
    places: bytes  # arena offsets of those pinned by this call, up to chunk `chunks`: see `pack_places`
    coming: int = 0  # leading chunks that will, unless something fails; never below `chunks`
    ready_in_s: float = 0.0  # what is coming is expected then; told once, by `Load`


class Run(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of one prompt's chain."""

    space: SpaceId
    parent: Key | None  # the key before the first, None at the start of a prompt
    keys: bytes


class Reserve(Message, frozen=True, tag="reserve"):
    """Room for those chunks of each run that nobody holds or writes yet."""

    reservation: int
    runs: list[Run]


class Granted(msgspec.Struct, frozen=True, array_like=True):
    """The answer for one run."""

    held: int  # leading chunks of the run that are held already
    chunks: list[int]  # which chunks of the run to write, ascending
    places: bytes  # their arena offsets
    stopped: Reason | None  # why the chunks after the last of them have no room


class Reserved(Message, frozen=True, tag="reserved"):
    runs: list[Granted]


class Commit(Note, frozen=True, tag="commit"):
    """Every chunk of the reservation is written."""

    reservation: int


class Abort(Note, frozen=True, tag="abort"):
    """Nobody writes into the reservation's slots any more; nothing of it becomes visible."""

    reservation: int


class Release(Note, frozen=True, tag="release"):
    """Nobody reads the lease's slots any more."""

    lease: int


class Report(Note, frozen=True, tag="report"):
    """What an engine did with a request's prompt, once for each request."""

    requests: RequestStats
    missed: dict[Reason, int] = {}
    dropped: dict[Reason, int] = {}

    def plus(self, other: "Report") -> "Report":
        """Both in one."""
        return Report(
            self.requests.plus(other.requests),
            dict(Counter(self.missed) + Counter(other.missed)),
            dict(Counter(self.dropped) + Counter(other.dropped)),
        )


class Checked(Note, frozen=True, tag="checked"):
    """A chunk that was held was computed again, and compared."""

    space: SpaceId
    key: Key
    difference: float  # 0: equal; see `stepwell.policy.canary`
    matches: bool


class Forget(Note, frozen=True, tag="forget"):
    """Nobody will ask for this space again: its chunks can go, when there is time."""

    space: SpaceId


class Clear(Message, frozen=True, tag="clear"):
    space: SpaceId | None  # None: every space


class Cleared(Message, frozen=True, tag="cleared"):
    chunks: int


class Ping(Message, frozen=True, tag="ping"):
    """Everything sent before on this connection has taken effect when `Pong` comes."""


class Pong(Message, frozen=True, tag="pong"):
    unwritten_chunks: int = 0  # on their way to slower tiers


class GetStats(Message, frozen=True, tag="stats"):
    pass


class Stats(Message, frozen=True, tag="stats-are"):
    stats: CacheStats


Request: TypeAlias = (
    Hello | Mapped | Workers | OpenSpace | Lookup | Prefetch | Load | More | Reserve | Commit | Abort
    | Release | Report | Checked | Forget | Clear | Ping | GetStats
)  # fmt: skip
Reply: TypeAlias = (
    Welcome | Refused | Attached | SpaceOpened | Found | Loaded | Reserved | Cleared | Pong | Stats
)

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


class ProtocolError(ValueError):
    """The other side sent something that is no message of this protocol."""


def encode(message: Message) -> bytes:
    """One frame."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def frame_bytes(head: bytes | bytearray | memoryview) -> int:
    """Payload length from a frame's first 4 bytes. Raises ProtocolError when it is too large."""
    (nbytes,) = _LENGTH.unpack_from(head)
    if nbytes > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {nbytes} bytes is larger than {MAX_FRAME_BYTES}")
    return int(nbytes)


def decode_request(payload: bytes | bytearray | memoryview) -> Request:
    """Raises ProtocolError for anything but a request."""
    try:
        return _request_decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(str(error)) from error


def decode_reply(payload: bytes | bytearray | memoryview) -> Reply:
    """Raises ProtocolError for anything but a reply."""
    try:
        return _reply_decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(str(error)) from error


def pack_places(offsets: Sequence[int]) -> bytes:
    """Arena offsets as unsigned 64-bit little-endian integers."""
    return struct.pack(f"<{len(offsets)}Q", *offsets)


def unpack_places(places: bytes) -> tuple[int, ...]:
    """The inverse of `pack_places`."""
    return struct.unpack(f"<{len(places) // 8}Q", places)


class ChunkRun(Sequence[ChunkId]):
    """Chunk ids made on demand from packed keys: a bisection over 8,192 keys builds 14 ids."""

    __slots__ = ("_count", "_first", "_keys", "_space")

    def __init__(self, space: SpaceId, keys: bytes, first: int = 0, count: int | None = None) -> None:
        """Raises ProtocolError when `keys` is not a whole number of keys."""
        if len(keys) % KEY_BYTES:
            raise ProtocolError(f"{len(keys)} bytes are not a whole number of {KEY_BYTES}-byte keys")
        self._space = space
        self._keys = keys
        self._first = first
        self._count = len(keys) // KEY_BYTES - first if count is None else count

    @property
    def space(self) -> SpaceId:
        return self._space

    def ids(self, first: int, end: int) -> Iterator[ChunkId]:
        """The ids from `first` to `end`, at a third of the cost of asking for each."""
        space, keys = self._space, self._keys
        start, stop = (self._first + first) * KEY_BYTES, (self._first + end) * KEY_BYTES
        return (space + keys[at : at + KEY_BYTES] for at in range(start, stop, KEY_BYTES))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> ChunkId: ...
    @overload
    def __getitem__(self, index: slice) -> "ChunkRun": ...
    def __getitem__(self, index: int | slice) -> "ChunkId | ChunkRun":
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            if step != 1:
                raise ValueError("a run of chunks has no steps")
            return ChunkRun(self._space, self._keys, self._first + start, max(0, stop - start))
        if index < 0:
            index += self._count
        if not 0 <= index < self._count:
            raise IndexError(index)
        start = (self._first + index) * KEY_BYTES
        return self._space + self._keys[start : start + KEY_BYTES]
