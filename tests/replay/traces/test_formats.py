"""Each format's own fields, with made-up files of its form."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from stepwell.replay.traces import native
from stepwell.replay.traces.detect import Format
from stepwell.replay.traces.load import NO_PREFIXES, LoadOptions, load
from stepwell.replay.traces.openai import reader
from stepwell.replay.traces.record import BadRecord, Record
from stepwell.replay.traces.row import Trace, TraceError


def load_text(folder: Path, *texts: str, options: LoadOptions | None = None) -> Trace:
    files = []
    for number, text in enumerate(texts):
        files.append(folder / f"trace{number}")
        files[-1].write_text(text)
    return load(files, options)


def bailian(chat: int, parent: int, timestamp: float, ids: Sequence[int]) -> str:
    return json.dumps(
        {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": timestamp,
            "input_length": 16 * len(ids) - 3,
            "output_length": 7,
            "type": "text",
            "turn": 1,
            "hash_ids": ids,
        }
    )


def test_bailian(tmp_path: Path) -> None:
    lines = [
        bailian(10, -1, 1.5, [4, 5]),
        bailian(11, -1, 2.0, [4, 6]),
        bailian(12, 10, 61.25, [4, 5, 6]),
        bailian(13, 12, 62.0, [9]),
        bailian(14, 99, 63.0, [9]),
    ]
    trace = load_text(tmp_path, "\n".join(lines))
    assert trace.sources == (f"{tmp_path / 'trace0'} (bailian)",)
    assert trace.block_tokens == 16
    assert [row.session for row in trace.rows] == [0, 1, 0, 0, 2]
    assert [row.arrival_s for row in trace.rows] == [0.0, 0.5, 59.75, 60.5, 61.5]
    assert trace.rows[0].input_tokens == 29
    # The id 6 after 4 and after 5 are two blocks: none can be used for the other.
    assert [row.blocks for row in trace.rows] == [(0, 1), (0, 2), (0, 1, 3), (4,), (4,)]


def weka(name: str, scope: str = "local", block_size: int = 64) -> dict[str, object]:
    return {
        "id": name,
        "models": ["m"],
        "block_size": block_size,
        "hash_id_scope": scope,
        "requests": [
            {"t": 0.0, "type": "n", "in": 130, "out": 3, "hash_ids": [1, 2], "think_time": 1.0},
            {"t": 4.5, "type": "s", "in": 192, "out": 4, "hash_ids": [1, 2, 3]},
        ],
    }


def test_weka_ids_are_local_to_a_session(tmp_path: Path) -> None:
    first = load_text(tmp_path, json.dumps(weka("a")), json.dumps(weka("b"), indent=1))
    assert [row.blocks for row in first.rows] == [(0, 1), (2, 3), (0, 1, 4), (2, 3, 5)]
    assert [row.session for row in first.rows] == [0, 1, 0, 1]
    assert first.block_tokens == 64
    # One session a line; even the same name twice.
    lines = load_text(tmp_path, json.dumps(weka("a")) + "\n" + json.dumps(weka("a")))
    assert lines.rows == first.rows
    shared = load_text(tmp_path, json.dumps(weka("a", "global")) + "\n" + json.dumps(weka("b", "global")))
    assert [row.blocks for row in shared.rows] == [(0, 1), (0, 1), (0, 1, 2), (0, 1, 2)]


def test_weka_says_which_request_is_bad(tmp_path: Path) -> None:
    session = weka("a")
    assert isinstance(session["requests"], list)
    session["requests"][1]["t"] = "4.5"
    with pytest.raises(TraceError, match=r"trace0:1: session 'a', request 2: .*got `str` - at `\$.t`"):
        load_text(tmp_path, json.dumps(session))
    trace = load_text(tmp_path, json.dumps(session), options=LoadOptions(skip_bad=True))
    assert (len(trace.rows), trace.skipped_rows) == (1, 1)


def test_weka_of_another_block_size(tmp_path: Path) -> None:
    text = json.dumps(weka("a", block_size=32))
    with pytest.raises(TraceError, match="blocks of 32 tokens, not 64: say --block-tokens 32"):
        load_text(tmp_path, text)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,0,1087,API log
"""


def test_azure(tmp_path: Path) -> None:
    trace = load_text(tmp_path, AZURE)
    assert trace.rows[1].arrival_s == pytest.approx(0.052, abs=1e-6)
    assert [(row.input_tokens, row.output_tokens) for row in trace.rows] == [(4808, 10), (3180, 8)]
    assert trace.block_tokens is None
    assert trace.warnings == (NO_PREFIXES,)
    zoned = load_text(tmp_path, AZURE.replace("00,", "00+01:00,"))
    assert zoned.rows == trace.rows


