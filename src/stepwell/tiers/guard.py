"""Keeps a tier that fails or stalls out of the way, and finds out by itself when it works again.

A circuit breaker (Nygard, Release It!, 2nd edition, 2018, chapter 5): closed while all is well; open after
failures, when calls are refused at once; half open for one probe after a pause that doubles.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Sequence

from stepwell.tiers.base import Get, Put, Tier
from stepwell.tiers.wrap import Wrapper
from stepwell.types import ChunkId, Reason

logger = logging.getLogger(__name__)

STALL_S = 5.0
"""No completion for so long is a stall: a drive that works ends a batch in well under a second."""

FAILURES_MOST = 3  # calls in a row
PAUSE_FIRST_S = 1.0
PAUSE_MOST_S = 30.0
_PROBE_BYTES = 4096


class Guarded(Wrapper):
    """Refuses calls with `OUT_OF_SERVICE` while the tier below is out of service."""

    def __init__(
        self,
        tier: Tier,
        *,
        stall_s: float = STALL_S,
        pause_first_s: float = PAUSE_FIRST_S,
        pause_most_s: float = PAUSE_MOST_S,
    ) -> None:
        super().__init__(tier)
        self._stall_s = stall_s
        self._pause_first_s = pause_first_s
        self._pause_most_s = pause_most_s
        self._pause_s = pause_first_s
        self._failures = 0
        self._why = ""
        self._recovery: asyncio.Task[None] | None = None
        self._stalled = 0  # calls that have not come back

    @property
    def in_service(self) -> bool:
        return not self._why

    @property
    def health(self) -> str:
        """`ok`, or why not."""
        return self._why or "ok"

    async def start(self) -> None:
        """Write, read and delete one chunk; out of service when that does not work."""
        if (why := await self._probe()) is not None:
            self._open(why)

    async def put(self, items: Sequence[Put]) -> list[Reason | None]:
        if self._why:
            return [Reason.OUT_OF_SERVICE] * len(items)
        return await self._watched(self._tier.put(items), "writing")

    async def get(self, items: Sequence[Get]) -> list[Reason | None]:
        if self._why:
            return [Reason.OUT_OF_SERVICE] * len(items)
        return await self._watched(self._tier.get(items), "reading")

    async def close(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
        await self._tier.close()

    async def _watched(self, work: Awaitable[list[Reason | None]], what: str) -> list[Reason | None]:
        call = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({call}, timeout=self._stall_s)
        if done:
            outcomes = call.result()
            if Reason.OUT_OF_SERVICE not in outcomes:
                self._failures = 0
                return outcomes
            self._failures += 1
            if self._failures >= FAILURES_MOST:
                self._open(f"{what} failed {self._failures} times in a row")
            return outcomes
        self._open(f"{what} has not ended after {self._stall_s:g} s")
        # Whoever asked keeps its buffers until this has landed: they are not free before.
        self._stalled += 1
        outcomes = await call
        self._stalled -= 1
        return outcomes

    def _open(self, why: str) -> None:
        if self._why:
            return
        self._why = why
        logger.warning("the %s tier is out of service (%s): tried again in the background", self.name, why)
        self._recovery = asyncio.ensure_future(self._recover())

    async def _recover(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, self._pause_most_s)
            if self._stalled:
                continue
            why = await self._probe()
            if why is None:
                break
            self._why = why
        self._why = ""
        self._failures = 0
        self._pause_s = self._pause_first_s
        logger.info("the %s tier is in service again", self.name)

    async def _probe(self) -> str | None:
        chunk = _probe_chunk()
        data = hashlib.shake_128(chunk).digest(_PROBE_BYTES)
        into = bytearray(_PROBE_BYTES)
        try:
            async with asyncio.timeout(self._stall_s):
                (outcome,) = await self._tier.put([Put(chunk, memoryview(data))])
                if outcome is Reason.NO_ROOM:
                    return None  # full, and answers
                if outcome is not None:
                    return f"a trial chunk could not be written ({outcome})"
                (outcome,) = await self._tier.get([Get(chunk, memoryview(into))])
                await self._tier.delete([chunk])
        except TimeoutError:
            return f"a trial chunk took more than {self._stall_s:g} s"
        if outcome is not None or into != data:
            return f"a trial chunk could not be read ({outcome or 'other bytes'})"
        return None


def _probe_chunk() -> ChunkId:
    return hashlib.shake_128(b"stepwell probe").digest(48)
