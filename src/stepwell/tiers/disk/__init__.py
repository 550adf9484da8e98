"""The disk tier: a log of segments. `tier.py` is the whole of it, the others are its parts."""

from stepwell.tiers.disk.folder import DiskError, FolderInUse
from stepwell.tiers.disk.tier import DiskTier

__all__ = ["DiskError", "DiskTier", "FolderInUse"]
