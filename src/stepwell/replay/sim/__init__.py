"""Engines and tiers under a virtual clock, driving the server's own policies."""
