"""What passes between the two halves of an engine connector."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CopyJob:
    """Blocks to copy between the arena and the engine's pages, the same for every rank.

    `offsets` are those of rank 0's bytes of each block; a rank adds its own stripe's distance.
    """

    number: int  # lease or reservation
    server_id: str
    offsets: list[int]
    blocks: list[int]


@dataclass(frozen=True)
class StepJobs:
    """What the workers do around one forward pass: loads before it, compares and stores after it."""

    loads: list[CopyJob] = field(default_factory=list)
    stores: list[CopyJob] = field(default_factory=list)
    compares: list[CopyJob] = field(default_factory=list)  # pages just computed with what was stored


@dataclass
class Done:
    """Jobs that workers have finished, by how many ranks; which of the stores some rank could not do."""

    loads: Counter[int] = field(default_factory=Counter)
    stores: Counter[int] = field(default_factory=Counter)
    failed_stores: set[int] = field(default_factory=set)
    compares: Counter[int] = field(default_factory=Counter)
    differences: dict[int, float] = field(default_factory=dict)  # the largest of a compare

    def compared(self, number: int, difference: float) -> None:
        """One rank has compared."""
        self.compares[number] += 1
        self.differences[number] = max(difference, self.differences.get(number, 0.0))

    def add(self, other: "Done") -> "Done":
        """What another rank, or a later step, has finished too."""
        self.loads.update(other.loads)
        self.stores.update(other.stores)
        self.failed_stores |= other.failed_stores
        self.compares.update(other.compares)
        for number, difference in other.differences.items():
            self.differences[number] = max(difference, self.differences.get(number, 0.0))
        return self

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores or self.failed_stores or self.compares)
