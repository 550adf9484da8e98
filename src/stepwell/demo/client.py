"""A client as anyone would write it: one streamed chat completion, with a watch in hand."""

import time

import aiohttp
import msgspec

from stepwell.demo.workload import Request

ANSWER_TOKENS = 20
REQUEST_TIMEOUT_S = 180.0


class RequestError(RuntimeError):
    """The engine did not answer a request as it should; the message says how."""


class Answer(msgspec.Struct, frozen=True):
    """One answer and what it took, from the client's side."""

    text: str
    prompt_tokens: int
    cached_tokens: int  # as the engine reports it: its own hits and Stepwell's
    first_token_s: float
    whole_s: float


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


async def ask(session: aiohttp.ClientSession, url: str, model: str, request: Request) -> Answer:
    """Asks greedily for at most `ANSWER_TOKENS` tokens. Raises `RequestError`."""
    body = {
        "model": model,
        "messages": msgspec.to_builtins(request.messages),
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "min_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    text: list[str] = []
    usage = _Usage()
    first_s = None
    began = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body, timeout=timeout) as response:
            if response.status != 200:
                reason = (await response.text())[:500]
                raise RequestError(f"{request.name}: the engine answered {response.status}: {reason}")
            async for line in response.content:
                event = _event(line, request)
                if event is None:
                    continue
                usage = event.usage or usage
                for choice in event.choices:
                    if choice.delta.content:
                        first_s = first_s or time.perf_counter() - began
                        text.append(choice.delta.content)
    except TimeoutError as error:
        raise RequestError(f"{request.name}: no whole answer within {REQUEST_TIMEOUT_S:.0f} s") from error
    except aiohttp.ClientError as error:
        raise RequestError(f"{request.name}: the connection to the engine failed: {error}") from error
    whole_s = time.perf_counter() - began
    if first_s is None:
        raise RequestError(f"{request.name}: the engine's answer had no token")
    details = usage.prompt_tokens_details
    return Answer(
        text="".join(text),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        first_token_s=first_s,
        whole_s=whole_s,
    )


def _event(line: bytes, request: Request) -> _Event | None:
    """One line of the stream; None for blank lines and the end mark."""
    data = line.strip().removeprefix(b"data: ")
    if not data or data == b"[DONE]":
        return None
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.DecodeError as error:
        raise RequestError(f"{request.name}: not an event of a chat completion: {data[:200]!r}") from error
    if bytes(event.error):
        raise RequestError(f"{request.name}: the engine reports an error: {bytes(event.error)[:500]!r}")
    return event
