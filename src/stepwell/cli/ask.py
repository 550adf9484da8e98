"""One question of a command to the running cache server."""

import asyncio
import os
from pathlib import Path
from typing import TypeVar

from stepwell import wire
from stepwell.cli.errors import CommandError
from stepwell.client import AsyncClient

# An operator waits longer than an engine may: clearing a million chunks takes seconds.
TIMEOUT_S = 30.0

ReplyT = TypeVar("ReplyT", bound=wire.Message)


def ask(
    socket: Path, request: wire.Message, reply_type: type[ReplyT], timeout_s: float = TIMEOUT_S
) -> ReplyT:
    """The server's reply. Raises CommandError where there is none: no server, a stopped or another one."""
    try:
        return asyncio.run(asyncio.wait_for(_ask(socket, request, reply_type), timeout_s))
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise CommandError(
            f"no cache server runs on {socket}; start one with `stepwell serve`, or name another --socket"
        ) from error
    except TimeoutError as error:
        raise CommandError(f"the cache server on {socket} did not answer within {timeout_s:g} s") from error
    except (OSError, EOFError, wire.ProtocolError) as error:
        raise CommandError(f"the cache server on {socket} gave no answer: {error}") from error


async def _ask(socket: Path, request: wire.Message, reply_type: type[ReplyT]) -> ReplyT:
    client = await AsyncClient.connect(socket, session=f"cli-{os.getpid()}")
    try:
        return await client.call(request, reply_type)
    finally:
        await client.close()
