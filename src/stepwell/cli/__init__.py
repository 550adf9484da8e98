"""The command line, `stepwell`."""

from stepwell.cli.app import main

__all__ = ["main"]
