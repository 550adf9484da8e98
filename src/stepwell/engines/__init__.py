"""Adapters between inference engines and the cache."""
