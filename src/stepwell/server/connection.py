"""One client's connection: frames in, the core asked, frames out."""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Protocol

from stepwell import wire
from stepwell.layout import space_id
from stepwell.server.core import Core, Session, UnknownSpace
from stepwell.types import CacheStats, SpaceId

logger = logging.getLogger(__name__)
_PEERCRED = struct.Struct("3i")  # pid, uid, gid: struct ucred of <sys/socket.h>


class Host(Protocol):
    """What a connection needs of the server around it."""

    core: Core
    server_id: str
    version: str

    def join(self, name: str, connection: "Connection") -> Session: ...
    def leave(self, name: str, connection: "Connection") -> None: ...
    def attached(self, name: str) -> dict[int, bytes]: ...
    async def clear(self, space: SpaceId | None) -> int: ...
    def forget(self, space: SpaceId) -> None: ...
    @property
    def promotes(self) -> bool: ...
    @property
    def unwritten_chunks(self) -> int: ...
    def stats(self) -> CacheStats: ...


class Connection(asyncio.Protocol):
    """Requests are answered in order, each at once but a `Clear`: nothing in the core waits."""

    def __init__(self, host: Host) -> None:
        self.rank: int | None = None  # set when a worker (or program) has mapped the arena here
        self.layout = b""
        self._host = host
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._hello: wire.Hello | None = None
        self._session_name: str | None = None
        self._session: Session | None = None
        self._clearing: asyncio.Task[None] | None = None  # what was asked after it waits

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not _peer_is_ours(transport):
            logger.warning("refused a connection from another user")
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._handle_frames()

    def _handle_frames(self) -> None:
        try:
            while self._clearing is None and (frame := self._next_frame()) is not None:
                self._handle(wire.decode_request(frame))
        except (wire.ProtocolError, UnknownSpace) as error:
            self._refuse(str(error) if isinstance(error, wire.ProtocolError) else f"unknown space {error}")

    def _next_frame(self) -> bytes | None:
        if len(self._buffer) < 4:
            return None
        end = 4 + wire.frame_bytes(self._buffer)
        if len(self._buffer) < end:
            return None
        frame = bytes(memoryview(self._buffer)[4:end])
        del self._buffer[:end]
        return frame

    def _handle(self, request: wire.Request) -> None:
        if isinstance(request, wire.Hello):
            self._welcome(request)
            return
        if self._session is None or self._session_name is None:
            raise wire.ProtocolError("the first message must be hello")
        if isinstance(request, wire.Note):
            self._take(self._session, request)
        elif isinstance(request, wire.Clear):
            self._clearing = asyncio.ensure_future(self._clear(request.space))
        else:
            self._send(self._answer(self._session, self._session_name, request))

    def _take(self, session: Session, note: wire.Note) -> None:
        core = self._host.core
        match note:
            case wire.Mapped():
                # Not at hello: mapping takes a while, and what is promised meanwhile could not be copied.
                if self._hello is not None and self._hello.maps_arena:
                    self.rank, self.layout = self._hello.rank, self._hello.layout
            case wire.Commit():
                core.commit(session, note.reservation)
            case wire.Abort():
                core.abort(session, note.reservation)
            case wire.Release():
                core.release(session, note.lease)
            case wire.Prefetch():
                core.prefetch(note.space, note.keys)
            case wire.Checked():
                if core.checked(note.space, note.key, note.difference, note.matches):
                    self._host.forget(note.space)
            case wire.Forget():
                self._host.forget(note.space)
            case wire.Report():
                core.report(note.requests, note.missed, note.dropped)

    def _answer(self, session: Session, name: str, request: wire.Request) -> wire.Message:
        core = self._host.core
        match request:
            case wire.Load():
                chunks, offsets, coming = core.load(
                    session,
                    request.lease,
                    request.space,
                    request.keys,
                    first=request.first,
                    again=request.again,
                )
                ready_in_s = core.below.ready_in_s(request.space) if coming > chunks else 0.0
                return wire.Loaded(chunks, wire.pack_places(offsets), coming, ready_in_s)
            case wire.More():
                chunks, offsets, coming = core.more(session, request.lease)
                return wire.Loaded(chunks, wire.pack_places(offsets), coming)
            case wire.Reserve():
                return wire.Reserved(core.reserve(session, request.reservation, request.runs))
            case wire.Lookup():
                return wire.Found(core.lookup(request.space, request.keys))
            case wire.Workers():
                return wire.Attached(self._host.attached(name))
            case wire.OpenSpace():
                space = space_id(request.spec)
                core.open_space(space, request.spec)
                return wire.SpaceOpened(space)
            case wire.GetStats():
                return wire.Stats(self._host.stats())
            case wire.Ping():
                return wire.Pong(self._host.unwritten_chunks)
            case _:
                raise wire.ProtocolError(f"{type(request).__name__} is no request")

    async def _clear(self, space: SpaceId | None) -> None:
        chunks = await self._host.clear(space)
        self._clearing = None
        assert self._transport is not None
        if not self._transport.is_closing():
            self._send(wire.Cleared(chunks))
            self._handle_frames()

    def _welcome(self, hello: wire.Hello) -> None:
        if hello.protocol != wire.PROTOCOL:
            raise wire.ProtocolError(
                f"client speaks protocol {hello.protocol}, this server {wire.PROTOCOL}: "
                "install the same Stepwell version for both"
            )
        if self._session is not None:
            raise wire.ProtocolError("a second hello")
        self._hello = hello
        self._session_name = hello.session
        self._session = self._host.join(hello.session, self)
        memory = self._host.core.memory
        host = self._host
        frame = wire.encode(
            wire.Welcome(wire.PROTOCOL, host.version, host.server_id, memory.limit_bytes, host.promotes)
        )
        assert self._transport is not None
        if hello.maps_arena:
            # The transport cannot pass descriptors; nothing is in its buffer yet, so order is kept.
            fd = self._transport.get_extra_info("socket").fileno()
            try:
                with socket.socket(fileno=os.dup(fd)) as raw:
                    socket.send_fds(raw, [frame], [memory.fd])
            except OSError as error:  # it did not wait for us, or we have no descriptor left
                logger.warning("a client's connection ends: cannot pass the arena: %s", error)
                self._transport.abort()
        else:
            self._transport.write(frame)

    def pause_writing(self) -> None:
        """A client that asks and does not read: its answers must not pile up here."""
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        assert self._transport is not None
        self._transport.resume_reading()

    def _send(self, message: wire.Message) -> None:
        assert self._transport is not None
        self._transport.write(wire.encode(message))

    def _refuse(self, why: str) -> None:
        logger.warning("a client's connection ends: %s", why)
        self._send(wire.Refused(why))
        assert self._transport is not None
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._session_name is not None:
            self._host.leave(self._session_name, self)
            self._session = None


def _peer_is_ours(transport: asyncio.Transport) -> bool:
    sock = transport.get_extra_info("socket")
    _, uid, _ = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
    return uid in (os.getuid(), 0)


ConnectionFactory = Callable[[], Connection]
