"""What is wrong with real files: each is an error that says where, or let through and told of; never less."""

import gzip
import io
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.replay.traces.load import LoadOptions, load
from stepwell.replay.traces.row import Trace, TraceError
from stepwell.replay.traces.summary import summarize

GOOD = '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}'


def mooncake(
    timestamp: str = "0", input_length: str = "1000", output_length: str = "5", ids: str = "[1, 2]"
) -> str:
    return (
        f'{{"timestamp": {timestamp}, "input_length": {input_length}, "output_length": {output_length}, '
        f'"hash_ids": {ids}}}'
    )


def load_bytes(folder: Path, data: bytes, options: LoadOptions | None = None) -> Trace:
    file = folder / "trace"
    file.write_bytes(data)
    return load([file], options)


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + GOOD.encode() + b"\n",
        GOOD.encode() + b"\r\n",
        b"\n  \n" + GOOD.encode() + b"\n\n\r\n",
        GOOD.encode(),
        GOOD.replace("{", '{"note": "a\u2028b\u2029c\x85d", ', 1).encode(),
        gzip.compress(GOOD.encode()),
    ],
    ids=["BOM", "CRLF", "blank lines", "no final newline", "U+2028 in a string", "gzip"],
)
def test_harmless(tmp_path: Path, data: bytes) -> None:
    plain = load_bytes(tmp_path, f"{GOOD}\n".encode())
    assert len(plain.rows) == 1
    assert plain.rows[0].blocks == (0, 1)
    assert load_bytes(tmp_path, data) == plain


def test_a_line_of_200_mb(tmp_path: Path) -> None:
    note = b'{"note": "' + b"x" * 200_000_000 + b'", '
    trace = load_bytes(tmp_path, GOOD.encode() + b"\n" + GOOD.encode().replace(b"{", note, 1))
    assert [row.blocks for row in trace.rows] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_no_requests(tmp_path: Path, data: bytes) -> None:
    trace = load_bytes(tmp_path, data)
    assert trace.rows == ()
    assert trace.warnings == (f"{tmp_path / 'trace'}: no requests",)
    assert summarize(trace).requests == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "truncated"),
        ("[]", "got `array`"),
        (GOOD[:-1], "truncated"),
        (GOOD + "}", "malformed"),
        (mooncake(timestamp="NaN"), "NaN is not a JSON number"),
        (mooncake(timestamp="Infinity"), "Infinity is not a JSON number"),
        (mooncake(timestamp="1e999"), "timestamp is inf|out of range"),
        (mooncake(timestamp="-1"), "`float` >= 0"),
        (mooncake(timestamp='"5"'), r"got `str` - at `\$.timestamp`"),
        (mooncake(timestamp="true"), r"got `bool` - at `\$.timestamp`"),
        (mooncake(timestamp="null"), r"got `null` - at `\$.timestamp`"),
        (GOOD.replace('"timestamp": 0, ', ""), "missing required field `timestamp`"),
        (mooncake(input_length="-1"), r"`int` >= 0 - at `\$.input_length`"),
        (mooncake(input_length="12.5"), r"at `\$.input_length`"),
        (mooncake(output_length='"5"'), r"at `\$.output_length`"),
        (mooncake(ids="[1]"), "1 hash_ids do not fit 1000 input tokens: blocks of 512 tokens make 2"),
        (mooncake(ids="[1, 2, 3]"), "3 hash_ids do not fit 1000 input tokens.*--block-tokens"),
        (mooncake(input_length="1536", ids="[1, 2, 1]"), "the id 1 stands twice"),
        (mooncake(ids='[1, "2"]'), r"at `\$.hash_ids\[1\]`"),
        (mooncake(ids="[1, true]"), r"at `\$.hash_ids\[1\]`"),
    ],
)
def test_a_bad_line(tmp_path: Path, line: str, message: str) -> None:
    data = f"{GOOD}\n\n{line}\n{GOOD}\n".encode()
    with pytest.raises(TraceError, match=f"trace:3: .*{message}"):
        load_bytes(tmp_path, data)
    trace = load_bytes(tmp_path, data, LoadOptions(skip_bad=True))
    assert (len(trace.rows), trace.skipped_rows) == (2, 1)
    assert "1 bad records were skipped" in trace.warnings[0]


