"""The report: what tiered caching gives on this traffic, and where each claim about it flips."""
