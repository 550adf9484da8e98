"""Synthetic chunks whose bytes derive from their name, so that any wrong byte shows."""

import hashlib


def chunk_id(number: int, space: int = 0) -> bytes:
    """48 bytes, as `space id + key`."""
    return hashlib.sha256(f"space {space}".encode()).digest()[:16] + key(number)


def key(name: object) -> bytes:
    """32 bytes that look like any other key."""
    return hashlib.sha256(repr(name).encode()).digest()


def content(name: bytes, nbytes: int) -> bytes:
    """What the chunk of this key (or id) holds."""
    return hashlib.shake_128(name).digest(nbytes)
