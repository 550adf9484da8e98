"""A cache server on a thread of this process: what `stepwell.open` gives. The same code, no socket file."""

import asyncio
import socket
import threading
from concurrent.futures import Future

from stepwell.server.host import CacheHost, DiskSetting


class EmbeddedServer:
    """Serves connections made by `dial` until `close`."""

    def __init__(self, memory_bytes: int, eviction: str, disk: DiskSetting | None = None) -> None:
        """Raises ArenaTooLarge or ValueError for a size or policy that cannot be, DiskError for a folder."""
        self._host = CacheHost(memory_bytes, eviction, disk)
        self._loop = asyncio.new_event_loop()
        self._transports: list[asyncio.BaseTransport] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="stepwell-server", daemon=True)
        self._thread.start()
        self._loop.call_soon_threadsafe(self._host.start)

    def dial(self) -> socket.socket:
        """A new connection to this server. Raises OSError after `close`."""
        ours, theirs = socket.socketpair()
        accept = self._accept(theirs)
        try:
            made: Future[None] = asyncio.run_coroutine_threadsafe(accept, self._loop)
        except RuntimeError as error:
            accept.close()
            ours.close()
            theirs.close()
            raise ConnectionRefusedError("the embedded cache is closed") from error
        made.result()
        return ours

    async def _accept(self, sock: socket.socket) -> None:
        transport, _ = await self._loop.connect_accepted_socket(self._host.connection, sock)
        self._transports.append(transport)

    def close(self) -> None:
        """Ends every connection and frees the arena."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut(self) -> None:
        for transport in self._transports:
            transport.close()
        await asyncio.sleep(0)  # let connection_lost run
        await self._host.close()
