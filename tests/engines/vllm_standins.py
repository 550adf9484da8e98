"""Stand-ins that hold what is read of vLLM's configuration."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclass
class FullAttentionSpec:
    block_size: int = 16
    page_size_bytes: int = 512
    dtype: str = "bfloat16"
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    pass


@dataclass
class UniformTypeKVCacheSpecs:
    """Layers of unlike page sizes, in one group."""

    kv_cache_specs: dict[str, FullAttentionSpec]
    block_size: int = 16

    @property
    def page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())


class Config:
    """`change(config)` of a fresh one gives another engine."""

    def __init__(self, model: Path) -> None:
        self.hf: dict[str, Any] = {
            "hidden_size": 576,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "_name_or_path": str(model),
            "transformers_version": "5.0",
        }
        self.model_config = SimpleNamespace(
            model=str(model),
            model_weights="",
            revision=None,
            dtype="torch.bfloat16",
            quantization=None,
            max_model_len=2048,
            seed=0,
            hf_config=SimpleNamespace(to_dict=lambda: dict(self.hf)),
        )
        self.cache_config = SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", calculate_kv_scales=False
        )
        self.parallel_config = SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            rank=0,
        )
        self.load_config = SimpleNamespace(load_format="auto")


def groups(spec: Any, layers: int = 3, count: int = 1) -> SimpleNamespace:
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{n}" for n in range(layers)])
    return SimpleNamespace(kv_cache_groups=[group] * count, num_blocks=8)
