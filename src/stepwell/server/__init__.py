"""The cache server: a process of its own that owns the index, the arena and all slower tiers."""
