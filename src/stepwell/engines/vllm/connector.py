"""vLLM's connector interface, translated: everything else is in `engines/scheduler.py` and `worker.py`.

vLLM makes one instance in its scheduler and one in each worker, and gains methods with each release; none
that is missing or new may matter here. Whatever cannot be served runs uncached, and says so once.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger

from stepwell.client import ArenaClient, Client, dial_unix
from stepwell.config import default_socket
from stepwell.engines.device import DeviceCopier, register, unregister
from stepwell.engines.geometry import Geometry
from stepwell.engines.jobs import Done, StepJobs
from stepwell.engines.pages import HostCopier
from stepwell.engines.scheduler import SchedulerSide
from stepwell.engines.spaces import Spaces
from stepwell.engines.vllm.identity import Identity, Unsupported, geometry_of
from stepwell.engines.vllm.pages import (
    UnsupportedPages,
    block_first,
    distinct_layers,
    host_pages,
    layout_digest,
)
from stepwell.engines.worker import WorkerSide

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
except ImportError:  # before hybrid cache groups could be kept with a connector

    class SupportsHMA:  # type: ignore[no-redef]
        pass


try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
except ImportError:

    class KVConnectorWorkerMetadata:  # type: ignore[no-redef]
        pass


try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    _HOST = CacheHitSource.HOST
except ImportError:
    _HOST = None

logger = init_logger(__name__)
logging.getLogger("stepwell").parent = logging.getLogger("vllm")  # its handlers and level show ours too


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers, with each step."""

    jobs: StepJobs


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler, after each step."""

    done: Done

    def aggregate(self, other: "WorkerMetadata") -> "WorkerMetadata":
        return WorkerMetadata(self.done.add(other.done))


class StepwellConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Named by `--kv-transfer-config`.

    `kv_connector_extra_config` may hold `socket` (the cache server's; else STEPWELL_SOCKET, else the
    user's default), `chunk_blocks` (blocks a chunk; default: the fewest that reach 1 MiB) and `salt` (keeps
    this engine's chunks apart from those of engines with another salt).
    """

    if _HOST is not None:
        _cache_hit_source = _HOST

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._clients: list[Client | ArenaClient] = []
        self._num_blocks = kv_cache_config.num_blocks
        self._loads_begun = False
        transfer = vllm_config.kv_transfer_config
        extra = dict(transfer.kv_connector_extra_config or {})
        unknown = set(extra) - {"socket", "chunk_blocks", "salt"}
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config has unknown names {sorted(unknown)}: "
                "Stepwell knows socket, chunk_blocks and salt"
            )
        chunk_blocks = extra.get("chunk_blocks")
        if chunk_blocks is not None and (type(chunk_blocks) is not int or chunk_blocks < 1):
            raise ValueError(
                f"kv_connector_extra_config: chunk_blocks is a whole number from 1, not {chunk_blocks!r}"
            )
        socket = extra.get("socket") or os.environ.get("STEPWELL_SOCKET") or default_socket(os.environ)
        self._dial = dial_unix(Path(socket).expanduser())
        # The scheduler and the workers of one engine are one session of the server. An operator may give
        # two engines one id; the instance's is vLLM's own and random.
        self._session = f"vllm-{transfer.engine_id}-{getattr(vllm_config, 'instance_id', '')}"
        self._geometry: Geometry | None = None
        try:
            self._geometry = geometry_of(vllm_config, kv_cache_config, chunk_blocks)
        except Unsupported as error:
            if role == KVConnectorRole.SCHEDULER:
                logger.warning("Stepwell cannot serve this engine yet: %s. It runs uncached.", error)
        if role == KVConnectorRole.SCHEDULER and self._geometry is not None:
            self._scheduler = self._scheduler_side(self._geometry, extra.get("salt"))

    @property
    def requires_kv_delivery(self) -> bool:
        """A chunk that is not stored is a miss later, nothing that a request waits for."""
        return False

    # -- scheduler ---------------------------------------------------------------------------------------

    def _scheduler_side(self, geometry: Geometry, salt: str | None) -> SchedulerSide:
        client = Client(self._dial, self._session)
        client.connect()
        self._clients.append(client)
        identity = Identity(self._vllm_config, self._kv_cache_config, geometry, salt)
        spaces = Spaces(client, geometry, identity, identity.adapter_digest)
        return SchedulerSide(client, spaces, geometry)

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if self._scheduler is None:
            return StepMetadata(StepJobs())
        new_blocks: dict[str, tuple[bool, Sequence[int]]] = {}
        computed_tokens: dict[str, int] = {}
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            new_blocks[new.req_id] = (True, new.block_ids[0])
            computed_tokens[new.req_id] = new.num_computed_tokens + scheduled[new.req_id]
        cached = scheduler_output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i]
            new_blocks[request_id] = (
                request_id in cached.resumed_req_ids,
                [] if blocks is None else blocks[0],
            )
            computed_tokens[request_id] = cached.num_computed_tokens[i] + scheduled[request_id]
        return StepMetadata(self._scheduler.step(new_blocks, computed_tokens, sum(scheduled.values())))

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is None:
            return
        self._scheduler.step_ended()
        metadata = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(metadata, WorkerMetadata):
            self._scheduler.copied(metadata.done)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """On GPUs copies end after their step; an idle engine steps on until they are reported."""
        return self._scheduler is not None and self._scheduler.copying

    def reset_cache(self) -> bool | None:
        if self._scheduler is None:
            return None
        self._scheduler.reset()
        return True

    # -- worker ------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._geometry is None:
            return
        rank = self._vllm_config.parallel_config.rank % self._geometry.ranks
        try:
            layers = distinct_layers(kv_caches)
            copier = self._copier(list(layers.values()))
        except UnsupportedPages as error:
            logger.warning("Stepwell cannot copy this engine's KV pages: %s. It runs uncached.", error)
            return
        if copier.block_bytes != self._geometry.block_bytes:
            logger.warning(
                "Stepwell finds blocks of %d bytes where the engine announced %d. It runs uncached.",
                copier.block_bytes,
                self._geometry.block_bytes,
            )
            return
        arenas = ArenaClient(self._dial, self._session, rank, layout_digest(layers, self._num_blocks, rank))
        if isinstance(copier, DeviceCopier):
            arenas.on_map, arenas.on_unmap = register, unregister
        arenas.connect()
        self._clients.append(arenas)
        self._worker = WorkerSide(arenas, copier, rank, self._geometry.stripe_bytes)

    def _copier(self, layers: Sequence[torch.Tensor]) -> HostCopier | DeviceCopier:
        if layers[0].device.type == "cpu":
            return HostCopier(host_pages(layers, self._num_blocks))
        return DeviceCopier([block_first(layer, self._num_blocks) for layer in layers])

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # Before metadata is bound, some versions zero or copy blocks that have changed hands.
        if self._worker is not None:
            self._worker.begin_step()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._loads_begun = False
        if self._worker is not None:
            self._worker.begin_step()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        jobs = self._step_jobs()
        if self._worker is not None and jobs is not None and not self._loads_begun:
            self._loads_begun = True  # some versions call again after the forward pass
            self._worker.load(jobs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are loaded before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are stored after the forward pass."""

    def wait_for_save(self) -> None:
        jobs = self._step_jobs()
        if self._worker is not None and jobs is not None:
            self._worker.store(jobs)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        done = None if self._worker is None else self._worker.take_done()
        return WorkerMetadata(done) if done else None

    def _step_jobs(self) -> StepJobs | None:
        # Called with no metadata bound in warm-up runs.
        metadata = self._connector_metadata
        return metadata.jobs if isinstance(metadata, StepMetadata) else None

    def shutdown(self) -> None:
        for client in self._clients:
            client.close()
        self._clients = []