def test_burstgpt(tmp_path: Path) -> None:
    trace = load_text(tmp_path, BURSTGPT)
    assert [(row.arrival_s, row.input_tokens, row.output_tokens) for row in trace.rows] == [
        (0, 472, 18),
        (40.5, 1087, 0),
    ]
    assert trace.warnings == (NO_PREFIXES,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE.replace("4808", "-1"), ":2: ContextTokens is '-1'"),
        (AZURE.replace("4808", "4808.5"), ":2: ContextTokens is '4808.5'"),
        (AZURE.replace("4808", "٤"), ":2: ContextTokens is"),
        (AZURE.replace("3180,8", "3180"), ":3: 2 cells under 3 columns"),
        (AZURE.replace("3180,8", "3180,8,9"), ":3: 4 cells under 3 columns"),
        (AZURE.replace("2023-11-16 18:17:04.0319600", "yesterday"), ":3: TIMESTAMP is 'yesterday'"),
        (AZURE.replace("3180", '"3180'), ":3: not a line of CSV"),
        (BURSTGPT.replace("45.5", "nan"), ":3: Timestamp is 'nan'"),
        (BURSTGPT.replace("45.5", "1e999"), ":3: Timestamp is '1e999'"),
        (BURSTGPT.replace("45.5", "-4"), ":3: Timestamp is '-4'"),
        (BURSTGPT.replace("45.5", ""), ":3: Timestamp is ''"),
        (BURSTGPT.replace("1087,0", "True,0"), ":3: Request tokens is 'True'"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_text(tmp_path, text)


def test_a_table_without_its_column(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=":1: the heading has no column 'TIMESTAMP' but "):
        load_text(tmp_path, BURSTGPT, options=LoadOptions(format=Format.AZURE))


def log_line(time: float, *contents: str, session: str = "") -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    line = {"timestamp": time, "messages": messages, "usage": {"completion_tokens": 4}, "session": session}
    return json.dumps(line).encode()


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def read_log(*lines: bytes) -> list[Record]:
    found = list(reader(letters)(enumerate(lines, 1), 16))
    assert all(isinstance(each, Record) for each in found)
    return [each for each in found if isinstance(each, Record)]


def test_request_logs_share_what_prompts_share() -> None:
    text = "You are a helpful assistant. " * 4
    question = text + "What is a well?"
    same, again, other = read_log(log_line(1, question), log_line(2, question), log_line(3, text + "Why so?"))
    assert same.hash_ids == again.hash_ids
    assert len(same.hash_ids) == same.input_tokens // 16
    common = (len("<|user|>") + len(text)) // 16
    assert same.hash_ids[:common] == other.hash_ids[:common]
    assert not set(same.hash_ids[common:]) & set(other.hash_ids)
    assert same.output_tokens == 4


def test_request_logs_hash_with_a_new_salt_each_time_and_keep_no_text() -> None:
    line = log_line(1, "the secret word of this prompt is xyzzy")
    first, second = read_log(line)[0], read_log(line)[0]
    assert first.input_tokens == second.input_tokens
    assert not set(first.hash_ids) & set(second.hash_ids)
    assert "xyzzy" not in repr(first)


def test_request_logs_tell_pictures_apart() -> None:
    def line(url: str) -> bytes:
        parts = [{"type": "text", "text": "look at this"}, {"type": "image_url", "image_url": {"url": url}}]
        message = {"role": "user", "content": parts}
        return json.dumps({"timestamp": 1, "messages": [message], "usage": {"completion_tokens": 1}}).encode()

    first, same, other = read_log(line("data:a"), line("data:a"), line("data:b"))
    assert first.hash_ids == same.hash_ids != other.hash_ids


def test_request_logs_with_faults() -> None:
    lines = [
        b'{"timestamp": 1, "messages": []}',
        log_line(2, "x").replace(b"2,", b'"2",', 1),
        log_line(3, "x").replace(b'"x"', b'"\xff"'),
    ]
    found = list(reader(letters)(enumerate(lines, 1), 16))
    assert [type(each) for each in found] == [BadRecord, BadRecord, BadRecord]
    assert "usage" in str(found[0])
    assert "$.timestamp" in str(found[1])
    assert "utf-8" in str(found[2]).lower()


def test_a_request_log_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="say --tokenizer"):
        load_text(tmp_path, log_line(1, "hello").decode())


def test_own_format_gives_back_what_was_written(tmp_path: Path) -> None:
    trace = load_text(tmp_path, json.dumps(weka("a")), json.dumps(weka("b")))
    buffer = io.BytesIO()
    native.write(trace, buffer)
    again = load_text(tmp_path, buffer.getvalue().decode())
    assert (again.rows, again.block_tokens, again.blocks) == (trace.rows, trace.block_tokens, trace.blocks)
    assert len(again.rows) == 4


def test_own_format_without_prefixes(tmp_path: Path) -> None:
    trace = load_text(tmp_path, BURSTGPT)
    buffer = io.BytesIO()
    native.write(trace, buffer)
    again = load_text(tmp_path, buffer.getvalue().decode())
    assert (again.rows, again.block_tokens) == (trace.rows, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "stepwell-trace/9", "block_tokens": 16}', ":1: the format 'stepwell-trace/9' is not"),
        ('{"format": "stepwell-trace/1", "block_tokens": 0}', ":1: block_tokens is 0"),
        ('{"format": "stepwell-trace/1"}', ":1: .*missing required field `block_tokens`"),
        (
            '{"format": "stepwell-trace/1", "block_tokens": null}\n'
            '{"arrival_s": 0, "input_tokens": 9, "output_tokens": 1, "session": 0, "blocks": [1]}',
            ":2: blocks in a trace whose first line says block_tokens null",
        ),
    ],
)
def test_own_format_with_faults(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_text(tmp_path, text)
