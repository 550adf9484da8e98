"""The measurements of `stepwell bench`: what a client of a cache server sees, in whole calls.

Copies are measured as ratios: each copy through the cache is paired with a plain one of the same sizes
between buffers of this process, and the order within a pair alternates, so that what else the machine
does hits both alike.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

import stepwell
from stepwell.cli.errors import CommandError
from stepwell.config import resolve
from stepwell.server.launch import ensure_server, stop_server

_MIB = 1 << 20
# Chunks of one prompt, as an engine stores and loads them: together in one call.
PROMPT_BYTES = 64 * _MIB
# The arena holds several prompts, so storing also evicts, as a full cache does.
ARENA_BYTES = 256 * _MIB
COPY_PAIRS = 40
WARM_UP_PAIRS = 8

LOOKUP_CHUNK_BYTES = 4096
LOOKUP_CALLS = 200
BLOCK_TOKENS = 16
# A reservation this large is answered well within a client's time-out.
_FILL_CHUNKS = 500

Buffer = npt.NDArray[np.uint8]


class CopyTimes(msgspec.Struct, frozen=True):
    """Medians of one call for `prompt_bytes`, in chunks of one size."""

    chunk_bytes: int
    prompt_bytes: int
    plain_s: float
    store_s: float
    load_s: float
    store_ratio: float  # speed of storing, as a part of the plain copies beside it
    load_ratio: float


class LookupTime(msgspec.Struct, frozen=True):
    """Median of looking one prompt up: as many of its leading chunks are held as there are at all."""

    keys: int
    held_chunks: int  # in the whole server
    lookup_s: float


def measure_copies(chunk_bytes: int, prompt_bytes: int = PROMPT_BYTES) -> CopyTimes:
    """Store and load prompts of `prompt_bytes` in chunks of `chunk_bytes`, against plain copies.

    Raises CommandError or LaunchError where the server fails on the way.
    """
    chunks = prompt_bytes // chunk_bytes
    prompts = ARENA_BYTES // prompt_bytes
    with _server(ARENA_BYTES) as cache:
        space = cache.space("bench copies", chunk_tokens=BLOCK_TOKENS, chunk_bytes=chunk_bytes)
        ours = _pieces(prompt_bytes, chunk_bytes)
        # As large as the arena, so that the processor's caches are as cold for the plain copies.
        others = [_pieces(prompt_bytes, chunk_bytes) for _ in range(prompts)]
        keys_of = [space.keys(_tokens(number, chunks)) for number in range(prompts + 1)]

        def store(number: int) -> None:
            # One prompt more than there is room for: the one that comes next was evicted last.
            with space.reserve(keys_of[number % len(keys_of)]) as new:
                _expect(len(new), chunks)
                for view, source in zip(new.values(), ours, strict=True):
                    np.copyto(np.frombuffer(view, np.uint8), source)

        def load(number: int) -> None:
            with space.load(held[number % len(held)], timeout_s=1.0) as lease:
                _expect(len(lease.views), chunks)
                for target, view in zip(ours, lease.views, strict=True):
                    np.copyto(target, np.frombuffer(view, np.uint8))

        def plain_out(number: int) -> None:
            for target, source in zip(others[number % prompts], ours, strict=True):
                np.copyto(target, source)

        def plain_in(number: int) -> None:
            for target, source in zip(ours, others[number % prompts], strict=True):
                np.copyto(target, source)

        stores, plain_stores = _paired(store, plain_out)
        held = [keys for keys in keys_of if space.lookup(keys).chunks == chunks]
        loads, plain_loads = _paired(load, plain_in)
    return CopyTimes(
        chunk_bytes=chunk_bytes,
        prompt_bytes=prompt_bytes,
        plain_s=statistics.median(plain_stores + plain_loads),
        store_s=statistics.median(stores),
        load_s=statistics.median(loads),
        store_ratio=statistics.median(plain_stores) / statistics.median(stores),
        load_ratio=statistics.median(plain_loads) / statistics.median(loads),
    )


def measure_lookups(held_chunks: int, key_counts: Sequence[int]) -> list[LookupTime]:
    """Look prompts of `key_counts` keys up where `held_chunks` chunks are held, theirs first among them.

    Raises CommandError or LaunchError where the server fails on the way.
    """
    with _server(held_chunks * LOOKUP_CHUNK_BYTES) as cache:
        space = cache.space("bench look-ups", chunk_tokens=BLOCK_TOKENS, chunk_bytes=LOOKUP_CHUNK_BYTES)
        prompt = space.keys(_tokens(0, max(key_counts)))
        _fill(space, prompt[:held_chunks])
        for number in range(1, held_chunks):
            left = held_chunks - _held_chunks(cache)
            if left <= 0:
                break
            _fill(space, space.keys(_tokens(number, min(left, 4096))))
        return [
            LookupTime(count, held_chunks, _median_lookup_s(space, prompt[:count], min(count, held_chunks)))
            for count in key_counts
        ]


def _median_lookup_s(space: stepwell.Space, keys: list[bytes], hit: int) -> float:
    times = []
    for _ in range(LOOKUP_CALLS):
        start = time.perf_counter()
        found = space.lookup(keys)
        times.append(time.perf_counter() - start)
        _expect(found.chunks, hit)
    return statistics.median(times)


@contextmanager
def _server(memory_bytes: int) -> Iterator[stepwell.Cache]:
    """A cache server of our own, in a process of its own, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder:
        socket = Path(folder) / "s.sock"
        flags = {"memory": str(memory_bytes), "socket": str(socket), "http": "off", "eviction": "lru"}
        ensure_server(resolve(flags, {}).config, os.environ)
        try:
            with closing(stepwell.connect(socket)) as cache:
                yield cache
        finally:
            stop_server(socket)


def _fill(space: stepwell.Space, keys: list[bytes]) -> None:
    # Only that they are held matters here, not their bytes.
    for end in range(_FILL_CHUNKS, len(keys) + _FILL_CHUNKS, _FILL_CHUNKS):
        with space.reserve(keys[:end]) as new:
            _expect(len(new), min(end, len(keys)) - (end - _FILL_CHUNKS))


def _held_chunks(cache: stepwell.Cache) -> int:
    tiers = cache.stats().get("tiers", {})
    return int(sum(tier["chunks"] for tier in tiers.values()))


def _tokens(prompt: int, chunks: int) -> range:
    """Tokens of a prompt that shares nothing with another."""
    first = prompt * 1_000_000
    return range(first, first + chunks * BLOCK_TOKENS)


def _pieces(total_bytes: int, piece_bytes: int) -> list[Buffer]:
    # Filled, so that every page is there before the first measurement.
    return list(np.full((total_bytes // piece_bytes, piece_bytes), 7, np.uint8))


def _paired(first: Callable[[int], None], second: Callable[[int], None]) -> tuple[list[float], list[float]]:
    first_s: list[float] = []
    second_s: list[float] = []
    for number in range(WARM_UP_PAIRS + COPY_PAIRS):
        pair = [(first, first_s), (second, second_s)]
        for work, times in pair if number % 2 else reversed(pair):
            start = time.perf_counter()
            work(number)
            times.append(time.perf_counter() - start)
    return first_s[WARM_UP_PAIRS:], second_s[WARM_UP_PAIRS:]


def _expect(found: int, wanted: int) -> None:
    """A call that gave less than it should was not the work to be measured."""
    if found != wanted:
        raise CommandError(
            f"the cache server gave {found} chunks instead of {wanted}: is the machine overloaded?"
        )
