"""The streaming client against a real HTTP server that speaks like vLLM's."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from stepwell.demo.client import ANSWER_TOKENS, Answer, RequestError, ask
from stepwell.demo.workload import Message, Phase, Request

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
REQUEST = Request(Phase.CHATS, "chat 1, turn 1", (Message("user", "Is the water clear?"),))
USAGE = {"prompt_tokens": 3000, "total_tokens": 3002, "prompt_tokens_details": {"cached_tokens": 2944}}


def chunk(text: str | None) -> dict[str, object]:
    return {"id": "x", "choices": [{"index": 0, "delta": {"role": "assistant", "content": text}}]}


async def asked(handler: Handler) -> Answer:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        return await ask(session, str(server.make_url("")).rstrip("/"), "demo", REQUEST)


async def stream(request: web.Request, *events: object) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def test_the_watch_stops_at_the_first_token_that_has_text() -> None:
    bodies = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        for event, pause_s in ((chunk(""), 0.2), (chunk("It "), 0.3), (chunk("is."), 0.0)):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(pause_s)
        await response.write(b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    answer = asyncio.run(asked(handler))
    assert (answer.text, answer.prompt_tokens, answer.cached_tokens) == ("It is.", 3000, 2944)
    assert answer.first_token_s >= 0.19  # not at the empty delta
    assert answer.whole_s - answer.first_token_s >= 0.29
    (body,) = bodies
    assert body["temperature"] == 0 and body["max_tokens"] == ANSWER_TOKENS
    assert body["messages"] == [{"role": "user", "content": "Is the water clear?"}]


def test_an_engine_that_does_not_count_cached_tokens_gives_zero() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        usage = {"prompt_tokens": 7, "prompt_tokens_details": None}
        return await stream(request, chunk("Yes."), {"choices": [], "usage": usage})

    assert asyncio.run(asked(handler)).cached_tokens == 0


def test_a_refused_request_is_told_with_the_engines_words() -> None:
    async def handler(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=400, text="the prompt is too long")

    with pytest.raises(RequestError, match="chat 1, turn 1: the engine answered 400: the prompt is too long"):
        asyncio.run(asked(handler))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"error": {"message": "KV load failed"}}, "reports an error: .*KV load failed"),
        ({"choices": []}, "had no token"),
        (["not", "an", "event"], "not an event"),
    ],
)
def test_a_stream_that_goes_wrong_is_an_error(event: object, message: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, event)

    with pytest.raises(RequestError, match=message):
        asyncio.run(asked(handler))


def test_a_connection_that_breaks_off_is_an_error() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(chunk("It ")).encode() + b"\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    with pytest.raises(RequestError, match="the connection to the engine failed"):
        asyncio.run(asked(handler))
