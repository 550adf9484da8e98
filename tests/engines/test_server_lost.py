"""The server killed, stopped or restarted under an engine that goes on stepping. Real processes."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_kit import PATIENT_S, GatedCopier, counts, prompt

from stepwell import wire
from stepwell.client import Client, dial_unix
from stepwell.engines.fake import FakeEngine, FakeRequest
from stepwell.types import CacheStats
from support.server import RawClient, ServerProcess
from support.waiting import wait_until

B = 16
STEP_LIMIT_S = 0.5


class Driver:
    """Steps an engine for as long as the test likes, times each step and checks each answer."""

    def __init__(self, socket: Path, **options: object) -> None:
        self.engine = FakeEngine(dial_unix(socket), prefix_caching=False, **options)  # type: ignore[arg-type]
        self.reference = FakeEngine(None)
        self.longest_s = 0.0
        self.prompts = [prompt(5 * B, start) for start in (1, 1000, 2000)]
        self.asked = 0

    def step(self) -> None:
        begin_s = time.monotonic()
        self.engine.step()
        self.longest_s = max(self.longest_s, time.monotonic() - begin_s)

    def ask(self) -> FakeRequest:
        """The next prompt in turn, with a few tokens of answer."""
        tokens = self.prompts[self.asked % len(self.prompts)]
        self.asked += 1
        request = self.engine.add(tokens, 3)
        while request.state != "finished":
            self.step()
        self.step()
        assert request.new_tokens == self.reference.ask(tokens, 3).new_tokens
        counts(request)
        return request

    def go_on(self, requests: int) -> list[int]:
        """What each of them hit in Stepwell."""
        return [self.ask().stepwell_hit_tokens for _ in range(requests)]

    def until_hit(self) -> None:
        wait_until(lambda: self.ask().stepwell_hit_tokens > 0, 20, "a hit after the server's return")


@pytest.fixture
def driver(server: ServerProcess) -> Iterator[Driver]:
    driver = Driver(server.socket)
    assert driver.go_on(6) == [0, 0, 0, 79, 79, 79]
    yield driver
    driver.engine.close()


def stats_of(server: ServerProcess) -> CacheStats:
    watch = Client(dial_unix(server.socket), "watch", PATIENT_S)
    assert watch.connect()
    reply = watch.call(wire.GetStats(), wire.Stats)
    watch.close()
    assert reply is not None
    return reply.stats


def idle(server: ServerProcess) -> bool:
    stats = stats_of(server)
    memory = stats.tiers["memory"]
    held = (stats.leases, stats.reservations, memory.pinned_chunks)
    return held == (0, 0, 0) and memory.used_bytes == memory.chunks * 4096


def test_killed_and_started_again(server: ServerProcess, driver: Driver) -> None:
    for _ in range(3):
        server.kill()
        assert driver.go_on(6) == [0] * 6
        server.start()
        driver.until_hit()
        assert driver.go_on(6)[3:] == [79, 79, 79]
        assert idle(server)
    assert driver.longest_s < STEP_LIMIT_S


def test_killed_between_promise_and_load(server: ServerProcess, driver: Driver) -> None:
    engine = driver.engine
    asked = engine.add(driver.prompts[0], 3)
    step = engine.schedule()
    server.kill()
    engine.execute(step)  # the arena outlives its server
    server.start()
    engine.run()
    assert counts(asked) == (0, 79, 1)
    driver.until_hit()
    assert driver.longest_s < STEP_LIMIT_S
    assert idle(server)


def test_killed_between_promise_and_load_of_a_step_that_waits_for_a_long_one(
    server: ServerProcess, driver: Driver
) -> None:
    engine = driver.engine
    assert engine.worker is not None
    arenas = engine.worker._arenas
    arenas._keep_ended_s = 0.0  # any step is a long one
    asked = engine.add(driver.prompts[0], 3)
    engine.worker.begin_step()
    waiting = engine.schedule()
    server.kill()
    server.start()
    next_id = RawClient(server.dial()).hello("other").server_id
    wait_until(lambda: arenas.arena_of(next_id) is not None)
    engine.execute(waiting)
    engine.run()
    assert counts(asked) == (0, 79, 1)


def test_killed_with_stores_under_way(server: ServerProcess) -> None:
    driver = Driver(server.socket, copier=GatedCopier)
    asked = driver.engine.add(driver.prompts[0], 9)
    driver.step()
    server.kill()
    server.start()
    while asked.state != "finished":
        driver.step()
    driver.until_hit()
    driver.engine.run()
    assert driver.longest_s < STEP_LIMIT_S
    assert idle(server)
    driver.engine.close()


def test_stopped_and_continued(server: ServerProcess, driver: Driver) -> None:
    for _ in range(2):
        server.signal(signal.SIGSTOP)
        assert driver.go_on(30) == [0] * 30
        server.signal(signal.SIGCONT)
        driver.until_hit()
        assert driver.go_on(3) == [79, 79, 79]
        assert idle(server)
    assert driver.longest_s < STEP_LIMIT_S


def test_stopped_between_promise_and_load(server: ServerProcess, driver: Driver) -> None:
    engine = driver.engine
    asked = engine.add(driver.prompts[0], 3)
    step = engine.schedule()
    server.signal(signal.SIGSTOP)
    begin_s = time.monotonic()
    engine.execute(step)
    assert time.monotonic() - begin_s < STEP_LIMIT_S
    while asked.state != "finished":
        driver.step()
    server.signal(signal.SIGCONT)
    assert counts(asked) == (0, 79, 1)
    driver.until_hit()
    assert driver.longest_s < STEP_LIMIT_S
    assert idle(server)


def test_nothing_stays_leased_when_the_engine_is_idle_after_the_stop(
    server: ServerProcess, driver: Driver
) -> None:
    server.signal(signal.SIGSTOP)
    driver.ask()  # the stopped server has the question, and will grant it
    server.signal(signal.SIGCONT)
    wait_until(lambda: stats_of(server).lookups == 7, 20, "the late grant")
    wait_until(lambda: idle(server), 5, "the end of a lease that nobody waits for")


def test_no_server_at_the_start(folder: Path) -> None:
    server = ServerProcess(folder)
    driver = Driver(server.socket)
    assert driver.go_on(6) == [0] * 6
    server.start()
    driver.until_hit()
    assert driver.go_on(3) == [79, 79, 79]
    assert driver.longest_s < STEP_LIMIT_S
    driver.engine.close()
    server.stop()


ENGINE = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from engine_kit import GatedCopier, PATIENT_S, prompt
from stepwell.client import dial_unix
from stepwell.engines.fake import FakeEngine
engine = FakeEngine(dial_unix(Path(sys.argv[1])), call_timeout_s=PATIENT_S, copier=GatedCopier)
engine.ask(prompt(80, 1))
engine.add(prompt(80, 1), 1)
engine.add(prompt(80, 5000), 1)
engine.schedule()
print("holding", flush=True)
sys.stdin.read()
"""


def test_a_killed_engine_leaves_its_chunks_and_nothing_else(server: ServerProcess, driver: Driver) -> None:
    before = stats_of(server)
    folders = f"{Path(__file__).parent}", f"{Path(__file__).parents[1]}"
    command = [sys.executable, "-c", ENGINE, str(server.socket), folders[0]]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        env={"PYTHONPATH": ":".join([*folders, *sys.path])},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holding\n"
        holding = stats_of(server)
        assert (holding.leases, holding.reservations) == (1, 1)
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: idle(server), 20)
    assert stats_of(server).tiers["memory"].chunks == before.tiers["memory"].chunks
    assert driver.go_on(3) == [79, 79, 79]