def test_skipping_everything_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="none of its 2 records can be used"):
        load_bytes(tmp_path, f"{mooncake(ids='[1]')}\n".encode() * 2, LoadOptions(skip_bad=True))


def test_another_block_size_can_be_said(tmp_path: Path) -> None:
    line = mooncake(input_length="40", ids="[7, 8, 9]").encode()
    with pytest.raises(TraceError, match="3 hash_ids do not fit 40 input tokens: blocks of 512"):
        load_bytes(tmp_path, line)
    assert load_bytes(tmp_path, line, LoadOptions(block_tokens=16)).block_tokens == 16


@pytest.mark.parametrize("cut", [5, 30, -9, -1])
def test_a_gzip_file_cut_short(tmp_path: Path, cut: int) -> None:
    data = gzip.compress("\n".join([GOOD] * 1000).encode())
    with pytest.raises(TraceError, match=r"damaged or cut short|cannot be read"):
        load_bytes(tmp_path, data[:cut])


def test_a_damaged_gzip_file(tmp_path: Path) -> None:
    data = bytearray(gzip.compress("\n".join([GOOD] * 1000).encode()))
    data[-6] ^= 1  # its checksum
    with pytest.raises(TraceError, match="cannot be read: CRC check failed"):
        load_bytes(tmp_path, bytes(data))


def test_zstd(tmp_path: Path) -> None:
    zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    data = zstd.compress("\n".join([GOOD] * 1000).encode())
    assert len(load_bytes(tmp_path, data).rows) == 1000
    with pytest.raises(TraceError, match="damaged or cut short"):
        load_bytes(tmp_path, data[:-3])


def test_zstd_without_a_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TraceError, match=r"pip install 'stepwell\[replay\]'"):
        load_bytes(tmp_path, b"\x28\xb5\x2f\xfd" + b"x" * 100)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none.jsonl: cannot be read: .*No such file"):
        load([tmp_path / "none.jsonl"])


def test_unsorted_is_sorted_with_a_warning(tmp_path: Path) -> None:
    times = [3000, 1000, 1000, 2000]
    lines = [mooncake(str(time), ids=f"[{at}, {at + 10}]") for at, time in enumerate(times)]
    trace = load_bytes(tmp_path, "\n".join(lines).encode())
    assert [row.arrival_s for row in trace.rows] == [0, 0, 1, 2]
    assert trace.warnings == (f"{tmp_path / 'trace'}: 1 records stand after a later one; they were sorted",)


@pytest.mark.parametrize(
    "times",
    [
        ["1764000000", "1764000001", "1764000002000"],
        ["1764000000000", "1764000001"],
        ["5000000", "6000000", "6500", "7000000"],
    ],
)
def test_seconds_mixed_with_milliseconds(tmp_path: Path, times: list[str]) -> None:
    lines = "\n".join(mooncake(time) for time in times)
    with pytest.raises(TraceError, match=r"trace:\d: .*seconds and milliseconds are mixed"):
        load_bytes(tmp_path, lines.encode())


def test_pauses_are_no_mix_of_units(tmp_path: Path) -> None:
    lines = "\n".join(mooncake(time) for time in ["1", "1000", "2000", "1800000", "5400000"])
    assert len(load_bytes(tmp_path, lines.encode()).rows) == 5


def test_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="trace:1: not a trace of a known format"):
        load_bytes(tmp_path, b"hello, world\n")


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BufferedReader(io.BytesIO(gzip.compress(GOOD.encode())))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stream))
    assert len(load([Path("-")]).rows) == 1


def test_several_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("\n".join([mooncake("5000"), mooncake("7000")]))
    second.write_text(mooncake("6000"))
    apart = load([first, second])
    assert [(row.arrival_s, row.blocks) for row in apart.rows] == [(0, (0, 1)), (1, (2, 3)), (2, (0, 1))]
    together = load([first, second], LoadOptions(shared_ids=True))
    assert [row.blocks for row in together.rows] == [(0, 1)] * 3


def test_files_of_different_block_sizes(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text(GOOD)
    second.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n")
    with pytest.raises(TraceError, match=r"a has blocks of 512 tokens and .*b of no: replay them apart"):
        load([first, second])


def test_reading_a_pipe(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stepwell", "trace", "info", "-"]
    result = subprocess.run(command, input=GOOD, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "asked_blocks                  2" in result.stdout
