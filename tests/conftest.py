"""Fixtures that several test folders share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from support.server import ServerProcess, running_server

# No deadline an example: the machine that runs this may be busy with something else.
settings.register_profile("stepwell", deadline=None)
settings.load_profile("stepwell")


def pytest_configure(config: pytest.Config) -> None:
    # A thread of ours that dies is a failure, whatever the test looked at.
    config.addinivalue_line("filterwarnings", "error::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="sw-") as name:
        yield Path(name)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """A real cache server of 1 MiB."""
    with running_server() as server:
        yield server
