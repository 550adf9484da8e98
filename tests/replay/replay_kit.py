"""Recorded traces, where they lie; tests skip visibly without them."""

import os
from pathlib import Path

import pytest

TRACES = Path(os.environ.get("STEPWELL_TRACES", Path(__file__).parents[3] / "shared" / "traces"))


def recorded(name: str) -> Path:
    """A file or folder of the traces; skips the test where it is missing."""
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"no {path}: set STEPWELL_TRACES to a folder with the published traces")
    return path
