"""`stepwell trace`: what a trace holds, conversion to one format, made-up traces.

The file is imported for this command alone, so it may import what it needs at the top.
"""

import inspect
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, TypeAlias, get_type_hints

import msgspec
from cyclopts import App, Parameter

from stepwell.cli.errors import CommandError
from stepwell.config import ConfigError
from stepwell.replay.traces import native
from stepwell.replay.traces.detect import Format
from stepwell.replay.traces.lines import STDIN
from stepwell.replay.traces.load import LoadOptions, load
from stepwell.replay.traces.row import Trace, TraceError
from stepwell.replay.traces.summary import summarize
from stepwell.replay.traces.synth import Spec, synthesize

app = App(name="trace", help="Look into traces, convert them, make them up.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)  # cyclopts knows no msgspec
class Reading:
    """Flags of every command that reads traces."""

    format: Annotated[
        Format | None,
        Parameter(show_default=False, help="Format of all files. Default: told from each file's first line."),
    ] = None
    block_tokens: Annotated[
        int | None,
        Parameter(
            show_default=False,
            help="Tokens a block. Default: the format's (mooncake 512, weka 64, bailian and openai 16).",
        ),
    ] = None
    skip_bad: Annotated[
        bool,
        Parameter(
            negative=(), show_default=False, help="Skip and count bad records. Default: refuse the file."
        ),
    ] = False
    shared_ids: Annotated[
        bool,
        Parameter(
            negative=(),
            show_default=False,
            help="The files are parts of one trace: equal ids, equal blocks. Default: each file has its own.",
        ),
    ] = False
    tokenizer: Annotated[
        Path | None,
        Parameter(show_default=False, help="The model's tokenizer.json, to read request logs (openai)."),
    ] = None


Traces: TypeAlias = Annotated[
    Path,
    Parameter(
        allow_leading_hyphen=True,  # for a lone "-"
        help="Files, plain, gzip or zstd; - reads standard input. They are taken to share a clock.",
    ),
]
JsonFile: TypeAlias = Annotated[
    Path | None, Parameter(name="--json", show_default=False, help="Also write the figures here, as JSON.")
]
Output: TypeAlias = Annotated[
    Path,
    Parameter(
        name=("--output", "-o"), allow_leading_hyphen=True, help="The file to write; - is standard output."
    ),
]


def load_traces(files: Sequence[Path], reading: Reading | None) -> Trace:
    """The files as one trace; warnings go to standard error. Raises CommandError, ConfigError."""
    flags = reading or Reading()
    if not files:
        raise CommandError("name at least one trace file, or - for standard input")
    for file in files:
        if file.name.startswith("-") and file != STDIN:
            raise ConfigError(f"unknown option {file}{_nearest(str(file))}; a file of that name is ./{file}")
    if flags.block_tokens is not None and flags.block_tokens < 1:
        raise CommandError(f"--block-tokens is {flags.block_tokens}; it must be 1 or more")
    options = LoadOptions(
        format=flags.format,
        block_tokens=flags.block_tokens,
        skip_bad=flags.skip_bad,
        shared_ids=flags.shared_ids,
        tokenizer=flags.tokenizer,
    )
    try:
        trace = load(files, options)
    except TraceError as error:
        raise CommandError(str(error)) from error
    for warning in trace.warnings:
        print(f"stepwell: {warning}", file=sys.stderr)
    return trace


def _nearest(flag: str) -> str:
    # Files may begin with a hyphen here, so cyclopts takes a misspelt flag for one.
    flags = [f"--{field.name.replace('_', '-')}" for field in fields(Reading)]
    close = get_close_matches(flag, flags, 1)
    return f"; did you mean {close[0]}?" if close else ""


def write_json(path: Path | None, value: object) -> None:
    """Where asked for. Raises CommandError when it cannot be written."""
    if path is not None:
        write_bytes(path, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def write_bytes(path: Path, data: bytes) -> None:
    """To a file, or to standard output for "-". Raises CommandError when it cannot be written."""
    if path == Path("-"):
        sys.stdout.buffer.write(data)
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error


@app.command
def info(*traces: Traces, reading: Reading | None = None, json: JsonFile = None) -> int:
    """Show what traces hold: requests, tokens, blocks, and what an infinite cache would hit."""
    summary = summarize(load_traces(traces, reading))
    for name, value in msgspec.to_builtins(summary).items():
        if name not in ("sources", "warnings"):
            print(f"{name:28}  {_shown(value)}")
    write_json(json, summary)
    return 0


@app.command
def convert(*traces: Traces, output: Output, reading: Reading | None = None) -> int:
    """Write traces as one file of Stepwell's own format (docs/replay.md says what that is)."""
    _write_trace(load_traces(traces, reading), output)
    return 0


@app.command
def synth(*, output: Output, **parameters: object) -> int:
    """Make a trace up from stated parameters; equal parameters make equal traces."""
    given = {name: value for name, value in parameters.items() if value is not None}
    try:
        spec = msgspec.convert(given, Spec)
    except msgspec.ValidationError as error:
        raise CommandError(f"the parameters make no workload: {error}") from error
    _write_trace(synthesize(spec), output)
    return 0


def _synth_signature() -> inspect.Signature:
    """`synth` with a flag for each parameter of `Spec`: writing them here would declare each twice."""
    signature = inspect.signature(synth)
    flags = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    hints = get_type_hints(Spec, include_extras=True)
    for field in msgspec.structs.fields(Spec):
        meta = hints[field.name].__metadata__[0]
        help = Parameter(help=f"{meta.description} Default: {field.default}.", show_default=False)
        flags.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[hints[field.name].__origin__ | None, help],
            )
        )
    return signature.replace(parameters=flags)


synth.__signature__ = _synth_signature()  # type: ignore[attr-defined]


def _write_trace(trace: Trace, output: Path) -> None:
    buffer = io.BytesIO()
    native.write(trace, buffer)
    write_bytes(output, buffer.getvalue())


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_shown(each)}" for name, each in value.items()) or "none"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1 else f"{value:,.1f}"
    return "unknown" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
