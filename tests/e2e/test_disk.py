"""Real vLLM on a cache whose memory is lost: its prompts come from disk."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.demo.engine import BLOCK_TOKENS

from .conftest import CacheServer, Engine, wait_for
from .test_engine import agree, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
TOKENS = 1_500
CHUNKS = TOKENS // BLOCK_TOKENS


@pytest.fixture(scope="module")
def disk_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheServer]:
    folder = tmp_path_factory.mktemp("cache")
    server = CacheServer(folder, "512MiB", "--disk", str(folder / "disk"), "--disk-size", "1GiB")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def disk_engine(
    tmp_path_factory: pytest.TempPathFactory, model: Path, disk_server: CacheServer
) -> Iterator[Engine]:
    engine = Engine(
        tmp_path_factory.mktemp("engine"),
        model,
        blocks=24,
        cache=disk_server.socket,
        settings={"canary_chunks": 50},
    )
    yield engine
    engine.stop()


def test_a_lost_memory_costs_no_answer_and_little_time(disk_engine: Engine, disk_server: CacheServer) -> None:
    prompts = [prompt(seed, TOKENS) for seed in range(200, 204)]
    computed = [disk_engine.ask(text, 1) for text in prompts]
    assert [answer.cached_tokens for answer in computed] == [0] * 4

    def written() -> bool:
        disk = disk_server.stats()["tiers"]["disk"]
        return bool(disk["chunks"] == 4 * CHUNKS and disk["queued_chunks"] == 0)

    wait_for(written, 30, disk_server.stats)
    disk_server.kill()
    disk_server.child.wait(10)
    disk_server.start()
    seeds = itertools.count(220)

    def both_halves_are_back() -> bool:
        disk_engine.ask(prompt(next(seeds), 140), 1)
        return bool(disk_server.stats()["spaces"] == 1)  # opened when the workers have mapped the arena

    wait_for(both_halves_are_back, 30, disk_server.stats)
    again = [disk_engine.ask(text, 1) for text in prompts]
    assert [answer.cached_tokens for answer in again] == [CHUNKS * BLOCK_TOKENS] * 4
    assert all(agree(one, other) for one, other in zip(again, computed, strict=True))
    assert disk_server.stats()["tiers"]["disk"]["loaded_chunks"] == 4 * CHUNKS
    assert sum(a.whole_s for a in again) < sum(a.whole_s for a in computed) / 3


def test_chunks_computed_again_are_those_stored(disk_engine: Engine, disk_server: CacheServer) -> None:
    before = disk_server.stats()
    for _ in range(3):
        for seed in range(210, 214):
            disk_engine.ask(prompt(seed, TOKENS), 1)
    after = disk_server.stats()
    assert after["checked_chunks"] - before["checked_chunks"] >= 1
    assert after["differing_chunks"] == 0
