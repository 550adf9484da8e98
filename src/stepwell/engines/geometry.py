"""How an engine's blocks lie in a chunk."""

import msgspec


class Geometry(msgspec.Struct, frozen=True):
    """One chunk is, in this order: rank, block in the chunk, layer, page bytes.

    Block-major inside a rank's stripe, so that a prompt of which the engine holds the beginning can be
    loaded from the middle of a chunk.
    """

    block_tokens: int
    block_bytes: int  # one block of one rank, all its layers
    chunk_blocks: int
    ranks: int

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.chunk_blocks

    @property
    def stripe_bytes(self) -> int:
        """What one rank holds of a chunk."""
        return self.block_bytes * self.chunk_blocks

    @property
    def chunk_bytes(self) -> int:
        return self.stripe_bytes * self.ranks
