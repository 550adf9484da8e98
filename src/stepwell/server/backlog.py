"""Work that waits in line for a slower tier, done some pieces at a time beside everything else."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

ItemT = TypeVar("ItemT")


class Backlog(Generic[ItemT]):
    """Items in the order they came."""

    def __init__(self) -> None:
        self.items: deque[ItemT] = deque()
        self._any = asyncio.Event()

    def __len__(self) -> int:
        return len(self.items)

    def add(self, item: ItemT) -> None:
        self.items.append(item)
        self._any.set()

    async def work(self, at_once: int, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Until cancelled; pieces under way end first, for they use the arena.

        `begin` takes what it wants from `items`, which is not empty then, and gives the work to do.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(self._work(begin))

    async def _work(self, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            while not self.items:
                self._any.clear()
                await self._any.wait()
            piece = asyncio.ensure_future(begin())
            try:
                await asyncio.shield(piece)
            except asyncio.CancelledError:
                await piece
                raise
