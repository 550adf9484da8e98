"""What engines and programs hold of a cache server: calls that never wait long and never raise.

A server that hangs, dies or is absent costs one short time-out; from then on every call answers None at
once, while a thread in the background tries to connect again.
"""

import asyncio
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stepwell import wire
from stepwell.tiers.arena import ArenaMap

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 0.25
"""Longest wait for one answer. A server that shares two busy cores with an engine answers within a few
scheduler slices (some 10 ms); three such calls in a step stay below one second."""

CONNECT_TIMEOUT_S = 2.0

KEEP_ENDED_S = 10.0
"""How long a dead server's arena stays mapped after the last step that may load from it: longer than a step
waits between its schedule and its worker. Its memory is not free before, so a server with more than half of
the memory is refused so long."""

_STEPS_AHEAD = 2  # one that a worker has begun, and one that was scheduled behind it

_UCRED = struct.Struct("3i")  # pid, uid, gid: unix(7)
_RETRY_FIRST_S = 0.05
_RETRY_MOST_S = 1.0
_RETRY_SLOW_MOST_S = 30.0

Dial = Callable[[], socket.socket]
"""Opens a stream to the server. Raises OSError when none is there."""

ReplyT = TypeVar("ReplyT", bound=wire.Message)


def dial_unix(path: Path) -> Dial:
    """Connections to the server on this socket."""

    def dial() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect(str(path))
            _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            if uid not in (0, os.getuid()):
                raise PermissionError(f"the server on {path} belongs to another user (uid {uid})")
        except BaseException:
            sock.close()
            raise
        return sock

    return dial


