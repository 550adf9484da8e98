"""Copies between an arena and KV pages in host memory, as bytes: nothing is known of what they mean."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stepwell.tiers.arena import ArenaMap

Bytes = npt.NDArray[np.uint8]


class HostCopier:
    """Pages of every layer as arrays of shape [blocks, page bytes], uint8, each page contiguous."""

    def __init__(self, layers: Sequence[Bytes]) -> None:
        self._layers = layers
        self._copies = 0

    @property
    def block_bytes(self) -> int:
        """One block over all layers."""
        return sum(layer.shape[1] for layer in self._layers)

    def load(self, arena: ArenaMap, offsets: Sequence[int], blocks: Sequence[int]) -> int:
        memory = np.frombuffer(arena.buffer, np.uint8)
        for offset, block in zip(offsets, blocks, strict=True):
            start = offset
            for layer in self._layers:
                end = start + layer.shape[1]
                np.copyto(layer[block], memory[start:end])
                start = end
        self._copies += 1
        return self._copies

    def store(self, arena: ArenaMap, offsets: Sequence[int], blocks: Sequence[int]) -> int:
        memory = np.frombuffer(arena.buffer, np.uint8)
        for offset, block in zip(offsets, blocks, strict=True):
            start = offset
            for layer in self._layers:
                end = start + layer.shape[1]
                np.copyto(memory[start:end], layer[block])
                start = end
        self._copies += 1
        return self._copies

    def read(self, block: int) -> Bytes:
        return np.concatenate([layer[block] for layer in self._layers])

    def fence(self) -> None:
        """Nothing to wait for: copies are done when they return."""

    def finished(self) -> int:
        return self._copies
