"""Ids of blocks, as files give them, into numbers of prefixes."""

from collections.abc import Hashable, Sequence

from stepwell.replay.traces.row import Block


class Prefixes:
    """Numbers each different prefix 0, 1, 2, ... as it first appears.

    A block is a path of ids, not an id: a trace whose ids are of a block's tokens alone (not of all before
    them as well) would otherwise share blocks that no cache can share.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Block, int], Block] = {}
        self._roots: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def path(self, scope: Hashable, hash_ids: Sequence[int]) -> tuple[Block, ...]:
        """The prefixes of one prompt. Equal ids in different scopes are different blocks."""
        numbers = self._numbers
        parent = self._roots.setdefault(scope, -1 - len(self._roots))
        path = []
        for hash_id in hash_ids:
            parent = numbers.setdefault((parent, hash_id), len(numbers))
            path.append(parent)
        return tuple(path)
