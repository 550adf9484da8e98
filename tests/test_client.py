"""The client against a real server that is stopped, killed, absent, refusing or started again."""

import asyncio
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from stepwell import wire
from stepwell.client import CALL_TIMEOUT_S, ArenaClient, AsyncClient, Client, dial_unix
from stepwell.layout import fingerprint, space_id
from stepwell.types import CacheStats, Reason, RequestStats, SpaceSpec
from support.chunks import key
from support.server import RawClient, ServerProcess, running_server
from support.waiting import wait_until

SPEC = SpaceSpec(fingerprint("client"), 16, 4096)
SPACE = space_id(SPEC)
KEYS = b"".join(key(n) for n in range(3))
# One time-out, and what two busy cores may add to it. Without a bound it would be for ever.
BOUND_S = CALL_TIMEOUT_S + 0.75
AT_ONCE_S = 0.05

MakeClient = Callable[..., Client]


@pytest.fixture
def make() -> Iterator[MakeClient]:
    """Clients of one engine, closed at the end."""
    clients: list[Client] = []

    def make(path: Path, session: str = "engine", timeout_s: float = CALL_TIMEOUT_S) -> Client:
        clients.append(Client(dial_unix(path), session, timeout_s))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def one_server() -> Iterator[ServerProcess]:
    with running_server() as server:
        yield server


@pytest.fixture
def server(one_server: ServerProcess) -> ServerProcess:
    """It runs and holds nothing, whatever the test before did to it."""
    one_server.signal(signal.SIGCONT)
    if not one_server.runs():
        one_server.start()
    with one_server.dial() as sock:
        client = RawClient(sock)
        client.hello("making ready")
        client.call(wire.Clear(None))
        wait_until(lambda: client.stats().sessions == 1)
    return one_server


def stats(client: Client) -> CacheStats:
    reply = client.call(wire.GetStats(), wire.Stats)
    assert reply is not None
    return reply.stats


def fill(client: Client) -> None:
    assert client.call(wire.OpenSpace(SPEC), wire.SpaceOpened) == wire.SpaceOpened(SPACE)
    reserved = client.call(wire.Reserve(1, [wire.Run(SPACE, None, KEYS)]), wire.Reserved)
    assert reserved is not None
    assert reserved.runs[0].chunks == [0, 1, 2]
    client.note(wire.Commit(1))


def timed(call: Callable[[], object]) -> tuple[object, float]:
    start_s = time.monotonic()
    answer = call()
    return answer, time.monotonic() - start_s


def test_calls_are_answered_and_notes_go_before_the_next_call(
    server: ServerProcess, make: MakeClient
) -> None:
    client = make(server.socket)
    assert client.server_id is None
    assert client.connect() is True
    assert client.server_id == RawClient(server.dial()).hello("other").server_id
    fill(client)
    found = client.call(wire.Lookup(SPACE, KEYS), wire.Found)
    assert found is not None
    assert found.hit.chunks == 3
    other = make(server.socket, "other")
    other.connect()
    client.call(wire.Load(2, SPACE, KEYS), wire.Loaded)
    client.note(wire.Release(2))
    assert stats(other).leases == 1, "it waits"
    client.flush()
    wait_until(lambda: stats(other).leases == 0)


def test_a_stopped_server_costs_one_time_out_and_is_used_again(
    server: ServerProcess, make: MakeClient
) -> None:
    client, worker = make(server.socket), ArenaClient(dial_unix(server.socket), "engine")
    client.connect()
    worker.connect()
    fill(client)
    assert client.call(wire.Load(2, SPACE, KEYS), wire.Loaded) is not None
    server.signal(signal.SIGSTOP)

    answer, took_s = timed(lambda: client.call(wire.Load(3, SPACE, KEYS), wire.Loaded))
    assert answer is None
    assert CALL_TIMEOUT_S <= took_s < BOUND_S
    assert client.server_id is None
    for number in range(4, 100):
        for request in (
            wire.Load(number, SPACE, KEYS),
            wire.Reserve(number, [wire.Run(SPACE, None, key(9))]),
        ):
            answer, took_s = timed(lambda request=request: client.call(request, wire.Loaded))
            assert answer is None
            assert took_s < AT_ONCE_S
    client.note(wire.Release(2))
    answer, took_s = timed(client.flush)
    assert took_s < AT_ONCE_S

    server.signal(signal.SIGCONT)
    wait_until(lambda: client.server_id is not None)
    now = stats(client)
    assert (now.leases, now.reservations, now.tiers["memory"].pinned_chunks) == (0, 0, 0)
    assert now.sessions == 1
    loaded = client.call(wire.Load(100, SPACE, KEYS), wire.Loaded)
    assert loaded is not None
    assert loaded.chunks == 3
    worker.close()


