"""The levels of the cache, each behind the one contract of `base.py`."""
