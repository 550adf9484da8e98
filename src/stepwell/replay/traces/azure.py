"""Azure's LLM inference traces: when, how many tokens in and out; nothing of what prompts share.

Columns TIMESTAMP (date and time), ContextTokens, GeneratedTokens. Source: Azure public dataset, LLM
inference traces of 2023 (Patel et al., "Splitwise", ISCA 2024) and 2024.
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from stepwell.replay.traces.record import BadRecord, Found, NumberedLine, Record
from stepwell.replay.traces.table import count, table_rows

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(lines: Iterable[NumberedLine], block_tokens: int) -> Iterator[Found]:
    """A `Reader`. A time without a zone is taken as UTC."""
    for row in table_rows(lines, COLUMNS):
        if isinstance(row, BadRecord):
            yield row
            continue
        number, cells = row
        time, context, generated = (cells[column] for column in COLUMNS)
        try:
            record = Record(
                number,
                _time_s(number, time),
                count(number, "ContextTokens", context),
                count(number, "GeneratedTokens", generated),
                "",
                "",
                (),
            )
        except BadRecord as error:
            yield error
            continue
        yield record


def _time_s(number: int, text: str) -> float:
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadRecord(number, f"TIMESTAMP is {text!r}, not a date and time") from error
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
