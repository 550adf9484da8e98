"""What is simulated: engines, their GPUs and the tiers below them."""

import msgspec

from stepwell.replay.facts.tables import Gpu, Model
from stepwell.replay.shape import kv_bytes, kv_bytes_per_token, weight_bytes


class TierSpec(msgspec.Struct, frozen=True):
    """One tier, shared by all engines."""

    name: str
    size_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float
    usd_per_gib_month: float = 0.0


class EngineSpec(msgspec.Struct, frozen=True):
    """One replica of the model. What no datasheet tells are shares that real engines reach."""

    model: Model
    gpu: Gpu
    gpus: int  # one replica is split over so many
    block_tokens: int
    names: tuple[str, str] = ("a model", "a GPU")  # as asked for
    peak_share: float = 0.5  # of the peak operations, in prefill
    bandwidth_share: float = 0.7  # of the memory's bandwidth, in decode
    step_overhead_s: float = 0.003  # scheduling, launches, collectives
    batch_tokens: int = 8_192  # most in one step, chunks of prompts and decodes together
    batch_requests: int = 256  # most that run at once
    memory_share: float = 0.9  # of GPU memory, for weights and KV

    @property
    def flop_per_s(self) -> float:
        return self.peak_share * 1e12 * self.gpu.bf16_tflop_per_s * self.gpus

    @property
    def memory_bytes_per_s(self) -> float:
        return self.bandwidth_share * 1e9 * self.gpu.memory_gb_per_s * self.gpus

    @property
    def host_bytes_per_s(self) -> float:
        """To and from host memory."""
        return 1e9 * self.gpu.host_gb_per_s * self.gpus

    @property
    def kv_memory_bytes(self) -> float:
        """What weights leave of GPU memory; 0 or less where the model does not fit."""
        return self.memory_share * self.gpu.memory_gib * 2**30 * self.gpus - weight_bytes(self.model)

    @property
    def block_bytes(self) -> float:
        """Of one block in every tier. A window's or a state's bytes count as if spread over a block."""
        per_token = kv_bytes_per_token(self.model)
        return per_token * self.block_tokens or kv_bytes(self.model, self.block_tokens)

    @property
    def gpu_blocks(self) -> int:
        """That its GPU memory holds."""
        return max(0, int(self.kv_memory_bytes / self.block_bytes))


class SimSpec(msgspec.Struct, frozen=True):
    """Everything but the trace."""

    engine: EngineSpec
    engines: int
    tiers: tuple[TierSpec, ...] = ()  # memory first, then slower ones, fastest first; none: GPU cache only
    eviction: str = "lru"  # of memory
