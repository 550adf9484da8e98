"""vLLM's KV tensors as pages of bytes, and what their form says about who may read them."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stepwell.engines.pages import Bytes
from stepwell.layout import Field, fingerprint


class UnsupportedPages(ValueError):
    """These KV tensors cannot be copied as pages; the message says why."""


def distinct_layers(kv_caches: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors to copy, in the model's order. Layers that share another's cache are left out.

    Raises UnsupportedPages for layers that keep something else than one tensor.
    """
    layers: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedPages(f"layer {name} keeps a {type(tensor).__name__} instead of one tensor")
        form = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if form not in seen:
            seen.add(form)
            layers[name] = tensor
    return layers


def block_first(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A view with the blocks in dimension 0. Raises UnsupportedPages when they cannot be told."""
    candidates = [dim for dim in range(min(2, tensor.dim())) if tensor.shape[dim] == num_blocks]
    # With two blocks, [2, blocks, …] looks like [blocks, 2, …].
    if not candidates or (len(candidates) == 2 and num_blocks == 2):
        raise UnsupportedPages(f"no dimension of {tuple(tensor.shape)} counts {num_blocks} blocks")
    return tensor.movedim(candidates[0], 0)


def host_pages(layers: Sequence[torch.Tensor], num_blocks: int) -> list[Bytes]:
    """Each layer as [blocks, page bytes], sharing memory. Raises UnsupportedPages for scattered pages."""
    pages = []
    for tensor in layers:
        view = block_first(tensor, num_blocks)
        if not view[0].is_contiguous():
            raise UnsupportedPages(f"a page of shape {tuple(view[0].shape)} is not contiguous")
        flat = view.flatten(1) if view.is_contiguous() else view.view(num_blocks, -1)
        pages.append(flat.view(torch.uint8).numpy())
    return pages


def layout_digest(layers: Mapping[str, torch.Tensor], num_blocks: int, rank: int) -> bytes:
    """32 bytes for all that lets another worker of this rank read these pages.

    How many blocks there are is no part of it: that follows from the memory that was free at the start.
    Raises UnsupportedPages as `block_first` does.
    """
    tensors: list[Field] = []
    for name, tensor in layers.items():
        page = block_first(tensor, num_blocks)[0]
        # The strides themselves depend on the number of blocks where K and V come first.
        order = sorted(range(page.dim()), key=page.stride, reverse=True)
        tensors.append((name, tuple(page.shape), order, str(tensor.dtype), tensor.device.type))
    return fingerprint(("worker", rank, tensors, _packing(layers)))


def _packing(layers: Mapping[str, torch.Tensor]) -> Field:
    # On CPUs the attention kernels pack keys and values as the instruction set likes it.
    if any(tensor.device.type != "cpu" for tensor in layers.values()):
        return None
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: None)()
    return (platform.machine(), torch.backends.cpu.get_cpu_capability(), amx)
