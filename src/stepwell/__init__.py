"""Stepwell: a tiered KV cache for large-language-model inference."""

from stepwell.api import Cache, Lease, Reservation, Space, connect, open
from stepwell.types import Hit, Key, Reason

__all__ = ["Cache", "Hit", "Key", "Lease", "Reason", "Reservation", "Space", "connect", "open"]
