"""What vLLM's tensors are as pages of bytes."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stepwell.engines.pages import HostCopier
from stepwell.tiers.arena import ArenaMap, create_arena

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
from stepwell.engines.device import DeviceCopier  # noqa: E402
from stepwell.engines.vllm.pages import (  # noqa: E402
    UnsupportedPages,
    block_first,
    distinct_layers,
    host_pages,
    layout_digest,
)


@pytest.fixture
def arena() -> Iterator[ArenaMap]:
    fd, arena = create_arena(1 << 20)
    yield arena
    arena.close()
    os.close(fd)


def tensor(*shape: int, dtype: Any = None) -> Any:
    count = int(np.prod(shape))
    return torch.arange(count, dtype=torch.int32).to(dtype or torch.float32).view(*shape)


def one_storage(blocks: int, layers: int, heads: int, tokens: int, size: int) -> Any:
    """All layers in one storage [blocks, layers, …]: each layer is a strided view."""
    whole = tensor(blocks, layers, heads, tokens, size, dtype=torch.bfloat16)
    return {f"layer.{n}": whole[:, n] for n in range(layers)}


class TestDistinctLayers:
    def test_shared_ones_are_left_out_once(self) -> None:
        one, two = tensor(4, 2, 8), tensor(4, 2, 8)
        layers = distinct_layers({"a": one, "b": two, "c": one, "d": one.view(4, 2, 8)})
        assert list(layers) == ["a", "b"]

    def test_views_of_one_storage_are_all_kept(self) -> None:
        assert len(distinct_layers(one_storage(5, 3, 2, 4, 8))) == 3

    def test_something_else_than_a_tensor(self) -> None:
        with pytest.raises(UnsupportedPages, match="layer m keeps a list"):
            distinct_layers({"a": tensor(4, 2), "m": [tensor(4, 2)]})


class TestBlockFirst:
    def test_where_the_blocks_are(self) -> None:
        assert block_first(tensor(7, 3, 4), 7).shape == (7, 3, 4)
        moved = block_first(tensor(2, 7, 3, 4), 7)
        assert moved.shape == (7, 2, 3, 4)
        assert torch.equal(moved[5], tensor(2, 7, 3, 4)[:, 5])
        assert block_first(tensor(7, 7, 4), 7).stride()[0] == 28  # [blocks, heads, …]

    @pytest.mark.parametrize(("shape", "blocks"), [((3, 4, 7), 7), ((6,), 7), ((14, 2), 7), ((2, 2, 5), 2)])
    def test_it_cannot_be_told(self, shape: tuple[int, ...], blocks: int) -> None:
        with pytest.raises(UnsupportedPages):
            block_first(tensor(*shape), blocks)


class TestHostPages:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "uint8", "float8_e4m3fn", "int8"])
    def test_bytes_are_shared(self, dtype: str) -> None:
        layer = tensor(5, 2, 4, dtype=getattr(torch, dtype))
        (pages,) = host_pages([layer], 5)
        assert pages.shape == (5, 8 * layer.element_size())
        pages[3] = 0
        assert not layer[3].view(torch.uint8).any()
        assert layer[2].view(torch.uint8).any()

    def test_one_storage_for_all_layers(self, arena: ArenaMap) -> None:
        source, target = one_storage(5, 3, 2, 4, 8), one_storage(5, 3, 2, 4, 8)
        for layer in target.values():
            layer.zero_()
        HostCopier(host_pages(list(source.values()), 5)).store(arena, [0, 4096], [1, 4])
        HostCopier(host_pages(list(target.values()), 5)).load(arena, [4096, 0], [2, 3])
        for name in source:
            assert torch.equal(target[name][[2, 3]], source[name][[4, 1]])
            assert not target[name][[0, 1, 4]].any()

    def test_scattered_pages(self) -> None:
        with pytest.raises(UnsupportedPages, match="not contiguous"):
            host_pages([tensor(2, 5, 3, 4)], 5)
        with pytest.raises(UnsupportedPages, match="not contiguous"):
            host_pages([tensor(5, 4, 3).transpose(1, 2)], 5)


@pytest.mark.parametrize("order", ["host first", "device first"])
def test_host_and_device_agree_where_pages_lie(arena: ArenaMap, order: str) -> None:
    source, target = one_storage(12, 3, 2, 4, 8), one_storage(12, 3, 2, 4, 8)
    copiers: list[Any] = [
        HostCopier(host_pages(list(source.values()), 12)),
        DeviceCopier(list(target.values())),
    ]
    if order == "device first":
        copiers.reverse()
        source, target = target, source
    copiers[0].store(arena, [0, 8192], [3, 5])
    copiers[1].load(arena, [0, 8192], [1, 2])
    for name in source:
        assert torch.equal(target[name][[1, 2]], source[name][[3, 5]])


class TestLayoutDigest:
    def test_what_it_depends_on(self) -> None:
        def digest(layer: Any, rank: int = 0, name: str = "a") -> bytes:
            return layout_digest({name: layer}, 6, rank)

        first = digest(tensor(6, 2, 4))
        assert digest(tensor(6, 2, 4) + 1) == first
        others = [
            digest(tensor(6, 2, 4), rank=1),
            digest(tensor(6, 2, 4), name="b"),
            digest(tensor(6, 4, 2)),
            digest(tensor(6, 4, 2).transpose(1, 2)),
            digest(tensor(6, 8)),
            digest(tensor(6, 2, 4, dtype=torch.bfloat16)),
            digest(tensor(6, 2, 4, dtype=torch.float16)),
            digest(tensor(6, 2, 4, dtype=torch.int32)),
            digest(tensor(2, 6, 4)),
        ]
        assert len({first, *others}) == 1 + len(others) - 1  # [2, 6, 4] holds the same pages as [6, 2, 4]
        assert digest(tensor(2, 6, 4)) == first
        dtypes = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8]
        assert len({digest(tensor(6, 2, 4, dtype=dtype)) for dtype in dtypes}) == 4

    @pytest.mark.parametrize("shape", ["blocks first", "K and V first", "one storage"])
    def test_not_on_how_many_blocks_there_are(self, shape: str) -> None:
        def layers(blocks: int) -> Any:
            if shape == "one storage":
                return one_storage(blocks, 3, 2, 4, 8)
            return {"a": tensor(blocks, 2, 4, 8) if shape == "blocks first" else tensor(2, blocks, 4, 8)}

        assert layout_digest(layers(9), 9, 0) == layout_digest(layers(50), 50, 0)
