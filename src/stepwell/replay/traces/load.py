"""Files of any format into one trace."""

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path

import msgspec

from stepwell.replay.traces import azure, bailian, burstgpt, mooncake, native, openai, weka
from stepwell.replay.traces.clock import mixed_units, out_of_order
from stepwell.replay.traces.detect import BLOCK_TOKENS, Format, detect
from stepwell.replay.traces.lines import numbered_lines, open_trace
from stepwell.replay.traces.prefixes import Prefixes
from stepwell.replay.traces.record import BadRecord, Found, NumberedLine, Reader, Record
from stepwell.replay.traces.row import Row, Trace, TraceError

NO_PREFIXES = "the format tells nothing of what prompts share: reuse cannot be studied with this trace"


class LoadOptions(msgspec.Struct, frozen=True):
    """How to read what the files do not say themselves."""

    format: Format | None = None  # None: told from each file's first line
    block_tokens: int | None = None  # None: the format's own
    skip_bad: bool = False  # count bad records instead of refusing the file
    shared_ids: bool = False  # the files are parts of one trace: an id means the same in all
    tokenizer: Path | None = None  # a tokenizer.json, for request logs


class _File(msgspec.Struct, frozen=True):
    """What one file gave."""

    path: Path
    format: Format | None  # None: the file is empty
    block_tokens: int | None
    records: list[Record]
    skipped_rows: int


def load(paths: Sequence[Path], options: LoadOptions | None = None) -> Trace:
    """All files as one trace, by arrival; their clocks are taken to be the same one.

    Raises TraceError naming file and line for anything that is not right, but for what `options` lets pass
    and the trace's `warnings` then tell of.
    """
    options = options or LoadOptions()
    # Request logs in several files must be hashed with one salt, else they share nothing.
    readers = _readers(options.tokenizer)
    files = [_read_file(path, readers, options) for path in paths]
    warnings = []
    for file in files:
        if file.skipped_rows:
            warnings.append(f"{file.path}: {file.skipped_rows} bad records were skipped")
        mixed = mixed_units(file.records)
        if mixed is not None:
            raise TraceError(
                f"{file.path}:{mixed[1].where}: its time is a thousand times that of line {mixed[0].where}, "
                f"or a thousandth: seconds and milliseconds are mixed"
            )
        unsorted = out_of_order(file.records)
        if unsorted:
            warnings.append(f"{file.path}: {unsorted} records stand after a later one; they were sorted")
        if not file.records:
            warnings.append(f"{file.path}: no requests")
    block_tokens = _common_block_tokens([file for file in files if file.format is not None])
    if block_tokens is None and any(file.records for file in files):
        warnings.append(NO_PREFIXES)
    rows, blocks = _rows(files, options.shared_ids)
    return Trace(
        rows=rows,
        block_tokens=block_tokens,
        blocks=blocks,
        sources=tuple(f"{file.path} ({file.format or 'empty'})" for file in files),
        skipped_rows=sum(file.skipped_rows for file in files),
        warnings=tuple(warnings),
    )


def _readers(tokenizer: Path | None) -> dict[Format, Reader]:
    readers: dict[Format, Reader] = {
        Format.STEPWELL: native.read,
        Format.MOONCAKE: mooncake.read,
        Format.BAILIAN: bailian.read,
        Format.WEKA: weka.read,
        Format.AZURE: azure.read,
        Format.BURSTGPT: burstgpt.read,
    }
    if tokenizer is not None:
        readers[Format.OPENAI] = openai.reader(openai.load_tokenizer(tokenizer))
    return readers


def _read_file(path: Path, readers: dict[Format, Reader], options: LoadOptions) -> _File:
    with open_trace(path) as stream:
        lines = numbered_lines(path, stream)
        first = next(lines, None)
        if first is None:
            return _File(path, None, None, [], 0)
        format = options.format or detect(first[1])
        if format is None:
            raise TraceError(
                f"{path}:{first[0]}: not a trace of a known format ({', '.join(Format)}); "
                f"where it is one, name it with --format"
            )
        if format not in readers:
            raise TraceError(f"{path}: a request log; say --tokenizer with the model's tokenizer.json")
        try:
            block_tokens = _block_tokens(format, first, options)
        except BadRecord as error:
            raise TraceError(f"{path}:{error.where}: {error.why}") from error
        found = readers[format](chain([first], lines), block_tokens or 0)
        records, skipped_rows = _usable(path, found, options.skip_bad)
        return _File(path, format, block_tokens, records, skipped_rows)


def _block_tokens(format: Format, first: NumberedLine, options: LoadOptions) -> int | None:
    if format is Format.STEPWELL:
        own = native.read_heading(*first).block_tokens
        if options.block_tokens is not None and options.block_tokens != own:
            raise BadRecord(first[0], f"the file says block_tokens {own}, not {options.block_tokens}")
        return own
    if format not in BLOCK_TOKENS:
        return None
    return options.block_tokens or BLOCK_TOKENS[format]


def _usable(path: Path, found: Iterator[Found], skip_bad: bool) -> tuple[list[Record], int]:
    records = []
    skipped = 0
    for each in found:
        if isinstance(each, Record):
            records.append(each)
        elif skip_bad:
            skipped += 1
        else:
            raise TraceError(f"{path}:{each.where}: {each.why}")
    if skipped and not records:
        raise TraceError(f"{path}: none of its {skipped} records can be used")
    return records, skipped


def _common_block_tokens(files: Sequence[_File]) -> int | None:
    for file in files:
        if file.block_tokens != files[0].block_tokens:
            raise TraceError(
                f"{files[0].path} has blocks of {files[0].block_tokens or 'no'} tokens and {file.path} of "
                f"{file.block_tokens or 'no'}: replay them apart"
            )
    return files[0].block_tokens if files else None


def _rows(files: Sequence[_File], shared_ids: bool) -> tuple[tuple[Row, ...], int]:
    """Rows by arrival; equal times stay in the order of the files. And the number of different blocks."""
    found = [(record.time_s, number, record) for number, file in enumerate(files) for record in file.records]
    found.sort(key=itemgetter(0))
    start_s = found[0][0] if found else 0.0
    prefixes = Prefixes()
    sessions: dict[tuple[int, str], int] = {}
    rows: list[Row] = []
    for time_s, number, record in found:
        # A request of no known session is one of its own.
        name = record.session or f"request {len(rows)}"
        session = sessions.setdefault((number, name), len(sessions))
        blocks = prefixes.path((0 if shared_ids else number, record.scope), record.hash_ids)
        rows.append(Row(time_s - start_s, record.input_tokens, record.output_tokens, session, blocks))
    return tuple(rows), len(prefixes)
