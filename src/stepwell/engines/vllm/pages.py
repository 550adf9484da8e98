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
    if tensor.dim() >= 2 and len(candidates) == 2:
        # [2, blocks, …] with two blocks: the outermost stride belongs to K and V.
        candidates = candidates[:1]
    if not candidates:
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


def layout_digest(layers: Mapping[str, torch.Tensor], rank: int) -> bytes:
    """32 bytes for all that lets another worker of this rank read these pages."""
    tensors: list[Field] = [
        (name, tuple(tensor.shape[1:]), tuple(tensor.stride()[1:]), str(tensor.dtype), tensor.device.type)
        for name, tensor in layers.items()
    ]
    return fingerprint(("worker", rank, tensors, _packing(layers)))


def _packing(layers: Mapping[str, torch.Tensor]) -> Field:
    # On CPUs the attention kernels pack keys and values as the instruction set likes it.
    if any(tensor.device.type != "cpu" for tensor in layers.values()):
        return None
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: None)()
    return (platform.machine(), torch.backends.cpu.get_cpu_capability(), amx)


