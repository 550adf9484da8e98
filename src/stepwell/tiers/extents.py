"""Byte ranges of one arena, for chunks of any sizes side by side: no fixed slabs."""

from bisect import bisect_left, insort


class Extents:
    """Allocates ranges by best fit: a hole of exactly the size, else the smallest larger one, split.

    A freed range joins the holes on both its sides at once (boundary tags, Knuth, The Art of Computer
    Programming, vol. 1, 2.5), so that nothing is left to compact and one size never locks out another.

    A call bisects the distinct sizes of holes, at most sqrt(2n) in an arena of n alignments.
    """

    def __init__(self, size_bytes: int, align_bytes: int = 4096) -> None:
        """An arena of `size_bytes`, of which what is left after the last whole `align_bytes` is never given.

        Raises ValueError for a size below 0 or an alignment below 1.
        """
        if size_bytes < 0 or align_bytes < 1:
            raise ValueError(f"no arena of {size_bytes} bytes, aligned to {align_bytes}")
        self._align_bytes = align_bytes
        self._used: dict[int, int] = {}  # offset -> bytes, of each range given out
        self._hole_at: dict[int, int] = {}  # offset -> bytes
        self._hole_before: dict[int, int] = {}  # end -> bytes, of the same holes
        self._sizes: list[int] = []  # of holes, each once, ascending
        # Offsets of each size, in a dict: it gives the last one freed first, whose pages are warm.
        self._holes_of: dict[int, dict[int, None]] = {}
        self._free_bytes = size_bytes // align_bytes * align_bytes
        if self._free_bytes:
            self._open_hole(0, self._free_bytes)

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The most that one `allocate` can get now."""
        return self._sizes[-1] if self._sizes else 0

    def allocate(self, nbytes: int) -> int | None:
        """The offset of `nbytes`, rounded up to the alignment; None when no hole is large enough.

        Raises ValueError for fewer than 1 byte.
        """
        wanted = self._rounded(nbytes)
        at = bisect_left(self._sizes, wanted)
        if at == len(self._sizes):
            return None
        hole = self._sizes[at]
        offset = next(reversed(self._holes_of[hole]))
        self._close_hole(offset, hole)
        if hole > wanted:
            self._open_hole(offset + wanted, hole - wanted)
        self._used[offset] = wanted
        self._free_bytes -= wanted
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Give back a range as `allocate` gave it.

        Raises ValueError, and changes nothing, when it is not such a range: freed before, or another size.
        """
        given = self._rounded(nbytes)
        if self._used.get(offset) != given:
            raise ValueError(f"no range of {nbytes} bytes at {offset} is allocated: freed twice, or in part?")
        del self._used[offset]
        self._free_bytes += given
        start, end = offset, offset + given
        if (before := self._hole_before.get(start)) is not None:
            self._close_hole(start - before, before)
            start -= before
        if (after := self._hole_at.get(end)) is not None:
            self._close_hole(end, after)
            end += after
        self._open_hole(start, end - start)

    def _rounded(self, nbytes: int) -> int:
        if nbytes < 1:
            raise ValueError(f"a range of {nbytes} bytes: it must have 1 or more")
        return -(-nbytes // self._align_bytes) * self._align_bytes

    def _open_hole(self, offset: int, nbytes: int) -> None:
        self._hole_at[offset] = self._hole_before[offset + nbytes] = nbytes
        if nbytes not in self._holes_of:
            self._holes_of[nbytes] = {}
            insort(self._sizes, nbytes)
        self._holes_of[nbytes][offset] = None

    def _close_hole(self, offset: int, nbytes: int) -> None:
        del self._hole_at[offset], self._hole_before[offset + nbytes]
        offsets = self._holes_of[nbytes]
        del offsets[offset]
        if not offsets:
            del self._holes_of[nbytes]
            del self._sizes[bisect_left(self._sizes, nbytes)]
