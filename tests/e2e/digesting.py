"""The connector, with a witness: digests of the KV pages at every store and after every load."""

import hashlib
import json
import os
from typing import Any

from stepwell.engines.jobs import CopyJob, StepJobs
from stepwell.engines.vllm import StepwellConnector


class DigestingConnector(StepwellConnector):  # type: ignore[misc]
    """Writes one JSON line a block: what it did, the arena offset, the digest of all layers' pages."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._pages = self._copier(list(kv_caches.values()))._layers

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        fresh = not self._loads_begun
        super().start_load_kv(forward_context, **kwargs)
        jobs = self._step_jobs()
        if jobs is not None and fresh:
            self._witness("load", jobs.loads)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        self._witness("store", (self._step_jobs() or StepJobs()).stores)

    def _witness(self, what: str, jobs: list[CopyJob]) -> None:
        with open(os.environ["STEPWELL_TEST_WITNESS"], "a") as file:
            for job in jobs:
                for offset, block in zip(job.offsets, job.blocks, strict=True):
                    digest = hashlib.sha256()
                    for layer in self._pages:
                        digest.update(layer[block].tobytes())
                    line = {"what": what, "offset": offset, "digest": digest.hexdigest()}
                    file.write(json.dumps(line) + "\n")