@pytest.mark.parametrize("ask", ["load", "reserve"])
def test_what_a_stopped_server_grants_when_it_wakes_is_given_back(
    server: ServerProcess, make: MakeClient, ask: str
) -> None:
    """Its answer comes when nobody waits for it, in whatever order with the end of it."""
    client, worker, watching = (
        make(server.socket),
        ArenaClient(dial_unix(server.socket), "engine"),
        make(server.socket, "watching"),
    )
    for each in (client, worker, watching):
        each.connect()
    fill(client)
    used_bytes = stats(watching).tiers["memory"].used_bytes
    for turn in range(3):
        server.signal(signal.SIGSTOP)
        if ask == "load":
            assert client.call(wire.Load(10 + turn, SPACE, KEYS), wire.Loaded) is None
        else:
            run = wire.Run(SPACE, None, KEYS + key("new"))
            assert client.call(wire.Reserve(10 + turn, [run]), wire.Reserved) is None
        server.signal(signal.SIGCONT)
        wait_until(lambda: client.server_id is not None)
        now = stats(client)
        assert (now.leases, now.reservations) == (0, 0)
        assert (now.tiers["memory"].pinned_chunks, now.tiers["memory"].used_bytes) == (0, used_bytes)
    run = wire.Run(SPACE, None, KEYS + key("new"))
    reserved = client.call(wire.Reserve(99, [run]), wire.Reserved)
    assert reserved is not None
    assert reserved.runs[0].chunks == [3], "nobody else is writing it"
    worker.close()


def test_a_report_is_counted_once_however_the_connection_fares(
    server: ServerProcess, make: MakeClient
) -> None:
    client = make(server.socket)
    client.connect()
    for turn in range(3):
        client.note(wire.Report(RequestStats(1, 10, 1, 2, 7)))
        server.signal(signal.SIGSTOP)
        assert client.call(wire.Ping(), wire.Pong) is None
        client.note(wire.Report(RequestStats(100, 0, 0, 0, 0)))
        server.signal(signal.SIGCONT)
        wait_until(lambda: client.server_id is not None)
        assert stats(client).requests.requests == 101 * (turn + 1)


def test_threads_that_wait_for_a_stopped_server_wait_for_one_time_out(
    server: ServerProcess, make: MakeClient
) -> None:
    client = make(server.socket)
    client.connect()
    server.signal(signal.SIGSTOP)
    took_s: list[float] = []
    threads = [
        threading.Thread(target=lambda: took_s.append(timed(lambda: client.call(wire.Ping(), wire.Pong))[1]))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(took_s) == 8
    assert max(took_s) < BOUND_S


def test_a_killed_server_is_a_miss_and_its_successor_another(server: ServerProcess, make: MakeClient) -> None:
    client = make(server.socket)
    client.connect()
    fill(client)
    client.call(wire.Load(2, SPACE, KEYS), wire.Loaded)
    first = client.server_id
    server.kill()
    answer, took_s = timed(lambda: client.call(wire.Ping(), wire.Pong))
    assert answer is None
    assert took_s < AT_ONCE_S
    client.note(wire.Release(2))
    server.start()
    wait_until(lambda: client.server_id is not None)
    assert client.server_id != first
    assert client.call(wire.Lookup(SPACE, KEYS), wire.Found) is None, "a new server knows no spaces"
    wait_until(lambda: client.server_id is not None)
    now = stats(client)
    assert (now.spaces, now.leases, now.reservations, now.sessions) == (0, 0, 0, 1)


def test_a_server_that_comes_later_is_found(folder: Path, make: MakeClient) -> None:
    client = make(folder / "s.sock")
    answer, took_s = timed(client.connect)
    assert answer is False
    assert took_s < AT_ONCE_S
    assert client.call(wire.Ping(), wire.Pong) is None
    server = ServerProcess(folder)
    try:
        server.start()
        wait_until(lambda: client.server_id is not None)
        assert client.call(wire.Ping(), wire.Pong) == wire.Pong()
    finally:
        server.stop()


def test_a_socket_that_nobody_answers_costs_bounded_time(folder: Path, make: MakeClient) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(folder / "s.sock"))
        deaf.listen(1)
        client = make(folder / "s.sock")
        answer, took_s = timed(client.connect)
        assert answer is False
        assert took_s < 3
        _, took_s = timed(client.close)
        assert took_s < 4


