"""Eviction, one policy a file."""

from stepwell.policy.evict.base import Evictor
from stepwell.policy.evict.fifo import Fifo
from stepwell.policy.evict.lru import Lru
from stepwell.policy.evict.s3fifo import S3Fifo


def make_evictor(name: str) -> Evictor:
    """A new, empty policy by its name in the configuration. Raises ValueError for an unknown name."""
    match name:
        case "lru":
            return Lru()
        case "s3fifo":
            return S3Fifo()
        case "fifo":
            return Fifo()
        case _:
            raise ValueError(f"unknown eviction policy {name!r}: use lru, s3fifo or fifo")
