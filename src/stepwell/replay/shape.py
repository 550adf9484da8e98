"""What a model costs: bytes of attention state and operations, by context."""

from stepwell.replay.facts.tables import Model


def kv_bytes_per_token(model: Model) -> float:
    """Of layers that keep every token; a window's or a state's bytes do not grow with the context."""
    full_layers = model.layers - model.window_layers - model.state_layers
    return full_layers * _layer_bytes(model)


def kv_bytes(model: Model, tokens: int) -> float:
    """To go on after so many tokens."""
    window = model.window_layers * _layer_bytes(model) * min(tokens, model.window_tokens)
    state = model.state_layers * model.state_bytes if tokens else 0
    return kv_bytes_per_token(model) * tokens + window + state


def prefill_flop(model: Model, new_tokens: float, context_tokens: float) -> float:
    """To compute `new_tokens` behind `context_tokens`: two a weight, and attention to all before.

    A token's attention costs 4 operations for each token it looks at and each of `attention_dim`.
    """
    weights = 2e9 * model.active_billion * new_tokens
    full_layers = model.layers - model.window_layers - model.state_layers
    seen = context_tokens + new_tokens / 2  # on average
    attention = 4 * model.attention_dim * new_tokens * full_layers * seen
    window = 4 * model.attention_dim * new_tokens * model.window_layers * min(seen, model.window_tokens)
    return weights + attention + window


def break_even_bytes_per_s(model: Model, context_tokens: int, flop_per_s: float) -> float:
    """Loading a whole prompt of so many tokens faster than this beats computing it at `flop_per_s`."""
    return kv_bytes(model, context_tokens) / (prefill_flop(model, context_tokens, 0) / flop_per_s)


def weight_bytes(model: Model) -> float:
    """In GPU memory."""
    return 1e9 * model.parameters_billion * model.weight_bytes


def _layer_bytes(model: Model) -> float:
    """Of one token in one layer."""
    values = model.latent_dim if model.attention == "mla" else 2 * model.kv_heads * model.kv_head_dim
    return values * model.kv_bytes