class Answering(threading.Thread):
    """A server that says the same to everybody."""

    def __init__(self, path: Path, says: bytes) -> None:
        super().__init__(daemon=True)
        self.connections = 0
        self._says = says
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                connection.recv(4096)
                connection.sendall(self._says)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.join(10)


@pytest.mark.parametrize(
    ("says", "logged"),
    [
        (
            wire.encode(wire.Refused("install the same version")),
            "the server does not take us: install the same version",
        ),
        (wire.encode(wire.Pong()), "the server does not take us: Pong"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is larger than"),
        (b"", "closed the connection"),
        (b"\x05\0\0\0\x01", "closed the connection"),
    ],
    ids=["refused", "pong", "http", "nothing", "half a frame"],
)
def test_who_does_not_welcome_us_is_no_server_and_is_logged_once(
    folder: Path, make: MakeClient, caplog: pytest.LogCaptureFixture, says: bytes, logged: str
) -> None:
    strange = Answering(folder / "s.sock", says)
    with caplog.at_level(logging.WARNING):
        client = make(folder / "s.sock")
        assert client.connect() is False
        wait_until(lambda: strange.connections >= 3)
        assert client.call(wire.Ping(), wire.Pong) is None
    (record,) = caplog.records
    assert logged in record.getMessage()
    client.close()
    strange.close()


def test_a_request_that_is_refused_is_none_and_the_client_comes_back(
    server: ServerProcess, make: MakeClient
) -> None:
    client = make(server.socket)
    client.connect()
    assert client.call(wire.Lookup(b"?" * 16, KEYS), wire.Found) is None
    wait_until(lambda: client.server_id is not None)
    assert client.call(wire.Ping(), wire.Pong) == wire.Pong()


def test_an_interrupted_call_leaves_nothing_for_the_next_one(server: ServerProcess, make: MakeClient) -> None:
    """Ctrl-C while waiting: the late answer is not taken for that of the next question."""

    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    client = make(server.socket, timeout_s=5)
    client.connect()
    fill(client)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        server.signal(signal.SIGSTOP)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            client.call(wire.Load(2, SPACE, KEYS), wire.Loaded)
    finally:
        signal.signal(signal.SIGALRM, before)
        server.signal(signal.SIGCONT)
    wait_until(lambda: client.server_id is not None)
    loaded = client.call(wire.Load(3, SPACE, KEYS[:32]), wire.Loaded)
    assert loaded is not None
    assert loaded.chunks == 1
    assert stats(client).leases == 1
    client.note(wire.Release(3))
    assert stats(client).leases == 0


def test_a_closed_client_answers_none_at_once_and_leaves_no_thread(
    server: ServerProcess, make: MakeClient
) -> None:
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    client = make(server.socket)
    client.connect()
    client.close()
    client.close()
    assert client.call(wire.Ping(), wire.Pong) is None
    client.note(wire.Release(1))
    client.flush()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (files, threads)
    never = make(server.socket, "never connected")
    never.close()


def test_clients_that_come_and_go_leave_nothing(server: ServerProcess, make: MakeClient) -> None:
    watching = make(server.socket, "watching")
    watching.connect()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    server_files = len(os.listdir(f"/proc/{server.pid}/fd"))
    for turn in range(30):
        client, worker = (
            make(server.socket, f"engine {turn}"),
            ArenaClient(dial_unix(server.socket), f"engine {turn}"),
        )
        client.connect()
        worker.connect()
        client.close()
        worker.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (files, threads)
    wait_until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) == server_files)
    assert stats(watching).sessions == 1


# -- the arena ---------------------------------------------------------------------------------------------


