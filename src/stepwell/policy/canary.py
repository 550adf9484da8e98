"""Which hits are computed all the same, to compare them with what was stored.

A checksum finds bytes that changed after they were stored. It cannot find wrong bytes that were stored:
only computing them again can.
"""

CANARY_CHUNKS = 1_000
"""One chunk in so many that are found is computed again: 0.1% of what the cache saves."""

TOLERANCE = 0.1
"""Largest difference of two computations of one chunk, as the norm of the difference by that of the chunk.
Another batch or another split of the prompt rounds differently: 0.004 to 0.02 in bfloat16. Another
prompt's chunk differs by 0.5 and more."""


class Canary:
    """Counts the chunks that were found; one in every `every_chunks` is due."""

    def __init__(self, every_chunks: int = CANARY_CHUNKS) -> None:
        """`every_chunks` 0: never."""
        self._every_chunks = every_chunks
        self._counted = 0

    def due(self, chunks: int) -> bool:
        """A request found so many chunks: whether one of them is to be computed again."""
        if self._every_chunks == 0:
            return False
        self._counted += chunks
        if self._counted < self._every_chunks:
            return False
        self._counted %= self._every_chunks
        return True
