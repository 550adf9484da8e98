"""From a running engine to the space its chunks live in, on whatever server is there now."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from stepwell import wire
from stepwell.client import Client
from stepwell.engines.geometry import Geometry
from stepwell.layout import EngineSpace, space_id
from stepwell.types import Reason, SpaceId, SpaceSpec

logger = logging.getLogger(__name__)

_ASK_WORKERS_EVERY_S = 0.1


class Adapter(Protocol):
    """The part of an engine's adapter request that names its files."""

    @property
    def lora_path(self) -> str: ...


class Spaces:
    """One space for the bare model and one for each adapter; opened anew when the server restarts."""

    def __init__(
        self,
        client: Client,
        geometry: Geometry,
        identity: Callable[[], EngineSpace | Reason],
        adapter_digest: Callable[[Adapter], bytes | Reason],
    ) -> None:
        """`identity` says what the engine computes, less its workers' layouts, once it is known."""
        self._client = client
        self._geometry = geometry
        self._identity = identity
        self._adapter_digest = adapter_digest
        self._server_id: str | None = None
        self._layouts: tuple[bytes, ...] = ()
        self._opened: dict[bytes | None, SpaceId] = {}
        self._generation = b""
        self._ask_workers_at_s = 0.0

    def find(self, adapter: Adapter | None) -> SpaceId | Reason:
        """The space of requests with this adapter, or why there is none now."""
        server_id = self._client.server_id
        if server_id is None:
            return Reason.NO_SERVER
        identity = self._identity()
        if isinstance(identity, Reason):
            return identity
        digest = None if adapter is None else self._adapter_digest(adapter)
        if isinstance(digest, Reason):
            return digest
        if server_id != self._server_id:
            # Asked for each request of each step; a worker may never come.
            if time.monotonic() < self._ask_workers_at_s:
                return Reason.NO_WORKER
            layouts = self._worker_layouts()
            self._ask_workers_at_s = time.monotonic() + _ASK_WORKERS_EVERY_S
            if isinstance(layouts, Reason):
                return layouts
            self._server_id, self._layouts, self._opened = server_id, layouts, {}
        space = self._opened.get(digest)
        return self._open(identity, digest) if space is None else space

    def renew(self) -> Sequence[SpaceId]:
        """Leave every space used so far for a new one of this engine alone, and say which they were.

        An engine's cache is reset when its weights were replaced in place. What it computes then belongs
        to no file's space, and what it had stored may be past clearing, when the server is away.
        """
        left = list(self._opened.values())
        self._opened = {}
        self._generation = os.urandom(16)
        return left

    def _worker_layouts(self) -> tuple[bytes, ...] | Reason:
        reply = self._client.call(wire.Workers(), wire.Attached)
        if reply is None:
            return Reason.NO_SERVER
        if set(reply.layouts) != set(range(self._geometry.ranks)):
            return Reason.NO_WORKER
        return tuple(reply.layouts[rank] for rank in range(self._geometry.ranks))

    def _open(self, identity: EngineSpace, adapter: bytes | None) -> SpaceId | Reason:
        full = msgspec.structs.replace(
            identity, adapter=adapter, worker_layouts=self._layouts, generation=self._generation
        )
        spec = SpaceSpec(full.fingerprint(), self._geometry.chunk_tokens, self._geometry.chunk_bytes)
        reply = self._client.call(wire.OpenSpace(spec), wire.SpaceOpened)
        if reply is None:
            return Reason.NO_SERVER
        assert reply.space == space_id(spec)
        self._opened[adapter] = reply.space
        logger.info(
            "space %s: chunks of %d tokens, %.2f MiB",
            reply.space.hex(),
            spec.chunk_tokens,
            spec.chunk_bytes / 2**20,
        )
        return reply.space
