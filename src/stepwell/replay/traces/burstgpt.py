"""BurstGPT's traces: when, how many tokens in and out; nothing of what prompts share.

Columns Timestamp (seconds), Model, "Request tokens", "Response tokens" (0: the request failed), and others.
Source: Wang et al., "BurstGPT", KDD 2025, and its published traces.
"""

from collections.abc import Iterable, Iterator

from stepwell.replay.traces.record import BadRecord, Found, NumberedLine, Record
from stepwell.replay.traces.table import count, seconds, table_rows

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read(lines: Iterable[NumberedLine], block_tokens: int) -> Iterator[Found]:
    """A `Reader`."""
    for row in table_rows(lines, COLUMNS):
        if isinstance(row, BadRecord):
            yield row
            continue
        number, cells = row
        time, request, response = (cells[column] for column in COLUMNS)
        try:
            record = Record(
                number,
                seconds(number, "Timestamp", time),
                count(number, "Request tokens", request),
                count(number, "Response tokens", response),
                "",
                "",
                (),
            )
        except BadRecord as error:
            yield error
            continue
        yield record
