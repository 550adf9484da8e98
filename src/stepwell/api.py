"""The public Python interface: one for a cache in this process and for one behind a server."""

import contextlib
import itertools
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from stepwell import wire
from stepwell.client import CALL_TIMEOUT_S, ArenaClient, Client, Dial, dial_unix
from stepwell.config import default_socket
from stepwell.embedded import EmbeddedServer
from stepwell.keys import chunk_keys
from stepwell.layout import fingerprint as fingerprint_of
from stepwell.layout import space_id
from stepwell.server.host import DiskSetting
from stepwell.sizes import parse_size
from stepwell.tiers.arena import ArenaMap
from stepwell.types import KEY_BYTES, Hit, Key, Reason, SpaceSpec

CLEAR_TIMEOUT_S = 60.0  # a million chunks take some seconds
FLUSH_TIMEOUT_S = 60.0


def open(
    memory: str | int = "4GiB",
    disk: str | os.PathLike[str] | None = None,
    disk_size: str | int = "64GiB",
    eviction: str = "lru",
) -> "Cache":
    """A cache in this process. `memory` is the whole arena, in bytes or as "4GiB".

    `disk` is a folder for what memory evicts and for the next start; it never takes more than `disk_size`.

    Raises ValueError for a size or policy that cannot be, ArenaTooLarge (a ValueError) when the machine
    or container has less, DiskError when the folder cannot be used or another cache uses it.
    """
    setting = None if disk is None else DiskSetting(Path(disk).absolute(), parse_size(str(disk_size)))
    server = EmbeddedServer(parse_size(str(memory)), eviction, setting)
    return Cache(server.dial, server)


def connect(socket: str | os.PathLike[str] | None = None) -> "Cache":
    """A cache behind the server on this unix socket; without one, STEPWELL_SOCKET or the user's default.

    Works without a server too: everything is a miss until one is there.
    """
    path = Path(
        socket if socket is not None else os.environ.get("STEPWELL_SOCKET") or default_socket(os.environ)
    ).expanduser()
    return Cache(dial_unix(path), None)