def test_the_arena_of_a_killed_server_stays_readable_for_a_while(server: ServerProcess) -> None:
    mapped, unmapped = [], []
    worker = ArenaClient(dial_unix(server.socket), "engine", keep_ended_s=4.0)
    worker.on_map, worker.on_unmap = mapped.append, unmapped.append
    assert worker.connect() is True
    first = RawClient(server.dial()).hello("other").server_id
    arena = worker.arena_of(first)
    assert arena is not None
    arena.view(4096, 5)[:] = b"first"
    kept = arena.view(4096, 5)
    server.kill()
    assert bytes(arena.view(4096, 5)) == b"first"
    server.start()
    second = RawClient(server.dial()).hello("other").server_id
    wait_until(lambda: worker.arena_of(second) is not None)
    assert worker.arena_of(first) is arena, "a step under way may still copy"
    assert bytes(arena.view(4096, 5)) == b"first"
    wait_until(lambda: worker.arena_of(first) is None)
    assert bytes(kept) == b"first", "who still looks at it is not cut off"
    assert [each.size_bytes for each in mapped] == [1 << 20] * 2
    assert unmapped == [arena]
    worker.close()
    assert worker.arena_of(second) is None
    assert len(unmapped) == 2


def test_a_dead_servers_memory_is_given_back_while_no_other_server_comes(server: ServerProcess) -> None:
    worker = ArenaClient(dial_unix(server.socket), "engine", keep_ended_s=0.2)
    worker.connect()
    first = RawClient(server.dial()).hello("other").server_id
    assert worker.arena_of(first) is not None
    server.kill()
    wait_until(lambda: worker.arena_of(first) is None)
    worker.close()


def worker_in_a_step_whose_server_is_killed(server: ServerProcess) -> tuple[ArenaClient, str]:
    """It keeps nothing for longer than steps ask for, and maps the next server's arena already."""
    worker = ArenaClient(dial_unix(server.socket), "engine", keep_ended_s=0.0)
    assert worker.connect() is True
    first = RawClient(server.dial()).hello("other").server_id
    worker.begin_step()
    worker.loaded()
    server.kill()
    server.start()
    second = RawClient(server.dial()).hello("other").server_id
    wait_until(lambda: worker.arena_of(second) is not None)  # it looked for what to unmap before
    return worker, first


def test_a_dead_servers_arena_outlives_a_long_step(server: ServerProcess) -> None:
    worker, first = worker_in_a_step_whose_server_is_killed(server)
    worker._unmap_ended()
    assert worker.arena_of(first) is not None, "the step behind this one may load from it"
    worker.end_step()
    wait_until(lambda: worker.arena_of(first) is None)
    worker.close()


def test_an_engine_that_never_rests_gives_a_dead_servers_memory_back(server: ServerProcess) -> None:
    worker, first = worker_in_a_step_whose_server_is_killed(server)
    worker.begin_step()
    worker.loaded()
    worker._unmap_ended()
    assert worker.arena_of(first) is not None, "another step may have been scheduled before the end"
    worker.begin_step()
    worker.loaded()
    wait_until(lambda: worker.arena_of(first) is None)
    worker.close()


def test_a_worker_without_a_server_maps_the_arena_when_one_comes(folder: Path) -> None:
    worker = ArenaClient(dial_unix(folder / "s.sock"), "engine", rank=3, layout=b"layout")
    assert worker.connect() is False
    server = ServerProcess(folder)
    try:
        server.start()
        raw = RawClient(server.dial())
        server_id = raw.hello("engine").server_id
        wait_until(lambda: worker.arena_of(server_id) is not None)
        assert raw.call(wire.Workers()) == wire.Attached({3: b"layout"})
    finally:
        worker.close()
        server.stop()


def test_descriptors_above_1023_work_too(server: ServerProcess, make: MakeClient) -> None:
    """As in an engine with a thousand connections of its own: select(2) could not wait for them."""
    many = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        client, worker = make(server.socket), ArenaClient(dial_unix(server.socket), "engine")
        client.connect()
        worker.connect()
        server.kill()
        server.start()
        server_id = RawClient(server.dial()).hello("other").server_id
        wait_until(lambda: worker.arena_of(server_id) is not None)
        assert client.call(wire.Ping(), wire.Pong) is None, "of the server that was killed"
        wait_until(lambda: client.server_id == server_id)
        worker.close()
    finally:
        for fd in many:
            os.close(fd)


