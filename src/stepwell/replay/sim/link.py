"""A shared way to bytes: first come, first served, at one bandwidth."""


class Link:
    """When transfers end. Whoever asks waits for all before: that is how congestion appears."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s = 0.0
        self.busy_s = 0.0
        self.moved_bytes = 0.0

    def transfer(self, now_s: float, nbytes: float) -> float:
        """The time at which a transfer that is asked for now has arrived.

        A latency passes beside other transfers: it delays this one, and does not hold the link.
        """
        needed_s = nbytes / self._bytes_per_s
        self._free_s = max(self._free_s, now_s) + needed_s
        self.busy_s += needed_s
        self.moved_bytes += nbytes
        return self._free_s + self._latency_s

    def backlog_bytes(self, now_s: float) -> float:
        """Asked for and not moved yet."""
        return max(0.0, self._free_s - now_s) * self._bytes_per_s