class Channel:
    """One connection: messages out, replies in, with a deadline. Any error means: close it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, frames: bytes, deadline_s: float) -> None:
        """Raises OSError (TimeoutError among them)."""
        self.sock.settimeout(_left(deadline_s))
        self.sock.sendall(frames)

    def receive(self, deadline_s: float) -> wire.Reply:
        """Raises OSError, or ProtocolError for anything but a reply."""
        head = self._read(4, deadline_s)
        return wire.decode_reply(self._read(wire.frame_bytes(head), deadline_s))

    def welcome(self, hello: wire.Hello, deadline_s: float) -> tuple[wire.Welcome, int | None]:
        """Introduce ourselves: the server's answer, and the arena's descriptor when asked for.

        Raises OSError or ProtocolError.
        """
        self.send(wire.encode(hello), deadline_s)
        fd: int | None = None
        self.sock.settimeout(_left(deadline_s))
        head, fds, _, _ = socket.recv_fds(self.sock, 4, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if fds:
                fd = fds[0]
            head += self._read(4 - len(head), deadline_s) if head else b""
            if len(head) < 4:
                raise ConnectionResetError("the server closed the connection")
            reply = wire.decode_reply(self._read(wire.frame_bytes(head), deadline_s))
            if not isinstance(reply, wire.Welcome):
                why = reply.why if isinstance(reply, wire.Refused) else type(reply).__name__
                raise wire.ProtocolError(f"the server does not take us: {why}")
            if hello.maps_arena and fd is None:
                raise wire.ProtocolError("the server sent no arena")
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise
        return reply, fd

    def _read(self, nbytes: int, deadline_s: float) -> bytes:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            self.sock.settimeout(_left(deadline_s))
            got = self.sock.recv_into(view)
            if got == 0:
                raise ConnectionResetError("the server closed the connection")
            view = view[got:]
        return bytes(data)

    def close(self) -> None:
        self.sock.close()


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no answer in time")
    return left_s


class Client:
    """Calls to the server, from any thread. What is not there is None, never an exception."""

    def __init__(self, dial: Dial, session: str, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Does not connect: see `connect`."""
        self._dial = dial
        self._hello = wire.Hello(wire.PROTOCOL, session)
        self._call_timeout_s = call_timeout_s
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._server_id: str | None = None  # of the server that the notes in `_owed` are for
        self._promotes = False
        self._owed: list[wire.Note] = []
        self._untold: wire.Report | None = None  # what was to be reported while no server was there
        self._pid = os.getpid()
        self._losses = 0  # since the last answer
        self._lost = threading.Event()
        self._closed = False
        self._complained = False
        self._thread: threading.Thread | None = None

    @property
    def server_id(self) -> str | None:
        """The server we are connected to, None while there is none. A restarted server has another id."""
        return self._server_id if self._channel is not None else None

    @property
    def promotes(self) -> bool:
        """Whether a server is there that has slower tiers."""
        return self._promotes and self._channel is not None

    def connect(self) -> bool:
        """Try now, and go on trying in the background. Whether it worked at once."""
        connected = self._try_connect()
        self._thread = threading.Thread(target=self._stay_connected, name="stepwell-connect", daemon=True)
        self._thread.start()
        return connected

    def call(
        self, request: wire.Message, reply_type: type[ReplyT], timeout_s: float | None = None
    ) -> ReplyT | None:
        """The reply, or None when the server did not give one in time.

        None, too, in a child that was forked from the process that connected: the two would take each
        other's replies.
        """
        if os.getpid() != self._pid:
            return None
        with self._lock:
            channel, notes = self._channel, self._owed
            if channel is None:
                return None
            frames = b"".join(wire.encode(message) for message in [*notes, request])
            deadline_s = time.monotonic() + (self._call_timeout_s if timeout_s is None else timeout_s)
            try:
                channel.send(frames, deadline_s)
                reply = channel.receive(deadline_s)
            except (OSError, wire.ProtocolError) as error:
                self._lose(error)
                self._owe_end_of(request)
                return None
            except BaseException as error:  # Ctrl-C: the next call must not take this one's reply for its own
                self._lose(error)
                self._owe_end_of(request)
                raise
            self._owed = []
            self._losses = 0
            if isinstance(reply, reply_type):
                return reply
            why = reply.why if isinstance(reply, wire.Refused) else f"unexpected {type(reply).__name__}"
            self._lose(wire.ProtocolError(why))
            return None

    def note(self, note: wire.Note) -> None:
        """Goes out before the next call, or with `flush`; kept while the server is away."""
        with self._lock:
            if self._channel is None and isinstance(note, wire.Report):
                self._untold = note if self._untold is None else self._untold.plus(note)
            else:
                self._owed.append(note)

    def flush(self) -> None:
        """Send the notes now."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._channel is None or not self._owed:
                return
            try:
                frames = b"".join(wire.encode(note) for note in self._owed)
                self._channel.send(frames, time.monotonic() + self._call_timeout_s)
                self._owed = []
            except OSError as error:
                self._lose(error)
            except BaseException as error:  # Ctrl-C: half a frame may be out
                self._lose(error)
                raise

    def close(self) -> None:
        self.flush()
        self._closed = True
        self._lost.set()
        if self._thread is not None:
            self._thread.join(CONNECT_TIMEOUT_S + 1)
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def _owe_end_of(self, request: wire.Message) -> None:
        # The server may have granted it, or may still do so when it wakes up.
        if isinstance(request, wire.Load):
            self._owed.append(wire.Release(request.lease))
        elif isinstance(request, wire.Reserve):
            self._owed.append(wire.Abort(request.reservation))

    def _lose(self, error: BaseException) -> None:
        assert self._channel is not None
        self._channel.close()
        self._channel = None
        self._losses += 1
        # What ends something may be said twice; a report would be counted twice.
        self._owed = [note for note in self._owed if not isinstance(note, wire.Report | wire.Prefetch)]
        self._lost.set()
        logger.warning("the cache server is lost (%r): going on without it", error)

    def _try_connect(self) -> bool:
        channel: Channel | None = None
        try:
            channel = Channel(self._dial())
            welcome, _ = channel.welcome(self._hello, time.monotonic() + CONNECT_TIMEOUT_S)
        except (OSError, wire.ProtocolError) as error:
            if channel is not None:
                channel.close()
            if not self._complained:
                self._complained = True
                logger.warning("no cache server (%s): going on without it, trying again", error)
            return False
        with self._lock:
            if self._closed:
                channel.close()
                return False
            if welcome.server_id != self._server_id:
                self._owed = []  # a new server knows nothing of what the old one granted
            self._server_id = welcome.server_id
            self._promotes = welcome.promotes
            if self._untold is not None:
                self._owed.append(self._untold)
                self._untold = None
            self._channel = channel
            self._lost.clear()
            self._complained = False
        logger.info("connected to the cache server")
        self.flush()  # what was owed: an engine may be idle for long
        return True

    def _stay_connected(self) -> None:
        if self._channel is None:
            self._lost.set()
        while True:
            self._lost.wait()
            # A server that greets us and then never answers in time would cost every call a time-out.
            time.sleep(min(_RETRY_FIRST_S * 2 ** max(0, self._losses - 1), _RETRY_SLOW_MOST_S))
            pause_s = _RETRY_FIRST_S
            while not self._closed and not self._try_connect():
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _RETRY_MOST_S)
            if self._closed:
                return


@dataclass
class _Mapping:
    """A server's arena as this process sees it."""

    server_id: str
    arena: ArenaMap
    ended_s: float | None = None  # when the server was gone, by the monotonic clock
    steps_left: int = _STEPS_AHEAD  # after that: those that may have been promised something before


