"""The policies and the index again, slow and obvious: plain lists, searched from the old end.

Chunks of the tests are named by their path: the parent of b"abc" is b"ab".
"""

from collections.abc import Callable, Sequence


def run_to(chunk: bytes) -> list[bytes]:
    """All chunks from the first one down to `chunk`, first chunk first."""
    return [chunk[: length + 1] for length in range(len(chunk))]


class NaiveLru:
    def __init__(self) -> None:
        self.order: list[bytes] = []  # least recently used first

    def insert(self, run: Sequence[bytes]) -> None:
        """The tier now holds the last chunk of the run, and held those before it."""
        self.order.append(run[-1])
        self.use(run)

    def use(self, run: Sequence[bytes]) -> None:
        for chunk in reversed(run):
            self.order.remove(chunk)
            self.order.append(chunk)

    def victim(self, may_evict: Callable[[bytes], bool]) -> bytes | None:
        return next((chunk for chunk in self.order if may_evict(chunk)), None)

    def remove(self, chunk: bytes) -> None:
        self.order.remove(chunk)


class NaiveFifo(NaiveLru):
    def use(self, run: Sequence[bytes]) -> None:
        pass


class NaiveS3Fifo:
    def __init__(self) -> None:
        self.small: list[bytes] = []
        self.main: list[bytes] = []
        self.ghosts: list[bytes] = []
        self.uses: dict[bytes, int] = {}

    def insert(self, run: Sequence[bytes]) -> None:
        chunk = run[-1]
        if chunk in self.ghosts:
            self.ghosts.remove(chunk)
            self.main.append(chunk)
        else:
            self.small.append(chunk)
        self.uses[chunk] = 0

    def use(self, run: Sequence[bytes]) -> None:
        for chunk in run:
            self.uses[chunk] = min(3, self.uses[chunk] + 1)

    def victim(self, may_evict: Callable[[bytes], bool]) -> bytes | None:
        small = [chunk for chunk in self.small if may_evict(chunk)]
        main = [chunk for chunk in self.main if may_evict(chunk)]
        if small and (not main or len(self.small) >= 0.1 * len(self.uses)):
            chunk = small[0]
            if self.uses[chunk] < 2:
                self.ghosts.append(chunk)
                while len(self.ghosts) > 0.9 * len(self.uses):
                    self.ghosts.pop(0)
                return chunk
            self.small.remove(chunk)
            self.main.append(chunk)
            self.uses[chunk] = 0
            return self.victim(may_evict)
        if not main:
            return None
        chunk = main[0]
        if self.uses[chunk] == 0:
            return chunk
        self.uses[chunk] -= 1
        self.main.remove(chunk)
        self.main.append(chunk)
        return self.victim(may_evict)

    def remove(self, chunk: bytes) -> None:
        del self.uses[chunk]
        (self.small if chunk in self.small else self.main).remove(chunk)


NAIVE = {"lru": NaiveLru, "fifo": NaiveFifo, "s3fifo": NaiveS3Fifo}
