"""Facts have their sources, agree with published bounds, and give way to a user's own."""

import json
from pathlib import Path

import pytest

from stepwell.replay.facts.config import read_config
from stepwell.replay.facts.tables import Fact, FactError, Gpu, Model, Price, TierFact, pick, table
from stepwell.replay.shape import break_even_bytes_per_s, kv_bytes, kv_bytes_per_token, prefill_flop


@pytest.mark.parametrize("kind", [Gpu, TierFact, Model, Price])
def test_each_has_a_source_and_estimates_are_fields(kind: type[Fact]) -> None:
    facts = table(kind)
    assert len(facts) >= 5
    for fact in facts.values():
        assert len(fact.source) > 5
        assert fact.date[:2] == "20"
        assert set(fact.estimates) <= set(fact.__struct_fields__)


# GB/s a GPU at half of its peak; the same as others computed from the published shapes.
@pytest.mark.parametrize(
    ("model", "kib", "gpu", "at_8k", "at_128k"),
    [
        ("Llama-3.1-8B", 128, "A100-80G", 1.13, 0.41),
        ("Llama-3.1-8B", 128, "H100", 3.6, 1.3),
        ("Llama-3.1-70B", 320, "H100", 1.07, 0.52),
        ("Llama-3.1-70B", 320, "B200", 2.5, 1.2),
        ("Qwen3-32B", 256, "H100", 1.75, 0.64),
        ("Qwen3-30B-A3B", 96, "H100", 5.0, 0.84),
        ("DeepSeek-V3", 68.625, "H100", 0.37, 0.09),
    ],
)
def test_break_even_bandwidth(model: str, kib: float, gpu: str, at_8k: float, at_128k: float) -> None:
    shape = pick(table(Model), model, "model")
    flop_per_s = 0.5e12 * pick(table(Gpu), gpu, "GPU").bf16_tflop_per_s
    assert kv_bytes_per_token(shape) == kib * 1024
    assert break_even_bytes_per_s(shape, 8_192, flop_per_s) / 1e9 == pytest.approx(at_8k, rel=0.03)
    assert break_even_bytes_per_s(shape, 131_072, flop_per_s) / 1e9 == pytest.approx(at_128k, rel=0.04)


def test_windows_and_states_do_not_grow_with_the_context() -> None:
    models = table(Model)
    gemma, jamba = models["Gemma-3-27B"], models["Jamba-1.5-Mini"]
    layer = 2 * 16 * 128 * 2
    assert kv_bytes(gemma, 10_000) == 10 * layer * 10_000 + 52 * layer * 1_024
    assert kv_bytes(gemma, 100) == 62 * layer * 100
    assert kv_bytes(jamba, 0) == 0
    assert kv_bytes(jamba, 20_000) - kv_bytes(jamba, 10_000) == 4 * 2 * 8 * 128 * 2 * 10_000
    assert prefill_flop(gemma, 1, 10_000) < prefill_flop(gemma, 1, 20_000)


def test_in_parts_a_prompt_costs_what_it_costs_whole() -> None:
    model = table(Model)["Llama-3.1-8B"]
    parts = sum(prefill_flop(model, 512, start) for start in range(0, 8_192, 512))
    assert parts == pytest.approx(prefill_flop(model, 8_192, 0))


def test_overrides(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "[gpus.H100]\nusd_per_hour = 9.0\n[gpus.Mine]\nbf16_tflop_per_s = 100\nmemory_gib = 16\n"
        "memory_gb_per_s = 500\nhost_gb_per_s = 10\nusd_per_hour = 0.5\n"
    )
    gpus = table(Gpu, file)
    assert (gpus["H100"].usd_per_hour, gpus["H100"].bf16_tflop_per_s) == (9.0, 989)
    assert (gpus["Mine"].memory_gib, gpus["Mine"].source) == (16, "the user's")
    assert table(Gpu)["H100"].usd_per_hour != 9.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gpus.H100]\nusd_per_our = 9.0\n", "unknown field `usd_per_our`"),
        ("[gpus.H100]\nusd_per_hour = -1\n", "`float` > 0"),
        ("[gpus.New]\nusd_per_hour = 1\n", "missing required field"),
        ("[gpu.H100]\nusd_per_hour = 1\n", "no table 'gpu' of facts"),
        ("gpus = 3\n", "no table 'gpus'"),
        ("[gpus", "cannot be read"),
    ],
)
def test_overrides_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(FactError, match=f"mine.toml: .*{message}"):
        table(Gpu, file)


def test_an_unknown_name() -> None:
    with pytest.raises(FactError, match="no GPU 'H10' is known; did you mean h100"):
        pick(table(Gpu), "H10", "GPU")
    assert pick(table(Gpu), "h100", "GPU") == table(Gpu)["H100"]


LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "model_type": "llama",
}
DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
}


@pytest.mark.parametrize(("config", "known"), [(LLAMA, "Llama-3.1-8B"), (DEEPSEEK, "DeepSeek-V3")])
def test_a_config_gives_the_shape_we_know(tmp_path: Path, config: dict[str, object], known: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    read, fact = read_config(file), table(Model)[known]
    assert kv_bytes_per_token(read) == kv_bytes_per_token(fact)
    assert read.attention_dim == fact.attention_dim
    assert read.parameters_billion == pytest.approx(fact.parameters_billion, rel=0.03)
    assert read.active_billion == pytest.approx(fact.active_billion, rel=0.06)


def test_a_config_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"vocab_size": 5}')
    with pytest.raises(FactError, match=r"config.json: not a config.json of a known kind"):
        read_config(file)
    with pytest.raises(FactError, match="cannot be read: No such file"):
        read_config(tmp_path / "none.json")