class Cache:
    """Chunks by space and key. Thread-safe; its bytes live in an arena shared with the server."""

    def __init__(self, dial: Dial, server: EmbeddedServer | None) -> None:
        self._session = f"python-{os.getpid()}-{uuid.uuid4().hex}"
        self._dial = dial
        self._server = server
        self._client = Client(dial, self._session)
        self._client.connect()
        self._arenas: ArenaClient | None = None
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._opened: dict[SpaceSpec, str] = {}  # in which server
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether a server answers."""
        return self._client.server_id is not None

    def space(self, fingerprint: str | bytes, chunk_tokens: int, chunk_bytes: int) -> "Space":
        """Chunks of exactly `chunk_bytes` bytes that hold `chunk_tokens` tokens each.

        `fingerprint` names all that makes bytes interchangeable (see `stepwell.layout.EngineSpace`);
        chunks of different fingerprints or sizes never meet. Raises ValueError for sizes below 1.
        """
        if chunk_tokens < 1 or chunk_bytes < 1:
            raise ValueError(f"a chunk needs at least 1 token and 1 byte, not {chunk_tokens}, {chunk_bytes}")
        return Space(self, SpaceSpec(fingerprint_of(fingerprint), chunk_tokens, chunk_bytes))

    def stats(self) -> dict[str, Any]:
        """Every counter as plain data, as `/stats` gives them; empty when no server answers."""
        reply = self._client.call(wire.GetStats(), wire.Stats)
        return {} if reply is None else msgspec.to_builtins(reply.stats)

    def clear(self) -> int:
        """Forget every chunk of every space: how many there were."""
        reply = self._client.call(wire.Clear(None), wire.Cleared, CLEAR_TIMEOUT_S)
        return 0 if reply is None else reply.chunks

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until what was stored is written to every slower tier, or dropped: whether it was in time."""
        end_s = time.monotonic() + timeout_s
        for pause_s in _pauses():
            reply = self._client.call(wire.Ping(), wire.Pong)
            if reply is None or reply.unwritten_chunks == 0:
                return reply is not None
            if time.monotonic() + pause_s > end_s:
                return False
            time.sleep(pause_s)
        raise AssertionError("pauses do not end")

    def close(self) -> None:
        """Give back all that is pinned, and end an embedded cache. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._client.close()
        if self._arenas is not None:
            self._arenas.close()
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _next_id(self) -> int:
        return next(self._ids)

    def _open_space(self, spec: SpaceSpec) -> str | None:
        """Make sure that the server knows the space: its id, None without a server."""
        server_id = self._client.server_id
        if server_id is None or self._opened.get(spec) == server_id:
            return server_id
        if self._client.call(wire.OpenSpace(spec), wire.SpaceOpened) is None:
            return None
        self._opened[spec] = server_id
        return server_id

    def _arena(self, server_id: str) -> ArenaMap | None:
        # Mapped at first use: `stats` and `lookup` need no bytes.
        with self._lock:
            if self._arenas is None:
                self._arenas = ArenaClient(self._dial, self._session)
                self._arenas.connect(CALL_TIMEOUT_S)
            return self._arenas.arena_of(server_id)


class Reservation(Mapping[Key, memoryview]):
    """Chunks to write: a writable view of `chunk_bytes` bytes for each key that nobody holds or writes."""

    def __init__(self, views: dict[Key, memoryview], stopped: Reason | None) -> None:
        self._views = views
        self.stopped = stopped  # why the last keys have no room, None when all have

    def __getitem__(self, key: Key) -> memoryview:
        return self._views[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class Lease:
    """Chunks to read: they stay where they are until the lease ends."""

    def __init__(self, views: list[memoryview]) -> None:
        self.views = views  # read-only, of the leading chunks in memory

    @property
    def chunks(self) -> int:
        """How many leading chunks there are."""
        return len(self.views)


class Space:
    """Chunks of one size that are interchangeable among all who open the space alike."""

    def __init__(self, cache: Cache, spec: SpaceSpec) -> None:
        self._cache = cache
        self._client = cache._client
        self._spec = spec
        self._id = space_id(spec)

    @property
    def chunk_tokens(self) -> int:
        return self._spec.chunk_tokens

    @property
    def chunk_bytes(self) -> int:
        return self._spec.chunk_bytes

    def keys(self, token_ids: Sequence[int], salt: str | bytes | None = None) -> list[Key]:
        """One key a whole chunk of the prompt; prompts with another salt share none. See `chunk_keys`."""
        return chunk_keys(token_ids, self._spec.chunk_tokens, salt)

    def lookup(self, keys: Sequence[Key]) -> Hit:
        """How many leading chunks are held, and where. Pins nothing."""
        packed = _pack(keys)
        if self._cache._open_space(self._spec) is None:
            return Hit(0, ())
        reply = self._client.call(wire.Lookup(self._id, packed), wire.Found)
        return Hit(0, ()) if reply is None else reply.hit

    @contextlib.contextmanager
    def load(self, keys: Sequence[Key], timeout_s: float = 0.2) -> Iterator[Lease]:
        """The leading chunks that are verified in memory before the time-out, pinned until the end.

        `keys` begins at the prompt's first chunk. Views must not be used after the end.
        """
        packed = _pack(keys)
        server_id = self._cache._open_space(self._spec)
        arena = None if server_id is None else self._cache._arena(server_id)
        if arena is None:
            yield Lease([])
            return
        number = self._cache._next_id()
        end_s = time.monotonic() + timeout_s
        reply = self._client.call(wire.Load(number, self._id, packed), wire.Loaded)
        if reply is None:
            yield Lease([])
            return
        views: list[memoryview] = []
        try:
            for pause_s in _pauses():
                if reply is None or self._client.server_id != server_id:
                    break  # the places may be another server's
                views += (
                    arena.view(offset, self._spec.chunk_bytes).toreadonly()
                    for offset in wire.unpack_places(reply.places)
                )
                if reply.coming == reply.chunks or time.monotonic() + pause_s > end_s:
                    break
                time.sleep(pause_s)
                reply = self._client.call(wire.More(number), wire.Loaded)
            yield Lease(views)
        finally:
            _let_go(views)
            self._client.note(wire.Release(number))
            self._client.flush()

    @contextlib.contextmanager
    def reserve(self, keys: Sequence[Key]) -> Iterator[Reservation]:
        """Room for the chunks that nobody holds or writes yet, as far as there is any.

        `keys` begins at the prompt's first chunk: a chunk is kept only if the one before it is. On
        leaving, all chunks become visible; on an exception none does.
        """
        packed = _pack(keys)
        server_id = self._cache._open_space(self._spec)
        arena = None if server_id is None else self._cache._arena(server_id)
        if arena is None:
            yield Reservation({}, Reason.NO_SERVER)
            return
        number = self._cache._next_id()
        run = wire.Run(self._id, None, packed)
        reply = self._client.call(wire.Reserve(number, [run]), wire.Reserved)
        if reply is None:
            yield Reservation({}, Reason.NO_SERVER)
            return
        granted = reply.runs[0]
        views: dict[Key, memoryview] = {}
        end: wire.Note = wire.Abort(number)
        try:
            if self._client.server_id == server_id:
                for chunk, offset in zip(granted.chunks, wire.unpack_places(granted.places), strict=True):
                    views[bytes(keys[chunk])] = arena.view(offset, self._spec.chunk_bytes)
                yield Reservation(views, granted.stopped)
                end = wire.Commit(number)
            else:  # the places may be another server's
                yield Reservation({}, Reason.NO_SERVER)
        finally:
            _let_go(views.values())
            self._client.note(end)
            self._client.call(wire.Ping(), wire.Pong)  # visible to all when we return

    def store(self, key: Key, data: bytes | bytearray | memoryview) -> bool:
        """Store one chunk by itself: whether it is held now. Raises ValueError for data of another size.

        Nothing is said of the chunk before it, so it may go before or after that one; a lookup finds it
        all the same.
        """
        view = memoryview(data).cast("B")
        if view.nbytes != self._spec.chunk_bytes:
            raise ValueError(f"a chunk of this space has {self._spec.chunk_bytes} bytes, not {view.nbytes}")
        with self.reserve([key]) as new:
            for slot in new.values():
                slot[:] = view
        return self.lookup([key]).chunks == 1

    def fetch(self, key: Key) -> bytes | None:
        """One chunk's bytes, None when it is not held."""
        with self.load([key]) as lease:
            return bytes(lease.views[0]) if lease.views else None


def _pauses() -> Iterator[float]:
    """Between two questions whether something has come: short at first, never so long that it matters."""
    pause_s = 0.0002
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, 0.005)


def _pack(keys: Sequence[Key]) -> bytes:
    for key in keys:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    return b"".join(keys)


def _let_go(views: Iterable[memoryview]) -> None:
    for view in views:
        with contextlib.suppress(BufferError):  # an array of the user's still points into it
            view.release()
