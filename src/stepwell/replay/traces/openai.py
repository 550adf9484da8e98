"""Logs of an OpenAI-style chat API: prompts are hashed block by block as they are read, and never kept.

One JSON object a line: `{"timestamp": 1764000000.5, "messages": [{"role": "user", "content": "…"}, …],
"usage": {"completion_tokens": 52}}`, the timestamp in seconds; `session` (text) is optional. The tokens are
those of the model's own tokenizer with one fixed frame around each message: a chat template differs from it
by a few tokens a message, and shares prefixes alike.
"""

import hashlib
import importlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from stepwell.keys import chunk_keys
from stepwell.replay.traces.decode import Count, Seconds, decode, finite
from stepwell.replay.traces.record import BadRecord, Found, NumberedLine, Reader, Record
from stepwell.replay.traces.row import TraceError

BLOCK_TOKENS = 16
_ID_BYTES = 8

Tokenize: TypeAlias = Callable[[str], Sequence[int]]


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, object]] | None = None
    tool_calls: list[dict[str, object]] = []


class _Usage(msgspec.Struct):
    completion_tokens: Count


class _Line(msgspec.Struct):
    timestamp: Seconds
    messages: list[_Message]
    usage: _Usage
    session: str = ""
    tools: list[dict[str, object]] = []


def load_tokenizer(path: Path) -> Tokenize:
    """From a model's tokenizer.json. Raises TraceError when the file or the library is missing."""
    try:
        tokenizers = importlib.import_module("tokenizers")  # not ours to require: engines bring it along
    except ModuleNotFoundError as error:
        raise TraceError(
            "request logs are read with the package `tokenizers`: pip install tokenizers"
        ) from error
    if not path.is_file():
        raise TraceError(f"{path}: no such tokenizer.json; it lies in the model's folder")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def reader(tokenize: Tokenize) -> Reader:
    """A `Reader` that hashes with a salt of its own, so that nobody can look a prompt up in its ids."""
    salt = secrets.token_bytes(32)

    def read(lines: Iterable[NumberedLine], block_tokens: int) -> Iterator[Found]:
        decoder = msgspec.json.Decoder(_Line)
        for number, text in lines:
            try:
                line = decode(decoder, number, text)
                time_s = finite(number, "timestamp", line.timestamp)
            except BadRecord as error:
                yield error
                continue
            ids = tokenize(_prompt(line))
            keys = chunk_keys(ids, block_tokens, salt)
            blocks = tuple(int.from_bytes(key[:_ID_BYTES], "big") for key in keys)
            yield Record(number, time_s, len(ids), line.usage.completion_tokens, line.session, "", blocks)

    return read


def _prompt(line: _Line) -> str:
    tools = "".join(f"<|tool|>{_canonical(tool)}" for tool in line.tools)
    return tools + "".join(f"<|{each.role}|>{_content(each)}<|end|>" for each in line.messages)


def _content(message: _Message) -> str:
    calls = "".join(_canonical(call) for call in message.tool_calls)
    if message.content is None or isinstance(message.content, str):
        return (message.content or "") + calls
    return "".join(_part(part) for part in message.content) + calls


def _part(part: dict[str, object]) -> str:
    text = part.get("text")
    if part.get("type") == "text" and isinstance(text, str):
        return text
    # An image or the like: equal ones stay equal; how many tokens the model makes of it is not known here.
    return f"<|{part.get('type')}:{hashlib.sha256(_canonical(part).encode()).hexdigest()}|>"


def _canonical(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