class ArenaClient:
    """Keeps the arena of whatever server is there mapped, and this process known to it as a user of it.

    The connection stays open for as long as the mapping may be in use: a server that is alive gives no
    slot of ours away before it ends. The mapping outlives the server, so a copy that was promised works;
    but not for long, for its memory is what the server's successor needs.
    """

    def __init__(
        self,
        dial: Dial,
        session: str,
        rank: int = 0,
        layout: bytes = b"",
        keep_ended_s: float = KEEP_ENDED_S,
    ) -> None:
        """Does not connect: see `connect`."""
        self._keep_ended_s = keep_ended_s
        self._dial = dial
        self._hello = wire.Hello(wire.PROTOCOL, session, maps_arena=True, rank=rank, layout=layout)
        self._mappings: list[_Mapping] = []  # newest first
        self._channel: Channel | None = None
        self._closed = False
        self._in_step = False
        self._step_ended_s = 0.0
        self._wake_r, self._wake_w = os.pipe()
        self._thread: threading.Thread | None = None
        self.on_map: Callable[[ArenaMap], object] = lambda arena: None
        self.on_unmap: Callable[[ArenaMap], object] = lambda arena: None

    def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
        """Try now, for `timeout_s`, and go on trying in the background. Whether it worked at once."""
        connected = self._try_connect(timeout_s)
        self._thread = threading.Thread(target=self._stay_connected, name="stepwell-arena", daemon=True)
        self._thread.start()
        return connected

    def arena_of(self, server_id: str) -> ArenaMap | None:
        """The arena of this server, or None when this process does not map it (any more)."""
        return next((m.arena for m in self._mappings if m.server_id == server_id), None)

    def begin_step(self) -> None:
        """What this step and the next were promised stays mapped, however long this one takes."""
        self._in_step = True

    def loaded(self) -> None:
        """All that this step was promised is copied, or its copies are under way."""
        for mapping in self._mappings:
            if mapping.ended_s is not None:
                mapping.steps_left -= 1

    def end_step(self) -> None:
        """The next may begin at once, or never."""
        self._step_ended_s = time.monotonic()
        self._in_step = False

    def close(self) -> None:
        """Unmap and leave the session. Copies must have ended."""
        self._closed = True
        os.write(self._wake_w, b"x")
        if self._thread is not None:
            self._thread.join(CONNECT_TIMEOUT_S + 1)
        # Copies end before the server may give their slots away.
        self._unmap(self._mappings)
        if self._channel is not None:
            self._channel.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _try_connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
        channel: Channel | None = None
        try:
            channel = Channel(self._dial())
            welcome, fd = channel.welcome(self._hello, time.monotonic() + timeout_s)
            assert fd is not None
            try:
                arena = ArenaMap(fd, welcome.arena_bytes)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:  # ProtocolError is a ValueError
            if channel is not None:
                channel.close()
            logger.debug("no arena: %s", error)
            return False
        arena.populate(write=False)
        try:
            self.on_map(arena)
        except RuntimeError as error:  # torch's, where the device fails: copies take a detour, if they can
            logger.warning("the arena cannot be registered with the device: %s", error)
        mapping = _Mapping(welcome.server_id, arena)
        self._mappings = [mapping, *self._mappings]
        try:
            deadline_s = time.monotonic() + timeout_s
            channel.send(wire.encode(wire.Mapped()) + wire.encode(wire.Ping()), deadline_s)
            channel.receive(deadline_s)  # when we return, the server counts on us
        except (OSError, wire.ProtocolError) as error:
            logger.debug("the server went while its arena was mapped: %s", error)
            channel.close()
            mapping.ended_s = time.monotonic()
            return False
        channel.sock.settimeout(None)
        self._channel = channel
        return True

    def _stay_connected(self) -> None:
        pause_s = _RETRY_FIRST_S
        while not self._closed:
            self._unmap_ended()
            if self._channel is None:
                if self._try_connect():
                    pause_s = _RETRY_FIRST_S
                    continue
                _readable(self._wake_r, timeout_s=pause_s)
                pause_s = min(2 * pause_s, _RETRY_MOST_S)
                continue
            server = self._channel.sock.fileno()
            timeout_s = _RETRY_MOST_S if len(self._mappings) > 1 else None
            if server in _readable(server, self._wake_r, timeout_s=timeout_s):
                # Nothing is ever sent here: it is the end.
                self._channel.close()
                self._channel = None
                self._mappings[0].ended_s = time.monotonic()

    def _unmap_ended(self) -> None:
        long_ago_s = time.monotonic() - self._keep_ended_s
        is_idle = not self._in_step and self._step_ended_s < long_ago_s
        self._unmap(
            [
                m
                for m in self._mappings
                if m.ended_s is not None and m.ended_s < long_ago_s and (is_idle or m.steps_left <= 0)
            ]
        )

    def _unmap(self, ended: Sequence[_Mapping]) -> None:
        self._mappings = [m for m in self._mappings if m not in ended]
        for mapping in ended:
            try:
                self.on_unmap(mapping.arena)
            except RuntimeError as error:
                logger.warning("an arena cannot be taken back from the device: %s", error)
            mapping.arena.close()


def _readable(*fds: int, timeout_s: float | None = None) -> list[int]:
    # Not select(2), which cannot wait for a descriptor above 1023.
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]


class AsyncClient:
    """For tools: one connection, one request at a time, exceptions as they come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, path: Path, session: str) -> "AsyncClient":
        """Raises OSError when no server is there, ProtocolError when it is of another version."""
        client = cls(*await asyncio.open_unix_connection(str(path)))
        await client.call(wire.Hello(wire.PROTOCOL, session), wire.Welcome)
        return client

    async def call(self, request: wire.Message, reply_type: type[ReplyT]) -> ReplyT:
        """Raises OSError or asyncio.IncompleteReadError when the server goes, ProtocolError if it refuses."""
        self._writer.write(wire.encode(request))
        await self._writer.drain()
        head = await self._reader.readexactly(4)
        reply = wire.decode_reply(await self._reader.readexactly(wire.frame_bytes(head)))
        if isinstance(reply, reply_type):
            return reply
        raise wire.ProtocolError(reply.why if isinstance(reply, wire.Refused) else f"unexpected {reply}")

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()
