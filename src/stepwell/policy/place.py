"""How much of memory may be bound up with moving chunks to and from slower tiers."""

UNWRITTEN_SHARE = 0.5
"""Of memory, at most so much waits to be written down. A longer queue would only wait until its chunks are
evicted; what does not fit is not written, and says so."""

PREFETCHED_SHARE = 0.25
"""Of memory, at most so much is on its way up for requests that are not at the head of their queue: what
comes up first would else be evicted by what comes after, before it is used."""
