"""One request on its way through the simulation."""

from collections.abc import Sequence

from stepwell.policy.index import Entry
from stepwell.replay.sim.cache import Coming
from stepwell.replay.traces.row import Row
from stepwell.types import ChunkId


class Job:
    """Changed by its engine and the simulation as it goes."""

    __slots__ = (
        "arrival_s",
        "coming",
        "computed_tokens",
        "end_s",
        "entry",
        "first_token_s",
        "gpu_blocks",
        "left_tokens",
        "memory_blocks",
        "number",
        "output_tokens",
        "private_blocks",
        "prompt_tokens",
        "run",
        "slow_blocks",
    )

    def __init__(self, number: int, row: Row, run: Sequence[ChunkId], block_tokens: int) -> None:
        self.number = number  # in order of arrival
        self.arrival_s = row.arrival_s
        self.output_tokens = max(1, row.output_tokens)  # the first comes with the prompt
        self.run = run
        self.prompt_tokens = row.input_tokens
        self.computed_tokens = row.input_tokens  # less what is loaded, once that is known
        self.left_tokens = 0  # of these, not computed yet
        # Blocks of its own in GPU memory: the output, and a prompt's tail that fills no block.
        tail_tokens = max(0, row.input_tokens - len(run) * block_tokens)
        self.private_blocks = -(-(tail_tokens + self.output_tokens) // block_tokens)
        self.coming: Coming | None = None
        self.gpu_blocks = 0  # hits, by where they came from
        self.memory_blocks = 0
        self.slow_blocks: dict[str, int] = {}
        self.entry: Entry | None = None  # the pin of its run in the GPU's index
        self.first_token_s = 0.0
        self.end_s = 0.0
