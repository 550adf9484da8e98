"""Copies between an arena and KV tensors on an accelerator. Needs torch, but no engine.

A block's pages are scattered over the layers, and a transfer of one page at a time would cost more for
its start than for its bytes. So pages are gathered into one staging buffer on the device, and each run
of blocks that lies together in the arena crosses the bus in one piece.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from stepwell.engines.pages import Bytes
from stepwell.tiers.arena import ArenaMap

logger = logging.getLogger(__name__)

_STAGING_BYTES = 64 << 20


def register(device: torch.device, arena: ArenaMap) -> bool:
    """Let CUDA copy directly from and to this arena. Whether it can; without, copies take a detour.

    From any thread: the engine's device is not that of a thread which has not chosen one.
    """
    if not torch.cuda.is_available():
        return False
    with torch.cuda.device(device):
        error = torch.cuda.cudart().cudaHostRegister(arena.address, arena.size_bytes, 0)
    if int(error) != 0:
        logger.warning(
            "CUDA cannot register the arena (error %s): copies are slower; check the limit on locked memory",
            error,
        )
        return False
    return True


def unregister(device: torch.device, arena: ArenaMap) -> None:
    """Undo `register`, before the arena is unmapped; copies must have ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(arena.address)


class DeviceCopier:
    """Pages of every layer as tensors [blocks, …], all on one device; pages need not be contiguous."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        # torch copies by index only what it can compute with; some 8-bit floats it cannot.
        self._layers = [layer.view(torch.uint8) if layer.element_size() == 1 else layer for layer in layers]
        self._device = layers[0].device
        self._page_bytes = [layer[0].numel() * layer.element_size() for layer in layers]
        self.block_bytes = sum(self._page_bytes)
        self._batch_blocks = max(1, _STAGING_BYTES // self.block_bytes)
        self._staging = torch.empty(
            (self._batch_blocks, self.block_bytes), dtype=torch.uint8, device=self._device
        )
        self._cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._cuda else None
        self._begun = 0
        self._ended = 0
        self._events: deque[tuple[int, Any]] = deque()

    @property
    def device(self) -> torch.device:
        return self._device

    def load(self, arena: ArenaMap, offsets: Sequence[int], blocks: Sequence[int]) -> int:
        # In the engine's own stream: the pages may still be read by the step before, and are read next.
        memory = torch.frombuffer(arena.buffer, dtype=torch.uint8)
        for part in self._batches(len(blocks)):
            ids = torch.tensor(blocks[part], device=self._device)
            for first, last in _together(offsets[part], self.block_bytes):
                nbytes = (last - first) * self.block_bytes
                start = offsets[part][first]
                self._staging[first:last].view(-1).copy_(memory[start : start + nbytes], non_blocking=True)
            for layer, pages in self._staged(len(ids)):
                layer.index_copy_(0, ids, pages)
        return self._mark(None)

    def store(self, arena: ArenaMap, offsets: Sequence[int], blocks: Sequence[int]) -> int:
        memory = torch.frombuffer(arena.buffer, dtype=torch.uint8)
        if self._stream is None:
            self._store(memory, offsets, blocks)
            return self._mark(None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._store(memory, offsets, blocks)
        return self._mark(self._stream)

    def _store(self, memory: torch.Tensor, offsets: Sequence[int], blocks: Sequence[int]) -> None:
        for part in self._batches(len(blocks)):
            ids = torch.tensor(blocks[part], device=self._device)
            for layer, pages in self._staged(len(ids)):
                pages.copy_(layer.index_select(0, ids))
            for first, last in _together(offsets[part], self.block_bytes):
                nbytes = (last - first) * self.block_bytes
                start = offsets[part][first]
                memory[start : start + nbytes].copy_(self._staging[first:last].view(-1), non_blocking=True)

    def read(self, block: int) -> Bytes:
        # Waits for the device: this is for one block now and then.
        pages = [layer[block].contiguous().view(-1).view(torch.uint8) for layer in self._layers]
        read: Bytes = torch.cat(pages).cpu().numpy()
        return read

    def fence(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finished(self) -> int:
        while self._events and self._events[0][1].query():
            self._ended = self._events.popleft()[0]
        return self._ended

    def _batches(self, blocks: int) -> Iterator[slice]:
        for start in range(0, blocks, self._batch_blocks):
            yield slice(start, min(start + self._batch_blocks, blocks))

    def _staged(self, blocks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer, and where its pages of the first `blocks` staged blocks lie, in the layer's form."""
        start = 0
        for layer, nbytes in zip(self._layers, self._page_bytes, strict=True):
            flat = self._staging[:blocks, start : start + nbytes]
            yield layer, flat.view(layer.dtype).view(blocks, *layer.shape[1:])
            start += nbytes

    def _mark(self, stream: Any) -> int:
        self._begun += 1
        if self._cuda:
            event = torch.cuda.Event()
            event.record(stream or torch.cuda.current_stream(self._device))
            self._events.append((self._begun, event))
        else:
            self._ended = self._begun
        return self._begun


def _together(offsets: Sequence[int], block_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of positions whose blocks follow one another in the arena without a gap."""
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(offsets)) if b != a + block_bytes]
    yield from pairwise([0, *breaks, len(offsets)])
