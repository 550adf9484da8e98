"""Eviction, one policy a file."""
