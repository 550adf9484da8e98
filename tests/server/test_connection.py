"""What the server does with what arrives on a socket: right, wrong, late, or never."""

import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell import wire
from stepwell.layout import fingerprint, space_id
from stepwell.types import Reason, RequestStats, SpaceSpec
from support.chunks import key
from support.server import RawClient, ServerProcess, running_server
from support.waiting import wait_until

SPEC = SpaceSpec(fingerprint("connection"), 16, 4096)
SPACE = space_id(SPEC)
KEYS = b"".join(key(n) for n in range(3))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One for all: every test leaves it as it was."""
    with running_server() as server:
        yield server


@pytest.fixture
def watching(server: ServerProcess) -> Iterator[RawClient]:
    """Another client, which has to go on being served."""
    client = RawClient(server.dial())
    client.hello("watching")
    assert client.call(wire.OpenSpace(SPEC)) == wire.SpaceOpened(SPACE)
    client.call(wire.Reserve(1, [wire.Run(SPACE, None, KEYS)]))
    client.send(wire.encode(wire.Commit(1)))
    yield client
    reply = client.call(wire.Lookup(SPACE, KEYS))
    assert isinstance(reply, wire.Found)
    assert reply.hit.chunks == 3, "its chunks are still there"
    client.close()


def at_rest(watching: RawClient, sessions: int = 1) -> bool:
    stats = watching.stats()
    return (stats.sessions, stats.leases, stats.reservations, stats.tiers["memory"].pinned_chunks) == (
        sessions,
        0,
        0,
        0,
    )


HELLO = wire.encode(wire.Hello(wire.PROTOCOL, "bad"))
REFUSED = {
    "an http request": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "is larger than"),
    "zeros": (bytes(4096), "truncated"),
    "a frame of 4 GiB": (b"\xff" * 64, "a frame of 4294967295 bytes is larger than"),
    "an empty frame": (struct.pack("<I", 0), "truncated"),
    "a frame that holds garbage": (struct.pack("<I", 4) + b"\x00\x01\x02\x03", "array"),
    "nested arrays": (
        HELLO + struct.pack("<I", 50_007) + b"\x92\xa4ping" + b"\x91" * 50_000 + b"\xc0",
        "depth",
    ),
    "another version": (
        wire.encode(wire.Hello(wire.PROTOCOL + 1, "bad")),
        f"client speaks protocol {wire.PROTOCOL + 1}, this server {wire.PROTOCOL}: install the same Stepwell",
    ),
    "a question before hello": (wire.encode(wire.GetStats()), "the first message must be hello"),
    "a note before hello": (wire.encode(wire.Commit(1)), "the first message must be hello"),
    "two hellos": (HELLO + HELLO, "a second hello"),
    "a reply": (HELLO + wire.encode(wire.Pong()), "Invalid value"),
    "a wrong type": (HELLO + wire.encode(wire.Load("one", SPACE, KEYS)), "Expected `int`"),  # type: ignore[arg-type]
    "an unknown space": (HELLO + wire.encode(wire.Lookup(b"?" * 16, KEYS)), "unknown space 3f3f3f"),
    "half a key": (HELLO + wire.encode(wire.Lookup(SPACE, KEYS[:-1])), "95 bytes are not a whole number"),
    "chunks of no bytes": (
        HELLO + wire.encode(wire.OpenSpace(SpaceSpec(b"f", 16, 0))),
        "no chunk has 16 tokens in 0",
    ),
    "half a key to reserve": (
        HELLO + wire.encode(wire.Reserve(1, [wire.Run(SPACE, None, key(9)), wire.Run(SPACE, None, b"x")])),
        "1 bytes are not a whole number",
    ),
    "a lease of that number": (
        HELLO + 2 * wire.encode(wire.Load(5, SPACE, KEYS)),
        "lease 5 exists already",
    ),
    "a reservation of that number": (
        HELLO + 2 * wire.encode(wire.Reserve(5, [wire.Run(SPACE, None, KEYS + key(9))])),
        "reservation 5 exists already",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_request_ends_that_connection_with_a_reason(
    server: ServerProcess, watching: RawClient, name: str
) -> None:
    said, why = REFUSED[name]
    bad = RawClient(server.dial())
    bad.send(said)
    reply = bad.receive()
    while not isinstance(reply, wire.Refused):
        reply = bad.receive()
    assert why in reply.why
    assert bad.ended()
    bad.close()
    wait_until(lambda: at_rest(watching))
    assert "Traceback" not in server.log()


def test_a_message_in_single_bytes_is_one_message(server: ServerProcess, watching: RawClient) -> None:
    slow = RawClient(server.dial())
    for byte in wire.encode(wire.Hello(wire.PROTOCOL, "slow")) + wire.encode(wire.Ping()):
        slow.send(bytes([byte]))
    assert isinstance(slow.receive(), wire.Welcome)
    assert slow.receive() == wire.Pong()
    slow.close()


def test_many_messages_at_once_are_answered_in_order(server: ServerProcess, watching: RawClient) -> None:
    watching.send(
        b"".join(wire.encode(wire.Lookup(SPACE, KEYS[: 32 * n])) + wire.encode(wire.Ping()) for n in range(4))
    )
    for chunks in range(4):
        assert watching.receive() == wire.Found(wire.Hit(chunks, ("memory",) * chunks))
        assert watching.receive() == wire.Pong()


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, -1])
def test_a_connection_that_ends_inside_a_message(
    server: ServerProcess, watching: RawClient, cut: int
) -> None:
    bad = RawClient(server.dial())
    bad.hello("bad")
    bad.call(wire.Load(1, SPACE, KEYS))
    bad.send(wire.encode(wire.Load(2, SPACE, KEYS))[:cut])
    bad.close()
    wait_until(lambda: at_rest(watching))


def test_random_bytes_never_harm_others(server: ServerProcess, watching: RawClient) -> None:
    chance = random.Random(7)
    for _ in range(50):
        bad = RawClient(server.dial())
        good = (
            HELLO
            + wire.encode(wire.Load(1, SPACE, KEYS))
            + wire.encode(wire.Reserve(1, [wire.Run(SPACE, None, KEYS)]))
        )
        damaged = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        bad.send(damaged)
        bad.close()
    wait_until(lambda: at_rest(watching))
    assert "Traceback" not in server.log()


CLIENT = """
import sys
sys.path[:0] = {path!r}
from stepwell import wire
from support.server import RawClient, ServerProcess
from pathlib import Path
from test_connection import KEYS, SPACE, key
client = RawClient(ServerProcess(Path(sys.argv[1])).dial())
client.hello("killed", maps_arena=True)
print(client.call(wire.Load(1, SPACE, KEYS)).chunks)
run = wire.Run(SPACE, None, KEYS + key(8) + key(9))
print(client.call(wire.Reserve(1, [run])).runs[0].chunks, flush=True)
input()
"""


def test_what_a_killed_client_held_ends_with_it(server: ServerProcess, watching: RawClient) -> None:
    program = CLIENT.format(path=[*sys.path, str(Path(__file__).parent)])
    client = subprocess.Popen(
        [sys.executable, "-c", program, str(server.socket.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"3\n"
    assert client.stdout.readline() == b"[3, 4]\n"
    stats = watching.stats()
    assert (stats.sessions, stats.leases, stats.reservations) == (2, 1, 1)
    assert (stats.tiers["memory"].pinned_chunks, stats.tiers["memory"].used_bytes) == (3, 5 * 4096)
    client.kill()
    client.communicate()
    wait_until(lambda: at_rest(watching))
    assert watching.stats().tiers["memory"].used_bytes == 3 * 4096


def test_a_session_ends_with_the_last_of_its_connections(server: ServerProcess, watching: RawClient) -> None:
    scheduler, worker = RawClient(server.dial()), RawClient(server.dial())
    scheduler.hello("engine")
    worker.hello("engine", maps_arena=True)
    scheduler.call(wire.Load(1, SPACE, KEYS))
    scheduler.call(wire.Reserve(2, [wire.Run(SPACE, None, KEYS + key(9))]))
    scheduler.close()
    for _ in range(3):  # by then the server has seen the end of the other one
        worker.call(wire.Ping())
    stats = watching.stats()
    assert (stats.sessions, stats.leases, stats.reservations) == (2, 1, 1), "the worker may still be copying"

    scheduler = RawClient(server.dial())
    scheduler.hello("engine")
    scheduler.send(wire.encode(wire.Release(1)))
    assert scheduler.call(wire.Ping()) == wire.Pong()
    assert watching.stats().leases == 0, "it is the same session still"
    worker.close()
    scheduler.call(wire.Ping())
    assert watching.stats().reservations == 1
    scheduler.close()
    wait_until(lambda: at_rest(watching))


def test_only_workers_that_mapped_the_arena_are_attached(server: ServerProcess) -> None:
    scheduler = RawClient(server.dial())
    scheduler.hello("engine")
    assert scheduler.call(wire.Workers()) == wire.Attached({})
    workers = []
    for rank, layout in ((0, b"zero"), (1, b"one")):
        worker = RawClient(server.dial())
        worker.send(wire.encode(wire.Hello(wire.PROTOCOL, "engine", True, rank, layout)))
        assert isinstance(worker.receive(), wire.Welcome)
        worker.call(wire.Ping())
        assert rank not in scheduler.call(wire.Workers()).layouts, "it is still mapping"
        worker.send(wire.encode(wire.Mapped()))
        worker.call(wire.Ping())
        workers.append(worker)
    stranger = RawClient(server.dial())
    stranger.hello("another engine", maps_arena=True)
    assert scheduler.call(wire.Workers()) == wire.Attached({0: b"zero", 1: b"one"})
    workers[0].close()
    wait_until(lambda: scheduler.call(wire.Workers()) == wire.Attached({1: b"one"}))
    for client in (workers[1], stranger, scheduler):
        client.close()


def test_the_welcome_carries_the_arenas_descriptor_only_when_asked(server: ServerProcess) -> None:
    for maps_arena in (False, True):
        sock = server.dial()
        sock.sendall(wire.encode(wire.Hello(wire.PROTOCOL, "one", maps_arena)))
        data, fds, _, _ = socket.recv_fds(sock, 4096, 2)
        assert isinstance(wire.decode_reply(data[4:]), wire.Welcome)
        assert len(fds) == (1 if maps_arena else 0)
        for fd in fds:
            assert os.fstat(fd).st_size == 1 << 20
            os.close(fd)
        sock.close()


def test_a_client_that_left_before_its_welcome_is_no_error(
    server: ServerProcess, watching: RawClient
) -> None:
    for _ in range(20):
        sock = server.dial()
        sock.sendall(wire.encode(wire.Hello(wire.PROTOCOL, "left", maps_arena=True)))
        sock.close()
    wait_until(lambda: at_rest(watching))
    assert "Traceback" not in server.log()


def test_answers_that_nobody_reads_do_not_pile_up(server: ServerProcess, watching: RawClient) -> None:
    greedy = server.dial()
    greedy.sendall(wire.encode(wire.Hello(wire.PROTOCOL, "greedy")))
    greedy.setblocking(False)
    question = wire.encode(wire.GetStats()) * 1000
    sent_bytes, end_s = 0, time.monotonic() + 10
    while time.monotonic() < end_s:
        try:
            sent_bytes += greedy.send(question)
        except BlockingIOError:
            # Full on both sides. It stays so: the server reads no more until somebody reads its answers.
            watching.call(wire.Ping())
            watching.call(wire.Ping())
            try:
                sent_bytes += greedy.send(question)
            except BlockingIOError:
                break
    else:
        pytest.fail(f"the server took {sent_bytes} bytes of questions whose answers nobody read")
    assert sent_bytes < 4 << 20
    assert watching.call(wire.Ping()) == wire.Pong()
    greedy.setblocking(True)
    greedy.settimeout(10)
    client = RawClient(greedy)
    assert isinstance(client.receive(), wire.Welcome)
    for _ in range(sent_bytes // len(wire.encode(wire.GetStats()))):
        assert isinstance(client.receive(), wire.Stats), "and then all are answered"
    client.close()


def test_reports_are_summed_and_every_reason_is_there(server: ServerProcess, watching: RawClient) -> None:
    before = watching.stats()
    report = wire.Report(RequestStats(1, 100, 10, 60, 30), {Reason.TOO_SHORT: 1}, {Reason.NO_WORKER: 2})
    watching.send(2 * wire.encode(report))
    after = watching.stats()
    assert after.requests == RequestStats(2, 200, 20, 120, 60)
    assert list(after.missed) == list(after.dropped) == list(Reason)
    assert {r: n - before.missed[r] for r, n in after.missed.items() if n > before.missed[r]} == {
        Reason.TOO_SHORT: 2
    }
    assert {r: n - before.dropped[r] for r, n in after.dropped.items() if n > before.dropped[r]} == {
        Reason.NO_WORKER: 4
    }


def test_64_requests_cancelled_at_once_twenty_times(server: ServerProcess, watching: RawClient) -> None:
    engine = RawClient(server.dial())
    engine.hello("engine", maps_arena=True)
    for turn in range(20):
        numbers = range(turn * 64, turn * 64 + 64)
        for number in numbers:
            engine.send(wire.encode(wire.Load(number, SPACE, KEYS)))
            engine.send(
                wire.encode(wire.Reserve(number, [wire.Run(SPACE, None, KEYS + key(("new", number)))]))
            )
        engine.send(b"".join(wire.encode(wire.Release(n)) + wire.encode(wire.Abort(n)) for n in numbers))
        for _ in numbers:
            assert isinstance(engine.receive(), wire.Loaded)
            assert isinstance(engine.receive(), wire.Reserved)
        assert engine.call(wire.Ping()) == wire.Pong()
        assert at_rest(watching, sessions=2)
        assert watching.stats().tiers["memory"].used_bytes == 3 * 4096
    engine.close()
