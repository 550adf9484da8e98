"""Which chunks one tier holds, and which of them may go: a forest over prefixes."""

from collections.abc import Iterator, Sequence

from stepwell.policy.evict.base import Evictor
from stepwell.types import ChunkId


class Entry:
    """One chunk that the tier holds, or held (`held`): who pins it keeps it after its removal.

    Its fields are the index's to change, but `place`.
    """

    __slots__ = (
        "_first_child",
        "_next_sibling",
        "_previous_sibling",
        "children",
        "chunk",
        "depth",
        "held",
        "parent",
        "pins",
        "place",
        "used",
    )

    def __init__(self, chunk: ChunkId, parent: "Entry | None", place: int) -> None:
        self.chunk = chunk
        self.parent = parent  # the chunk before it in its prompt; None for a first one
        self.depth: int = 0 if parent is None else parent.depth + 1  # chunks before it, as far as we know
        self.children = 0  # held chunks whose parent this is
        self.pins = 0  # while there are any, it is never evicted
        self.held = True  # the index still finds it
        self.place = place  # where the tier has its bytes; only the tier knows what it means
        # A run that ended here, or at a descendant that has gone, was used since this was inserted. So
        # a chunk that is evicted knows whether anybody used it, and a use costs the same at any length.
        self.used = False
        # A linked list through the children, because a set for each parent would be most of the memory.
        self._first_child: Entry | None = None
        self._next_sibling: Entry | None = None
        self._previous_sibling: Entry | None = None

    def _adopt(self, child: "Entry") -> None:
        self.children += 1
        child._next_sibling = self._first_child
        if self._first_child is not None:
            self._first_child._previous_sibling = child
        self._first_child = child

    def _let_go(self, child: "Entry") -> None:
        self.children -= 1
        if child._previous_sibling is None:
            self._first_child = child._next_sibling
        else:
            child._previous_sibling._next_sibling = child._next_sibling
        if child._next_sibling is not None:
            child._next_sibling._previous_sibling = child._previous_sibling
        child._next_sibling = child._previous_sibling = None


class Index:
    """The chunks of one tier. A chunk is held only if its parent is held.

    So a lookup can bisect, and only a chunk without held children (and without a pin) may be evicted.
    Every call is O(1), or O(log n) where the evictor is; `remove` is that for each chunk it removes.
    """

    def __init__(self, evictor: Evictor) -> None:
        self._evictor = evictor
        self._entries: dict[ChunkId, Entry] = {}
        self._pinned_chunks = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._entries

    def __iter__(self) -> Iterator[ChunkId]:
        """All held chunks, a parent before its children."""
        return iter(self._entries)

    @property
    def pinned_chunks(self) -> int:
        """Chunks with a pin, those that were removed under it included."""
        return self._pinned_chunks

    def get(self, chunk: ChunkId) -> Entry | None:
        return self._entries.get(chunk)

    def held_run(self, run: Sequence[ChunkId], depth: int = 0) -> int:
        """How many leading chunks of a prompt are held; `depth` is how many come before the first of `run`.

        Looks at log2(len(run)) of them, for a chunk at its right depth has all its ancestors. One that was
        stored without its parent has depth 0 wherever it belongs: such are looked at one by one.
        """
        low, high = 0, len(run)
        while low < high:
            middle = (low + high) // 2
            entry = self._entries.get(run[middle])
            if entry is not None and entry.depth == depth + middle:
                low = middle + 1
            else:
                high = middle
        while low < len(run) and run[low] in self._entries:
            low += 1
        return low

    def insert(self, chunk: ChunkId, parent: ChunkId | None, place: int) -> Entry:
        """Hold a chunk from now on; it counts as a use of the run up to it.

        Raises ValueError when it is held already, or its parent is given and not held.
        """
        if chunk in self._entries:
            raise ValueError(f"chunk {chunk.hex()} is held already")
        before = None
        if parent is not None:
            before = self._entries.get(parent)
            if before is None:
                raise ValueError(f"chunk {chunk.hex()}: its parent {parent.hex()} is not held")
        entry = self._entries[chunk] = Entry(chunk, before, place)
        if before is not None:
            before._adopt(entry)
        self._evictor.insert(chunk, parent)
        self._evictor.enable(chunk)
        return entry

    def pin(self, entry: Entry) -> None:
        """Keep a chunk from eviction until a matching `unpin`. Raises ValueError when it is not held."""
        if not entry.held:
            raise ValueError(f"chunk {entry.chunk.hex()} is not held and cannot be pinned")
        entry.pins += 1
        if entry.pins == 1:
            self._pinned_chunks += 1

    def unpin(self, entry: Entry) -> None:
        """Take one pin back, of a removed chunk too. Raises ValueError when it has none."""
        if entry.pins == 0:
            raise ValueError(f"chunk {entry.chunk.hex()} is not pinned")
        entry.pins -= 1
        if entry.pins == 0:
            self._pinned_chunks -= 1
            self._enable_if_free(entry)

    def use(self, run: Sequence[ChunkId]) -> None:
        """A request used this run of held chunks. Raises ValueError when it meets one that is not held."""
        end = len(run)
        while end > 0:
            entry = self._entries.get(run[end - 1])
            if entry is None:
                raise ValueError(f"chunk {run[end - 1].hex()} is not held and cannot be used")
            # All of the run, unless a chunk in it was stored without its parent: then the last part of it
            # first, since the policy follows parents.
            start = max(0, end - entry.depth - 1)
            whole = start == 0 and end == len(run)
            self._evictor.use(run if whole else [run[at] for at in range(start, end)])
            entry.used = True
            end = start

    def evict(self) -> Entry | None:
        """Remove the chunk that the policy picks and return it; None when a pin keeps every one."""
        victim = self._evictor.victim(self._may_evict)
        if victim is None:
            return None
        entry = self._entries[victim]
        self._detach(entry)
        self._enable_if_free(entry.parent)
        return entry

    def remove(self, chunk: ChunkId) -> list[Entry]:
        """Remove a chunk and all its descendants, pinned or not, and return them, a child before its parent.

        Nothing, when the chunk is not held. Who pins one of them still has to unpin it.
        """
        top = self._entries.get(chunk)
        if top is None:
            return []
        doomed = [top]
        for entry in doomed:  # grows while it is walked: no recursion, for chains of any length
            child = entry._first_child
            while child is not None:
                doomed.append(child)
                child = child._next_sibling
        doomed.reverse()
        for entry in doomed:
            self._detach(entry)
        self._enable_if_free(top.parent)
        return doomed

    def _detach(self, entry: Entry) -> None:
        del self._entries[entry.chunk]
        entry.held = False
        if entry.parent is not None:
            entry.parent._let_go(entry)
            entry.parent.used |= entry.used
        self._evictor.remove(entry.chunk)

    def _enable_if_free(self, entry: Entry | None) -> None:
        if entry is not None and self._free(entry):
            self._evictor.enable(entry.chunk)

    def _may_evict(self, chunk: ChunkId) -> bool:
        return self._free(self._entries[chunk])

    @staticmethod
    def _free(entry: Entry) -> bool:
        return entry.held and entry.children == 0 and entry.pins == 0
