"""`stepwell fsck`: what lies in a disk tier's folder, and whether it is whole."""

from pathlib import Path

import msgspec

from stepwell.cli.errors import CommandError
from stepwell.sizes import format_size
from stepwell.tiers.disk import DiskError
from stepwell.tiers.disk.fsck import check

_DAMAGED_SHOWN = 20


def run(folder: Path, as_json: bool) -> int:
    """Print it; 1 where a record is damaged. Raises CommandError for a folder that cannot be read."""
    if not folder.is_dir():
        raise CommandError(f"there is no folder {folder}")
    try:
        report = check(folder)
    except DiskError as error:
        raise CommandError(error.strerror or str(error)) from error
    except OSError as error:
        raise CommandError(f"cannot read {folder}: {error}") from error
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
        return 1 if report.damaged else 0
    files = f"{report.segments} segments and {report.empty_files} empty files"
    print(f"{files}, {format_size(report.file_bytes)}")
    gib = report.chunk_bytes / 2**30
    print(f"{report.records:,} chunks, {gib:.2f} GiB, in {len(report.chunks_by_space)} spaces")
    for space, chunks in sorted(report.chunks_by_space.items()):
        print(f"  space {space}: {chunks:,} chunks")
    what_then = ": the server drops them when it meets them" if report.damaged else ""
    print(f"{len(report.damaged)} damaged records{what_then}")
    for line in report.damaged[:_DAMAGED_SHOWN]:
        print(f"  {line}")
    if len(report.damaged) > _DAMAGED_SHOWN:
        print(f"  and {len(report.damaged) - _DAMAGED_SHOWN:,} more; --json lists all")
    return 1 if report.damaged else 0