def test_the_arenas_descriptor_does_not_go_to_child_processes(server: ServerProcess) -> None:
    worker = ArenaClient(dial_unix(server.socket), "engine")
    worker.connect()
    arenas = [int(fd) for fd in os.listdir("/proc/self/fd") if "stepwell-arena" in link(fd)]
    assert len(arenas) == 1, "the mapping keeps one"
    assert not os.get_inheritable(arenas[0])
    worker.close()
    assert not [fd for fd in os.listdir("/proc/self/fd") if "stepwell-arena" in link(fd)]


def link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


# -- for tools ---------------------------------------------------------------------------------------------


async def ask(path: Path, *requests: wire.Message) -> list[wire.Message]:
    client = await AsyncClient.connect(path, "tool")
    try:
        return [await client.call(request, wire.Message) for request in requests]
    finally:
        await client.close()


def test_tools_get_answers_and_exceptions(server: ServerProcess, folder: Path) -> None:
    opened, found = asyncio.run(ask(server.socket, wire.OpenSpace(SPEC), wire.Lookup(SPACE, KEYS)))
    assert opened == wire.SpaceOpened(SPACE)
    assert found == wire.Found(wire.Hit(0, ()))
    with pytest.raises(OSError, match="No such file"):
        asyncio.run(ask(folder / "nobody"))

    async def refused() -> None:
        client = await AsyncClient.connect(server.socket, "tool")
        try:
            await client.call(wire.Lookup(b"?" * 16, KEYS), wire.Found)
        finally:
            await client.close()

    with pytest.raises(wire.ProtocolError, match="unknown space"):
        asyncio.run(refused())


def test_what_could_not_be_reported_is_reported_to_the_next_server(
    server: ServerProcess, make: MakeClient
) -> None:
    client = make(server.socket)
    client.connect()
    server.kill()
    assert client.call(wire.Ping(), wire.Pong) is None
    for _ in range(1000):
        client.note(wire.Report(RequestStats(1, 10, 2, 3, 5), {Reason.NO_SERVER: 1}))
    server.start()
    wait_until(lambda: client.server_id is not None)
    found = stats(client)
    assert found.requests == RequestStats(1000, 10_000, 2000, 3000, 5000)
    assert found.missed[Reason.NO_SERVER] == 1000


def test_a_forked_child_takes_no_reply_of_its_parent(server: ServerProcess, make: MakeClient) -> None:
    client = make(server.socket)
    client.connect()
    child = os.fork()
    if child == 0:
        os._exit(0 if client.call(wire.Ping(), wire.Pong) is None else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert client.call(wire.Ping(), wire.Pong) == wire.Pong()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be another user")
def test_a_server_of_another_user_is_none(make: MakeClient) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        path = Path(folder) / "s.sock"
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(path))
                listening.listen()
                accepted, _ = listening.accept()
                accepted.recv(1)
            os._exit(0)
        wait_until(path.exists)
        client = make(path)
        assert client.connect() is False
        client.close()
        os.waitpid(child, 0)


def test_a_device_that_cannot_register_the_arena_costs_nothing_but_speed(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    worker = ArenaClient(dial_unix(server.socket), "engine", keep_ended_s=0.1)
    worker.on_map = worker.on_unmap = broken
    assert worker.connect() is True
    first = RawClient(server.dial()).hello("other").server_id
    assert worker.arena_of(first) is not None
    server.kill()
    server.start()
    second = RawClient(server.dial()).hello("other").server_id
    wait_until(lambda: worker.arena_of(second) is not None, of="the thread lives")
    wait_until(lambda: worker.arena_of(first) is None)
    worker.close()
    assert "cannot be registered with the device: CUDA error" in caplog.text


def test_a_server_that_greets_and_never_answers_is_asked_less_and_less(
    make: MakeClient, tmp_path: Path
) -> None:
    """Each time costs the engine a time-out."""
    path = tmp_path / "slow.sock"
    greeted: list[float] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    held = []

    def greet() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            connection.recv(65536)
            greeted.append(time.monotonic())
            connection.sendall(wire.encode(wire.Welcome(wire.PROTOCOL, "0", f"id {len(greeted)}", 4096)))

    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    client = make(path, timeout_s=0.01)
    assert client.connect()
    for times in range(1, 6):
        wait_until(lambda: client.server_id is not None)
        assert len(greeted) == times
        assert client.call(wire.Ping(), wire.Pong) is None
    pauses = [later - earlier for earlier, later in pairwise(greeted)]
    assert pauses[-1] > 3 * pauses[0] > 0
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    for connection in held:
        connection.close()
