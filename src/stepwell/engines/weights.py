"""Digests of model and adapter files by content, so that files replaced in place are another model.

Hashing all of a large model takes a while, so digests are kept in the user's cache folder by path, size,
inode and both times of each file; and a file whose name is its digest already (as the hub's cache names
them) is not read at all.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import xxhash

from stepwell.layout import fingerprint

_READ_BYTES = 16 << 20
_CONTENT_NAME = re.compile(r"[0-9a-f]{64}")
# A file that changed a moment ago may change again without a new time in its inode: some file systems
# count whole seconds. Its digest is not remembered.
_CLOCK_TICK_NS = 1_000_000_000


class FileForm(msgspec.Struct, frozen=True):
    """What changes whenever a file's content is replaced by ordinary means."""

    size_bytes: int
    inode: int
    modified_ns: int
    changed_ns: int


class _Known(msgspec.Struct, frozen=True):
    form: FileForm
    digest: str


def file_form(path: Path) -> FileForm:
    """Raises OSError."""
    found = path.stat()
    return FileForm(found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


def named_by_content(path: Path) -> bool:
    """Whether the file's real name is a SHA-256, as in the hub's cache: then it cannot change in place."""
    return _CONTENT_NAME.fullmatch(path.resolve().name) is not None


def digest_files(paths: Iterable[Path], kept: Path | None) -> bytes:
    """One digest over the files' names and contents. `kept` is the file that remembers digests, if any.

    Raises OSError when a file cannot be read.
    """
    known = {} if kept is None else _read(kept)
    fresh: dict[str, _Known] = {}
    parts: list[tuple[str, str]] = []
    for path in sorted(paths):
        real = path.resolve()
        if named_by_content(path):
            parts.append((path.name, real.name))
            continue
        now_ns, form = time.time_ns(), file_form(real)
        entry = known.get(str(real))
        if entry is None or entry.form != form:
            entry = _Known(form, _digest(real))
            if now_ns - form.changed_ns > _CLOCK_TICK_NS:
                fresh[str(real)] = entry
        parts.append((path.name, entry.digest))
    if fresh and kept is not None:
        _write(kept, {**known, **fresh})
    return fingerprint(("files", parts))


def default_kept() -> Path | None:
    """Where digests are remembered unless told otherwise; nowhere for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "stepwell" / "weights.json"
    except RuntimeError:
        return None


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _read(kept: Path) -> dict[str, _Known]:
    try:
        return msgspec.json.decode(kept.read_bytes(), type=dict[str, _Known])
    except (OSError, msgspec.MsgspecError):
        return {}  # absent, of another version or damaged: everything is read again


def _write(kept: Path, known: Mapping[str, _Known]) -> None:
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        data = msgspec.json.encode(known)
        fd, name = tempfile.mkstemp(dir=kept.parent)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.replace(name, kept)
        except BaseException:
            os.unlink(name)
            raise
    except (OSError, UnicodeEncodeError):
        # A read-only home, or a path that is no text: costs another reading at the next start, nothing else.
        pass
