"""A trace file as numbered lines: plain, gzip or zstd, from a path or standard input."""

import gzip
import importlib
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from stepwell.replay.traces.record import NumberedLine
from stepwell.replay.traces.row import TraceError

STDIN = Path("-")
LINE_BYTES_MOST = 1 << 29  # no request is this long: a file of another kind, read as one line
_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"


@contextmanager
def open_trace(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a trace, decompressed by what the file begins with (its name does not matter).

    Raises TraceError when it cannot be opened, or is damaged or cut short, where it is read.
    """
    try:
        with _raw(path) as raw:
            start = raw.peek(len(_ZSTD))[: len(_ZSTD)]
            if start.startswith(_GZIP):
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield cast(IO[bytes], unpacked)
            elif start == _ZSTD:
                with _zstd(path, raw) as unpacked_zstd:
                    yield unpacked_zstd
            else:
                yield raw
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path}: the compressed file is damaged or cut short: {error}") from error
    except OSError as error:  # gzip's BadGzipFile is one
        raise TraceError(f"{path}: cannot be read: {error}") from error


def numbered_lines(path: Path, stream: IO[bytes]) -> Iterator[NumberedLine]:
    """Each line that is not blank, with its number from 1, without BOM and line end.

    Lines end at LF alone: a U+2028 inside a string is text. Raises TraceError for an endless line.
    """
    number = 0
    while line := stream.readline(LINE_BYTES_MOST + 1):
        number += 1
        if len(line) > LINE_BYTES_MOST:
            raise TraceError(f"{path}:{number}: the line is longer than {LINE_BYTES_MOST >> 20} MiB")
        if number == 1:
            line = line.removeprefix(_BOM)
        line = line.strip(b" \t\r\n")
        if line:
            yield number, line


@contextmanager
def _raw(path: Path) -> Iterator[io.BufferedReader]:
    if path == STDIN:
        yield cast(io.BufferedReader, sys.stdin.buffer)
        return
    with path.open("rb") as file:
        yield file


def _zstd(path: Path, raw: IO[bytes]) -> IO[bytes]:
    # In the standard library from Python 3.14 on; the same module as a package before.
    for name in ("compression.zstd", "backports.zstd"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        return cast(IO[bytes], _ZstdErrors(module.ZstdFile(raw), module.ZstdError))
    raise TraceError(f"{path}: reading zstd needs a package here: pip install 'stepwell[replay]'")


class _ZstdErrors(io.RawIOBase):
    """A zstd file whose own kind of error is an EOFError, as that of gzip is."""

    def __init__(self, file: IO[bytes], error: type[Exception]) -> None:
        self._file = file
        self._error = error

    def readline(self, size: int | None = -1, /) -> bytes:
        try:
            return self._file.readline(-1 if size is None else size)
        except self._error as error:
            raise EOFError(str(error)) from error
