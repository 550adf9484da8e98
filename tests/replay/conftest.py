"""The recorded traces, read once for all tests here."""

import pytest
from replay_kit import recorded

from stepwell.replay.traces.load import load
from stepwell.replay.traces.row import Trace


@pytest.fixture(scope="session")
def conversation() -> Trace:
    """Mooncake's conversation trace: 12,031 requests."""
    return load([recorded("mooncake_conversation.jsonl")])


@pytest.fixture(scope="session")
def agents() -> Trace:
    """WEKA's agent sessions."""
    return load(sorted(recorded("weka").glob("*.json")))
