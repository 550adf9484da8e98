"""The connector between stand-ins of vLLM's scheduler and worker, on a real server, with real tensors."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_standins import Config, FullAttentionSpec, groups

from stepwell.types import Reason
from support.server import ServerProcess
from support.waiting import wait_until

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402

from stepwell.engines.vllm import StepwellConnector  # noqa: E402

BLOCKS, HEADS, B, SIZE = 12, 2, 16, 4
SPEC = FullAttentionSpec(block_size=B, page_size_bytes=HEADS * B * SIZE * 2)


class Engine:
    """Both halves, in the order of vLLM's calls."""

    def __init__(self, server: ServerProcess, model: Path, name: str, **extra: Any) -> None:
        config: Any = Config(model)
        config.kv_transfer_config = SimpleNamespace(
            engine_id=name,
            kv_connector_extra_config={"socket": str(server.socket), "chunk_blocks": 1, **extra},
        )
        kv = groups(SPEC)
        kv.num_blocks = BLOCKS
        self.layers = {f"layer.{n}": torch.randn(BLOCKS, HEADS, B, SIZE).bfloat16() for n in range(3)}
        self.scheduler = StepwellConnector(config, KVConnectorRole.SCHEDULER, kv)
        self.worker = StepwellConnector(config, KVConnectorRole.WORKER, kv)
        self.worker.register_kv_caches(self.layers)
        self.forward: Callable[[], object] = lambda: None
        spaces = self.scheduler._scheduler._spaces  # type: ignore[union-attr]
        wait_until(lambda: spaces.find(None) != Reason.NO_WORKER)

    def step(
        self, scheduled: dict[str, int], new: list[Any] | None = None, cached: dict[str, Any] | None = None
    ) -> None:
        """`cached`: for each request its tokens so far, new blocks or None, and whether it is resumed."""
        cached = cached or {}
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=new or [],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(cached),
                num_computed_tokens=[tokens for tokens, _, _ in cached.values()],
                new_block_ids=[None if blocks is None else (blocks,) for _, blocks, _ in cached.values()],
                resumed_req_ids={name for name, (_, _, resumed) in cached.items() if resumed},
            ),
        )
        metadata = self.scheduler.build_connector_meta(output)
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        for name in self.layers:
            self.worker.wait_for_layer_load(name)
            self.worker.save_kv_layer(name, None, None)
        self.forward()
        self.worker.start_load_kv(None, more="arguments")  # after the forward pass, in some versions
        self.worker.wait_for_save()
        assert self.worker.get_block_ids_with_load_errors() == set()
        done = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=done))

    def first(self, request: Any, blocks: list[int], tokens: int, own_tokens: int = 0) -> int:
        """Schedule a request: how many tokens it hit beyond the engine's own."""
        hit, later = self.scheduler.get_num_new_matched_tokens(request, own_tokens)
        assert later is False
        assert hit is not None
        allocated = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.update_state_after_alloc(request, allocated, hit)
        start = own_tokens + hit
        new = SimpleNamespace(req_id=request.request_id, block_ids=(blocks,), num_computed_tokens=start)
        self.step({request.request_id: tokens - start}, [new])
        return hit

    def pages(self, blocks: list[int]) -> Any:
        return torch.stack([layer[blocks] for layer in self.layers.values()])

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def request(name: str, tokens: int) -> Any:
    hashes = [bytes([n]) * 32 for n in range(1, tokens // B + 1)]
    return SimpleNamespace(
        request_id=name,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        block_hashes=hashes,
        lora_request=None,
        skip_reading_prefix_cache=False,
    )


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"seed", raising=False)
    monkeypatch.setattr("stepwell.engines.vllm.identity._process_start_s", lambda: 2.0**40)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.fixture
def engine(server: ServerProcess, model: Path) -> Iterator[Engine]:
    engine = Engine(server, model, "one")
    yield engine
    engine.close()


def test_stored_pages_come_back_in_another_engine(server: ServerProcess, model: Path, engine: Engine) -> None:
    assert engine.first(request("r", 40), [1, 2, 3], 40) == 0
    other = Engine(server, model, "two")
    before = other.pages(list(range(BLOCKS)))
    assert other.first(request("s", 40), [7, 5, 3], 40) == 32
    assert torch.equal(other.pages([7, 5]), engine.pages([1, 2]))
    untouched = [block for block in range(BLOCKS) if block not in (7, 5)]
    assert torch.equal(other.pages(untouched), before[:, untouched])
    other.close()


def test_a_prompt_in_parts_then_preempted_and_resumed(
    server: ServerProcess, model: Path, engine: Engine
) -> None:
    asked = request("r", 70)
    engine.first(asked, [1, 2], 20)
    engine.step({"r": 20}, cached={"r": (20, [3], False)})
    engine.step({"r": 5}, cached={"r": (40, None, False)})
    # Preempted; the blocks are others' now. It resumes with what is held, in other blocks.
    assert engine.scheduler.get_num_new_matched_tokens(asked, 0) == (32, False)
    expected = engine.pages([1, 2])
    engine.scheduler.update_state_after_alloc(
        asked, SimpleNamespace(get_block_ids=lambda: ([8, 9, 4, 6, 10],)), 32
    )
    engine.step({"r": 38}, cached={"r": (32, [8, 9, 4, 6, 10], True)})
    assert torch.equal(engine.pages([8, 9]), expected)
    scheduler = engine.scheduler._scheduler
    assert scheduler is not None
    assert scheduler._tracked["r"].blocks == [8, 9, 4, 6, 10]
    other = Engine(server, model, "two")
    assert other.first(request("s", 70), [5, 4, 3, 2, 1], 70) == 64
    assert torch.equal(other.pages([5, 4, 3, 2]), engine.pages([8, 9, 4, 6]))
    other.close()


def test_what_follows_a_hit_is_stored(server: ServerProcess, model: Path, engine: Engine) -> None:
    engine.first(request("r", 40), [1, 2, 3], 40)
    second, third = Engine(server, model, "two"), Engine(server, model, "three")
    assert second.first(request("s", 70), [5, 4, 3, 2, 1], 70) == 32
    assert third.first(request("t", 70), [6, 7, 8, 9, 10], 70) == 64
    assert torch.equal(third.pages([8, 9]), second.pages([3, 2]))
    second.close()
    third.close()


def test_nothing_is_loaded_over_what_was_computed(engine: Engine) -> None:
    engine.first(request("r", 32), [1, 2], 32)

    def last_token() -> None:
        for layer in engine.layers.values():
            layer[4][:, -1] = 7

    engine.forward = last_token
    assert engine.first(request("s", 32), [3, 4], 32) == 31
    assert torch.equal(engine.pages([3]), engine.pages([1]))
    assert (engine.pages([4])[:, :, :, -1] == 7).all()


def test_its_own_hit_comes_first(server: ServerProcess, model: Path, engine: Engine) -> None:
    engine.first(request("r", 70), [1, 2, 3, 4, 5], 70)
    other = Engine(server, model, "two")
    own = other.pages([9, 8])
    assert other.first(request("s", 70), [9, 8, 7, 6, 5], 70, own_tokens=32) == 32
    assert torch.equal(other.pages([9, 8]), own)
    assert torch.equal(other.pages([7, 6]), engine.pages([3, 4]))
    other.close()


def test_a_salt_keeps_engines_apart(server: ServerProcess, model: Path, engine: Engine) -> None:
    engine.first(request("r", 40), [1, 2, 3], 40)
    for times in (0, 32):
        other = Engine(server, model, f"salted {times}", salt="X")
        assert other.first(request("s", 40), [1, 2, 3], 40) == times
        other.close()


def test_finished_and_reset(engine: Engine) -> None:
    asked = request("r", 40)
    engine.first(asked, [1, 2, 3], 40)
    assert engine.scheduler.request_finished(asked, [1, 2, 3]) == (False, None)
    assert engine.scheduler.request_finished_all_groups(asked, ([1, 2, 3],)) == (False, None)
    engine.step({})
    assert engine.scheduler.has_pending_push_work() is False
    assert engine.scheduler.get_num_new_matched_tokens(request("s", 40), 0) == (32, False)
    engine.step({})
    assert engine.scheduler.reset_cache() is True
    assert engine.scheduler.get_num_new_matched_tokens(request("t", 40), 0) == (0, False)


def test_an_engine_that_cannot_be_served_runs_uncached(model: Path) -> None:
    config: Any = Config(model)
    config.kv_transfer_config = SimpleNamespace(
        engine_id="three", kv_connector_extra_config={"socket": str(model / "none")}
    )
    kv = groups(SPEC, count=2)
    scheduler = StepwellConnector(config, KVConnectorRole.SCHEDULER, kv)
    worker = StepwellConnector(config, KVConnectorRole.WORKER, kv)
    worker.register_kv_caches({"a": torch.zeros(8, 4)})
    asked = request("r", 40)
    assert scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)
    scheduler.update_state_after_alloc(asked, SimpleNamespace(), 0)
    metadata = scheduler.build_connector_meta(SimpleNamespace())
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert worker.build_connector_worker_meta() is None
    scheduler.update_connector_output(SimpleNamespace())
    assert scheduler.request_finished(asked, []) == (False, None)
    assert scheduler.reset_cache() is None
    assert scheduler.has_pending_push_work() is False
    scheduler.shutdown()
    worker.shutdown()


def test_pages_that_cannot_be_copied_run_uncached(model: Path) -> None:
    config: Any = Config(model)
    config.kv_transfer_config = SimpleNamespace(
        engine_id="four", kv_connector_extra_config={"socket": str(model / "none")}
    )
    kv = groups(SPEC)
    kv.num_blocks = BLOCKS
    for pages in (torch.zeros(3, 4), torch.zeros(BLOCKS, 4), [torch.zeros(BLOCKS, 4)]):
        worker = StepwellConnector(config, KVConnectorRole.WORKER, kv)
        worker.register_kv_caches({"a": pages})
        assert worker._worker is None


def test_a_misspelt_name_is_refused(model: Path) -> None:
    config: Any = Config(model)
    config.kv_transfer_config = SimpleNamespace(
        engine_id="five", kv_connector_extra_config={"chunk_block": 2}
    )
    with pytest.raises(ValueError, match="chunk_block"):
        StepwellConnector(config, KVConnectorRole.SCHEDULER, groups(SPEC))
