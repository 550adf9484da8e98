"""The accelerator's copier, with tensors on the CPU: the same code less the streams."""

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from stepwell.engines import device  # noqa: E402
from stepwell.engines.device import DeviceCopier, _together, register  # noqa: E402
from stepwell.tiers.arena import ArenaMap, create_arena  # noqa: E402

BLOCKS = 12


@pytest.fixture
def arena() -> Iterator[ArenaMap]:
    fd, arena = create_arena(4 << 20)
    yield arena
    arena.close()
    os.close(fd)


def layers(form: str, dtype: Any) -> list[Any]:
    def fresh(*shape: int) -> Any:
        count = int(torch.tensor(shape).prod())
        data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
        return data.view(dtype).view(*shape)

    match form:
        case "blocks first":
            return [fresh(BLOCKS, 2, 16, 8) for _ in range(3)]
        case "K and V first":
            return [fresh(2, BLOCKS, 16, 2, 8).movedim(1, 0) for _ in range(3)]
        case "heads before tokens":
            return [fresh(BLOCKS, 4, 16, 8).transpose(1, 2) for _ in range(3)]
        case "one storage":
            whole = fresh(BLOCKS, 3, 2, 16, 8)
            return [whole[:, n] for n in range(3)]
        case "unlike layers":
            return [fresh(BLOCKS, 16, 8), fresh(BLOCKS, 2, 16, 24)]
    raise AssertionError(form)


def raw(layer: Any, blocks: list[int]) -> Any:
    return layer[blocks].contiguous().view(torch.uint8)


@pytest.mark.parametrize("batch_blocks", [1, 4, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "form", ["blocks first", "K and V first", "heads before tokens", "one storage", "unlike layers"]
)
def test_there_and_back(
    arena: ArenaMap, monkeypatch: pytest.MonkeyPatch, form: str, dtype: Any, batch_blocks: int
) -> None:
    source, target = layers(form, dtype), layers(form, dtype)
    before = [raw(layer, list(range(BLOCKS))).clone() for layer in target]
    block_bytes = sum(layer[0].numel() * layer.element_size() for layer in source)
    monkeypatch.setattr(device, "_STAGING_BYTES", batch_blocks * block_bytes)
    writer, reader = DeviceCopier(source), DeviceCopier(target)
    assert writer.block_bytes == block_bytes
    # Runs of blocks that lie together, gaps, and one that goes backwards.
    places = [0, 1, 2, 3, 7, 8, 20, 19, 30]
    offsets = [64 + place * block_bytes for place in places]
    blocks = random.Random(1).sample(range(BLOCKS), len(places))
    assert writer.store(arena, offsets, blocks) == writer.finished() == 1
    into = random.Random(2).sample(range(BLOCKS), len(places))
    shuffled = random.Random(3).sample(list(zip(offsets, blocks, into, strict=True)), len(places))
    reader.load(arena, [o for o, _, _ in shuffled], [i for _, _, i in shuffled])
    assert reader.finished() == 1
    untouched = [block for block in range(BLOCKS) if block not in into]
    for one, other, old in zip(source, target, before, strict=True):
        assert torch.equal(raw(other, into), raw(one, blocks))
        assert torch.equal(raw(other, untouched), old[untouched])
    memory = torch.frombuffer(arena.buffer, dtype=torch.uint8)
    assert not memory[:64].any()
    assert not memory[64 + 4 * block_bytes : 64 + 7 * block_bytes].any()


@pytest.mark.parametrize(
    ("offsets", "ranges"),
    [
        ([0], [(0, 1)]),
        ([0, 10, 20], [(0, 3)]),
        ([0, 10, 30, 40, 20], [(0, 2), (2, 4), (4, 5)]),
        ([20, 10, 0], [(0, 1), (1, 2), (2, 3)]),
        ([0, 5], [(0, 1), (1, 2)]),
        ([0, 0], [(0, 1), (1, 2)]),
    ],
)
def test_runs_that_cross_the_bus_in_one_piece(offsets: list[int], ranges: list[tuple[int, int]]) -> None:
    assert list(_together(offsets, 10)) == ranges


def test_nothing_is_registered_without_cuda(arena: ArenaMap) -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA is here: tests/gpu has this")
    assert register(torch.device("cpu"), arena) is False
