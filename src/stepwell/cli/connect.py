"""The connection of a command to a running cache server."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import stepwell
from stepwell.cli.errors import CommandError


@contextmanager
def connect(socket: Path) -> Iterator[stepwell.Cache]:
    """The cache behind `socket`. Raises CommandError where no server answers, or it goes away."""
    try:
        with closing(stepwell.connect(socket)) as cache:
            yield cache
    except OSError as error:
        raise CommandError(
            f"no cache server answers on {socket} ({error.strerror or error}); start one with "
            "`stepwell serve`, or name its socket with --socket"
        ) from error
