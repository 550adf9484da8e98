"""The accelerator's copier on CUDA, without any engine."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs CUDA")
if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

from stepwell.engines import device  # noqa: E402
from stepwell.engines.device import DeviceCopier, register  # noqa: E402
from stepwell.tiers.arena import ArenaMap, create_arena  # noqa: E402
from support.waiting import wait_until  # noqa: E402

BLOCKS = 64


@pytest.fixture(params=[True, False], ids=["registered", "not registered"])
def arena(request: pytest.FixtureRequest) -> Iterator[ArenaMap]:
    fd, arena = create_arena(64 << 20)
    if request.param:
        assert register(torch.device("cuda"), arena)
    yield arena
    torch.cuda.synchronize()
    if request.param:
        assert int(torch.cuda.cudart().cudaHostUnregister(arena.address)) == 0
    arena.close()
    os.close(fd)


def layers(form: str, dtype: Any) -> list[Any]:
    shape = (BLOCKS, 2, 16, 4, 32)
    count = 2 * 16 * 4 * 32 * BLOCKS * dtype.itemsize
    fresh = [torch.randint(0, 256, (count,), dtype=torch.uint8, device="cuda").view(dtype) for _ in range(4)]
    if form == "blocks first":
        return [layer.view(*shape) for layer in fresh]
    if form == "K and V first":
        return [layer.view(2, BLOCKS, 16, 4, 32).movedim(1, 0) for layer in fresh]
    whole = torch.cat(fresh).view(BLOCKS, 4, *shape[1:])
    return [whole[:, n] for n in range(4)]


def raw(layer: Any, blocks: list[int]) -> Any:
    return layer[blocks].contiguous().view(torch.uint8)


@pytest.mark.parametrize("batch_blocks", [1, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("form", ["blocks first", "K and V first", "one storage"])
def test_there_and_back(
    arena: ArenaMap, monkeypatch: pytest.MonkeyPatch, form: str, dtype: Any, batch_blocks: int
) -> None:
    source, target = layers(form, dtype), layers(form, dtype)
    block_bytes = sum(layer[0].numel() * layer.element_size() for layer in source)
    monkeypatch.setattr(device, "_STAGING_BYTES", batch_blocks * block_bytes)
    writer, reader = DeviceCopier(source), DeviceCopier(target)
    blocks = torch.randperm(BLOCKS)[:40].tolist()
    offsets = [(place + place // 9) * block_bytes for place in range(40)]
    number = writer.store(arena, offsets, blocks)
    wait_until(lambda: writer.finished() == number)
    into = torch.randperm(BLOCKS)[:40].tolist()
    number = reader.load(arena, offsets, into)
    for one, other in zip(source, target, strict=True):
        assert torch.equal(raw(other, into), raw(one, blocks))
    wait_until(lambda: reader.finished() == number)


def test_a_fence_keeps_pages_until_they_are_stored(arena: ArenaMap) -> None:
    source = layers("blocks first", torch.bfloat16)
    copier = DeviceCopier(source)
    blocks = list(range(32))
    offsets = [block * copier.block_bytes for block in blocks]
    for _ in range(20):
        expected = [raw(layer, blocks).cpu() for layer in source]
        number = copier.store(arena, offsets, blocks)
        copier.fence()
        for layer in source:
            layer.view(torch.uint8).random_(0, 256)  # what the next step computes into the same blocks
        wait_until(lambda number=number: copier.finished() == number)  # type: ignore[misc]
        memory = torch.frombuffer(arena.buffer, dtype=torch.uint8)
        start = 0
        for layer in expected:
            pages = layer.view(32, -1)
            for block in blocks:
                place = block * copier.block_bytes + start
                assert torch.equal(memory[place : place + pages.shape[1]], pages[block])
            start += pages.shape[1]
