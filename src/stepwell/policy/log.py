"""What lives on when a log reclaims its oldest segment: a second chance for what somebody used."""

from collections.abc import Callable, Collection, Sequence

from stepwell.types import ChunkId

KEPT_SHARE = 0.5
"""Of a segment's bytes, at most so much is written again: each byte stored then costs at most two written,
however much is in use. Without a bound, a log full of used chunks would only copy itself."""


class LogUses:
    """Which chunks of a log were used since they were written to it."""

    def __init__(self) -> None:
        self._used: set[ChunkId] = set()

    def use(self, chunk: ChunkId) -> None:
        self._used.add(chunk)

    def forget(self, chunks: Collection[ChunkId]) -> None:
        """They were written anew, or are gone."""
        self._used.difference_update(chunks)

    def kept(
        self,
        segment: Sequence[tuple[ChunkId, int]],
        segment_bytes: int,
        in_use: Callable[[ChunkId], bool],
    ) -> list[ChunkId]:
        """Which of the (chunk, bytes) in the segment that goes next are to be written again.

        Those used since they were written, or `in_use` in a faster tier, in the order of the log: a parent
        lies before its children, so what the bound cuts off is never a parent alone.
        """
        room_bytes = int(KEPT_SHARE * segment_bytes)
        kept = []
        for chunk, nbytes in segment:
            if nbytes <= room_bytes and (chunk in self._used or in_use(chunk)):
                kept.append(chunk)
                room_bytes -= nbytes
        return kept
