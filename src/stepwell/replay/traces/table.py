"""CSV traces without prefixes: rows by column name, and numbers as people write them in tables."""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from stepwell.replay.traces.record import BadRecord, NumberedLine

_NUMBER = re.compile(rb"\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)


def table_rows(
    lines: Iterable[NumberedLine], columns: Sequence[str]
) -> Iterator[tuple[int, Mapping[str, str]] | BadRecord]:
    """Each row's `columns`; the first line names them, in any order and among others."""
    names: list[str] | None = None
    for number, text in lines:
        try:
            # One line at a time: a quote that never closes must not swallow the rest of the file.
            cells = next(csv.reader([text.decode()], strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            yield BadRecord(number, f"not a line of CSV: {error}")
            continue
        if names is None:
            names = [cell.strip() for cell in cells]
            missing = [column for column in columns if column not in names]
            if missing:
                yield BadRecord(number, f"the heading has no column {missing[0]!r} but {', '.join(names)}")
                return
        elif len(cells) != len(names):
            yield BadRecord(number, f"{len(cells)} cells under {len(names)} columns")
        else:
            row = dict(zip(names, cells, strict=True))
            yield number, {column: row[column].strip() for column in columns}


def count(number: int, column: str, text: str) -> int:
    """A whole number of 0 or more. Raises BadRecord."""
    if not (text.isascii() and text.isdecimal() and len(text) < 13):
        raise BadRecord(number, f"{column} is {text!r}, not a whole number of tokens")
    return int(text)


def seconds(number: int, column: str, text: str) -> float:
    """A finite number of 0 or more. Raises BadRecord, also for "nan", "inf" and "1e999"."""
    value = float(text) if _NUMBER.fullmatch(text.encode()) else float("nan")
    if not 0 <= value < float("inf"):
        raise BadRecord(number, f"{column} is {text!r}, not a time in seconds")
    return value
