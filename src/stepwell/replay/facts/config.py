"""A model's shape from its own config.json, as transformers writes it."""

from pathlib import Path

import msgspec

from stepwell.replay.facts.tables import FactError, Model


class _Config(msgspec.Struct):
    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0
    sliding_window: int | None = None
    use_sliding_window: bool = True
    layer_types: list[str] = []
    num_local_experts: int | None = None
    num_experts: int | None = None
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    first_k_dense_replace: int = 0
    tie_word_embeddings: bool = False


def read_config(path: Path) -> Model:
    """Parameters are counted from the shape: right to a few percent. Raises FactError."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except OSError as error:
        raise FactError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise FactError(f"{path}: not a config.json of a known kind of model: {error}") from error
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    head_dim = config.head_dim or config.hidden_size // heads
    mla = config.kv_lora_rank is not None
    total, active = _parameters(config, heads, kv_heads, head_dim)
    windows = config.layer_types.count("sliding_attention")
    if not config.layer_types and config.sliding_window and config.use_sliding_window:
        windows = config.num_hidden_layers
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return Model(
        layers=config.num_hidden_layers,
        attention="mla" if mla else "gqa",
        attention_dim=heads * (key_dim + config.v_head_dim) // 2 if mla else heads * head_dim,
        parameters_billion=total / 1e9,
        active_billion=active / 1e9,
        kv_heads=0 if mla else kv_heads,
        kv_head_dim=0 if mla else head_dim,
        latent_dim=(config.kv_lora_rank or 0) + config.qk_rope_head_dim if mla else 0,
        window_layers=windows,
        window_tokens=(config.sliding_window or 0) if windows else 0,
        source=str(path),
        date="unknown",
        estimates=("parameters_billion", "active_billion"),
    )


def _parameters(config: _Config, heads: int, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """All, and those used for one token."""
    hidden = config.hidden_size
    if config.kv_lora_rank is not None:
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        query = config.q_lora_rank
        attention = (
            (hidden * query + query * heads * key_dim if query else hidden * heads * key_dim)
            + hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
            + config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
            + heads * config.v_head_dim * hidden
        )
    else:
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    experts = config.num_local_experts or config.num_experts or config.n_routed_experts or 0
    expert = 3 * hidden * (config.moe_intermediate_size or config.intermediate_size)
    dense = 3 * hidden * config.intermediate_size
    shared = expert * (config.n_shared_experts or 0)
    dense_layers = config.first_k_dense_replace if experts else config.num_hidden_layers
    expert_layers = config.num_hidden_layers - dense_layers
    common = (
        config.num_hidden_layers * attention
        + dense_layers * dense
        + expert_layers * shared
        + config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    )
    total = common + expert_layers * experts * expert
    return total, common + expert_layers * config.num_experts_per_tok * expert
