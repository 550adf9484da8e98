"""What a vLLM engine says of itself, from stand-ins that hold what is read of its configuration."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_standins import Config, FullAttentionSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs, groups

from stepwell.engines.geometry import Geometry
from stepwell.types import Reason
from support.waiting import wait_until

pytest.importorskip("torch")
pytest.importorskip("vllm")
from vllm.v1.core import kv_cache_utils

from stepwell.engines.vllm import identity
from stepwell.engines.vllm.identity import Identity, Unsupported, geometry_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder of our own, vLLM's seed as it is once an engine is up, files older than the engine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"seed", raising=False)
    monkeypatch.setattr(identity, "_process_start_s", lambda: 2.0**40)


def found(config: Config, salt: str | None = None, spec: Any = None) -> Any:
    kv = groups(spec or FullAttentionSpec())
    one = Identity(config, kv, geometry_of(config, kv, None), salt)
    wait_until(lambda: one() != Reason.NO_WORKER)
    return one()


class TestGeometry:
    def test_of_a_plain_model(self, model: Path) -> None:
        config = Config(model)
        config.parallel_config.tensor_parallel_size = 2
        assert geometry_of(config, groups(FullAttentionSpec()), 4) == Geometry(16, 3 * 512, 4, 2)
        assert geometry_of(config, groups(FullAttentionSpec()), None).chunk_blocks == 683  # reach 1 MiB

    def test_of_unlike_layers(self, model: Path) -> None:
        spec = UniformTypeKVCacheSpecs(
            {"a": FullAttentionSpec(), "b": FullAttentionSpec(page_size_bytes=128)}
        )
        assert geometry_of(Config(model), groups(spec), 1).block_bytes == 640

    @pytest.mark.parametrize(
        ("kv", "why"),
        [
            (groups(FullAttentionSpec(), count=2), "2 cache groups"),
            (groups(FullAttentionSpec(), count=0), "0 cache groups"),
            (groups(SlidingWindowSpec()), "SlidingWindowSpec"),
            (groups(FullAttentionSpec(sliding_window=512)), "FullAttentionSpec"),
            (groups(FullAttentionSpec(attention_chunk_size=512)), "FullAttentionSpec"),
            (groups(FullAttentionSpec(non_causal=True)), "FullAttentionSpec"),
            (
                groups(UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "b": SlidingWindowSpec()})),
                "Uniform",
            ),
            (
                groups(UniformTypeKVCacheSpecs({"a": FullAttentionSpec(sliding_window=4)})),
                "UniformTypeKVCacheSpecs",
            ),
        ],
    )
    def test_other_caches_are_refused(self, model: Path, kv: Any, why: str) -> None:
        with pytest.raises(Unsupported, match=why):
            geometry_of(Config(model), kv, None)

    @pytest.mark.parametrize(
        "name", ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"]
    )
    def test_other_splits_are_refused(self, model: Path, name: str) -> None:
        config = Config(model)
        setattr(config.parallel_config, name, 2)
        with pytest.raises(Unsupported, match=f"{name} is 2"):
            geometry_of(config, groups(FullAttentionSpec()), None)
        delattr(config.parallel_config, name)  # an older version
        geometry_of(config, groups(FullAttentionSpec()), None)

    def test_scales_made_from_the_first_prompt_are_refused(self, model: Path) -> None:
        config = Config(model)
        config.cache_config.calculate_kv_scales = True
        with pytest.raises(Unsupported, match="calculate_kv_scales"):
            geometry_of(config, groups(FullAttentionSpec()), None)

    def test_blocks_that_are_not_hashed_whole_are_refused(self, model: Path) -> None:
        kv = groups(FullAttentionSpec())
        kv.hash_block_size = 8
        with pytest.raises(Unsupported, match="hashed by 8"):
            geometry_of(Config(model), kv, None)


@dataclass(frozen=True)
class Change:
    """One thing that makes another space."""

    name: str
    make: Callable[[Config], object]
    salt: str | None = None
    spec: Any = field(default_factory=FullAttentionSpec)


CHANGES = [
    Change("RoPE base", lambda c: c.hf.update(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    Change("RoPE scaling", lambda c: c.hf.update(rope_scaling={"type": "yarn", "factor": 4.0})),
    Change("RoPE factor", lambda c: c.hf.update(rope_scaling={"type": "yarn", "factor": 4.5})),
    Change("int or float", lambda c: c.hf.update(rope_scaling={"type": "yarn", "factor": 4})),
    Change("shape", lambda c: c.hf.update(hidden_size=577)),
    Change("dtype", lambda c: setattr(c.model_config, "dtype", "torch.float16")),
    Change("quantization", lambda c: setattr(c.model_config, "quantization", "fp8")),
    Change("max_model_len", lambda c: setattr(c.model_config, "max_model_len", 4096)),
    Change("cache dtype", lambda c: setattr(c.cache_config, "cache_dtype", "fp8")),
    Change("cache dtype e5m2", lambda c: setattr(c.cache_config, "cache_dtype", "fp8_e5m2")),
    Change("hash", lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "sha256_cbor")),
    Change("split", lambda c: setattr(c.parallel_config, "tensor_parallel_size", 2)),
    Change("dummy weights", lambda c: setattr(c.load_config, "load_format", "dummy")),
    Change("salt", lambda c: None, salt="tenant"),
    Change("empty salt", lambda c: None, salt=""),
    Change("salt None", lambda c: None, salt="None"),
    Change("auto resolved otherwise", lambda c: None, spec=FullAttentionSpec(dtype="float16")),
    Change("block", lambda c: None, spec=FullAttentionSpec(block_size=32)),
]


def test_whatever_changes_what_is_computed_changes_the_space(model: Path) -> None:
    plain = found(Config(model)).fingerprint()
    fingerprints = {"plain": plain}
    for change in CHANGES:
        config = Config(model)
        change.make(config)
        fingerprints[change.name] = found(config, change.salt, change.spec).fingerprint()
    assert len(set(fingerprints.values())) == len(fingerprints), fingerprints
    assert found(Config(model)).fingerprint() == plain


def test_the_seed_of_the_hashes_is_part_of_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = found(Config(model)).fingerprint()
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"another")
    assert found(Config(model)).fingerprint() != plain


def test_the_seed_is_set_after_the_connector_is_made(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kv_cache_utils, "NONE_HASH")
    kv = groups(FullAttentionSpec())
    config = Config(model)
    one = Identity(config, kv, geometry_of(config, kv, None), None)
    wait_until(lambda: one._weights != Reason.NO_WORKER)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"seed", raising=False)
    assert one() == found(Config(model))


def test_where_the_files_lie_and_who_wrote_them_is_no_part_of_it(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "model@2"
    shutil.copytree(model, copy)
    config = Config(copy)
    config.hf["transformers_version"] = "5.1"
    config.hf = dict(reversed(config.hf.items()))
    assert found(config) == found(Config(model))


def test_weights_replaced_in_place(model: Path) -> None:
    plain = found(Config(model)).fingerprint()
    (model / "model.safetensors").write_bytes(b"WEIGHTS" * 100)
    assert found(Config(model)).fingerprint() != plain
    (model / "model.safetensors").write_bytes(b"weights" * 100)
    assert found(Config(model)).fingerprint() == plain


def test_weights_that_changed_under_the_running_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed_s = (model / "model.safetensors").stat().st_ctime
    monkeypatch.setattr(identity, "_process_start_s", lambda: changed_s - 1)
    assert found(Config(model)) == Reason.IN_DOUBT


def test_weights_that_are_not_there(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    assert found(Config(model)) == Reason.IN_DOUBT
    assert found(Config(tmp_path / "absent")) == Reason.IN_DOUBT


def test_a_single_file_is_a_model_too(model: Path) -> None:
    (model / "m.gguf").write_bytes(b"gguf")
    one, other = Config(model / "m.gguf"), Config(model)
    assert found(one).weights != found(other).weights


def test_a_configuration_that_cannot_be_described(model: Path) -> None:
    config = Config(model)
    config.hf["labels"] = {0: "a", "b": 1}  # keys that cannot be sorted
    assert found(config) == Reason.IN_DOUBT


class TestAdapter:
    @pytest.fixture
    def adapter(self, tmp_path: Path) -> SimpleNamespace:
        folder = tmp_path / "adapter"
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(b"lora")
        (folder / "adapter_config.json").write_text('{"r": 8}')
        return SimpleNamespace(lora_path=str(folder))

    @pytest.fixture
    def one(self, model: Path) -> Identity:
        return self.of(model)

    def of(self, model: Path) -> Identity:
        kv = groups(FullAttentionSpec())
        return Identity(Config(model), kv, geometry_of(Config(model), kv, None), None)

    def test_a_large_one_is_read_in_the_background(self, one: Identity, adapter: SimpleNamespace) -> None:
        (Path(adapter.lora_path) / "adapter_model.safetensors").write_bytes(bytes(20 << 20))
        assert one.adapter_digest(adapter) is Reason.IN_DOUBT, "the scheduler does not wait"
        wait_until(lambda: isinstance(one.adapter_digest(adapter), bytes))
        assert one.adapter_digest(adapter) == one.adapter_digest(adapter)

    def test_by_content(self, model: Path, one: Identity, adapter: SimpleNamespace, tmp_path: Path) -> None:
        digest = one.adapter_digest(adapter)
        assert isinstance(digest, bytes)
        assert one.adapter_digest(adapter) == digest
        shutil.copytree(adapter.lora_path, tmp_path / "copy")
        assert one.adapter_digest(SimpleNamespace(lora_path=str(tmp_path / "copy"))) == digest
        (tmp_path / "copy" / "adapter_config.json").write_text('{"r": 9}')
        assert self.of(model).adapter_digest(SimpleNamespace(lora_path=str(tmp_path / "copy"))) != digest

    @pytest.mark.parametrize("how", ["replaced", "same content again", "added", "removed", "folder gone"])
    def test_in_doubt_once_its_files_changed(self, one: Identity, adapter: SimpleNamespace, how: str) -> None:
        folder = Path(adapter.lora_path)
        one.adapter_digest(adapter)
        match how:
            case "replaced":
                (folder / "adapter_model.safetensors").write_bytes(b"LORA2")
            case "same content again":
                os.replace(
                    shutil.copy(folder / "adapter_config.json", folder / "x"), folder / "adapter_config.json"
                )
            case "added":
                (folder / "more.safetensors").write_bytes(b"")
            case "removed":
                (folder / "adapter_config.json").unlink()
            case "folder gone":
                shutil.rmtree(folder)
        assert one.adapter_digest(adapter) == Reason.IN_DOUBT
        if how == "folder gone":
            folder.mkdir()
        assert one.adapter_digest(adapter) == Reason.IN_DOUBT

    def test_another_engine_knows_the_new_files(
        self, model: Path, one: Identity, adapter: SimpleNamespace
    ) -> None:
        before = one.adapter_digest(adapter)
        file = Path(adapter.lora_path) / "adapter_model.safetensors"
        file.write_bytes(b"LORA")
        after = self.of(model).adapter_digest(adapter)
        file.write_bytes(b"lora")
        again = self.of(model).adapter_digest(adapter)
        assert isinstance(after, bytes)
        assert before == again != after

    @pytest.mark.parametrize("name", ["hub/name", "with\0NUL", "a" * 300])
    def test_a_folder_that_is_not_there_is_told_once(
        self, one: Identity, caplog: pytest.LogCaptureFixture, tmp_path: Path, name: str
    ) -> None:
        absent = SimpleNamespace(lora_path=str(tmp_path / name))
        for _ in range(5):
            assert one.adapter_digest(absent) == Reason.IN_DOUBT
        assert sum("cannot be identified" in record.message for record in caplog.records) == 1
