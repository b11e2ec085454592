# SPDX-License-Identifier: Apache-2.0
"""The parser of what nats-server sends: whatever the reads are cut into, the same messages come out."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtt_nats.backbone.link import ENOUGH, LARGE_FRAMES_BYTES, NatsConnection
from mqtt_nats.backbone.transport import NatsTransport, RunHandler
from mqtt_nats.base.server_clock import elapsed
from tests.harness.waiting import aeventually

Event = tuple[bytes, ...]


class FakeTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.lines: list[list[bytes]] = []
        self.reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return False

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.lines.append([bytes(data) for data in list_of_data])

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))


class Former(asyncio.Protocol):
    """nats-py's protocol, to be told of the end."""

    def __init__(self) -> None:
        self.lost: list[Exception | None] = []

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


class Runs(RunHandler):
    """Handler that writes down its events, and how many messages came at once."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.sizes: list[int] = []

    def __call__(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        self.events.append((b"1", subject, reply, headers, payload))

    def run(self, subject: bytes, payloads: list[bytes]) -> None:
        self.sizes.append(len(payloads))
        for payload in payloads:
            self(subject, b"", b"", payload)


class Failing(Runs):
    """Handler that fails for messages in a row."""

    def run(self, subject: bytes, payloads: list[bytes]) -> None:
        raise RuntimeError("no")


class Slow(Runs):
    """Handler that needs two milliseconds for each message."""

    def __call__(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        begun = time.monotonic()
        while time.monotonic() < begun + 0.002:
            pass
        super().__call__(subject, reply, headers, payload)


class Bench:
    """A link with handlers for the subscriptions 1 and 22, and nothing of nats-py's behind it."""

    def __init__(self, kind: type[Runs] = Runs) -> None:
        self.link = NatsConnection()
        self.events: list[Event] = []
        self.first = kind(self.events)
        self.runs = self.first.sizes
        """How many messages came at once."""
        self.transport = FakeTransport()
        self.former = Former()
        self.wire = self.link.wire = NatsTransport(self.link, self.transport, self.former)
        self.link._loop = asyncio.get_running_loop()
        self.link.handlers[b"1"] = self.first
        self.link.handlers[b"22"] = lambda *message: self.events.append((b"22", *message))
        self.link.control = self.control  # type: ignore[method-assign]
        self.link.foreign = self.foreign  # type: ignore[method-assign,assignment]

    async def come(self, data: bytes) -> None:
        """Something is read; what takes longer than a turn is waited for."""
        self.wire.data_received(data)
        await aeventually(lambda: self.transport.reading)

    @property
    def payloads(self) -> list[bytes]:
        return [event[-1] for event in self.events if len(event) > 1]

    def control(self, line: bytes) -> None:
        self.events.append((line,))

    def foreign(self, sid: int, *message: bytes) -> None:
        self.events.append((b"foreign", b"%d" % sid, *message))


HEADERS = b"NATS/1.0\r\nA:b\r\n\r\n"
STREAM = (
    b"PING\r\n"
    b"MSG a.b 1 3\r\nabc\r\n"
    b"MSG a.b 22 reply.to 5\r\n\r\nMSG\r\n"
    b"+OK\r\n"
    b"HMSG x 1 %d %d\r\n%bpay\r\n" % (len(HEADERS), len(HEADERS) + 3, HEADERS) + b"HMSG x 22 r %d %d\r\n%b\r\n"
    b"MSG unknown 9 0\r\n\r\n"
    b"MSG r 1 3\r\n\r\nM\r\nMSG r 1 3\r\nr2\r\r\nMSG r 1 3\r\nr 3\r\nMSG r 1 2\r\nr4\r\nMSG s 1 2\r\ns5\r\n"
    b"MSG r 22 1\r\n6\r\nMSG r 22 1\r\n7\r\nMSG r 1 x 1\r\n8\r\nMSG r 1 x 1\r\n9\r\n"
    b"PONG\r\n"
    b"-ERR 'Some Error'\r\n"
    b'INFO {"max_payload":5}\r\n'
    b"MSG last 1 1\r\n\r\r\n" % (len(HEADERS), len(HEADERS), HEADERS)
)
EVENTS: list[Event] = [
    (b"PING",),
    (b"1", b"a.b", b"", b"", b"abc"),
    (b"22", b"a.b", b"reply.to", b"", b"\r\nMSG"),
    (b"+OK",),
    (b"1", b"x", b"", HEADERS, b"pay"),
    (b"22", b"x", b"r", HEADERS, b""),
    (b"foreign", b"9", b"unknown", b"", b"", b""),
    (b"1", b"r", b"", b"", b"\r\nM"),
    (b"1", b"r", b"", b"", b"r2\r"),
    (b"1", b"r", b"", b"", b"r 3"),
    (b"1", b"r", b"", b"", b"r4"),
    (b"1", b"s", b"", b"", b"s5"),
    (b"22", b"r", b"", b"", b"6"),
    (b"22", b"r", b"", b"", b"7"),
    (b"1", b"r", b"x", b"", b"8"),
    (b"1", b"r", b"x", b"", b"9"),
    (b"PONG",),
    (b"-ERR 'Some Error'",),
    (b'INFO {"max_payload":5}',),
    (b"1", b"last", b"", b"", b"\r"),
]


async def test_in_one_read() -> None:
    bench = Bench()
    await bench.come(STREAM)
    assert bench.events == EVENTS
    assert bench.runs == [3]


async def test_a_run_is_handed_on_at_once_as_far_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqtt_nats.backbone.transport.monotonic", lambda: 0.0)  # the turn does not end
    bench = Bench()
    frame = b"MSG a.b 1 4\r\n%04d\r\n"
    data = b"".join(frame % number for number in range(1000))
    await bench.come(data[:-3])
    assert sum(bench.runs) == 999
    assert len(bench.runs) <= 6, "each part is four times the one before"
    await bench.come(data[-3:])
    assert [event[4] for event in bench.events] == [b"%04d" % number for number in range(1000)]


async def test_a_run_that_fails_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(Failing)
    await bench.come(STREAM)
    assert len(bench.events) == len(EVENTS) - 3
    assert caplog.text.count("a handler failed") == 1


async def test_a_subscription_has_a_handler_of_runs_until_it_ends() -> None:
    bench = Bench()
    sid = bench.link.subscribe_raw(b"a", bench.first)
    await bench.come(b"MSG a %b 1\r\nx\r\nMSG a %b 1\r\ny\r\n" % (sid, sid))
    assert bench.runs == [2]
    bench.link.unsubscribe_raw(sid)
    await bench.come(b"MSG a %b 1\r\nx\r\nMSG a %b 1\r\ny\r\n" % (sid, sid))
    assert bench.runs == [2]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_in_small_reads(size: int) -> None:
    bench = Bench()
    for start in range(0, len(STREAM), size):
        await bench.come(STREAM[start : start + size])
    assert bench.events == EVENTS


async def test_cut_in_two_at_every_byte() -> None:
    bench = Bench()
    for cut in range(1, len(STREAM)):
        bench.events.clear()
        await bench.come(STREAM[:cut])
        await bench.come(STREAM[cut:])
        assert bench.events == EVENTS, cut


@settings(max_examples=100)
@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=6, unique=True))
def test_cut_anywhere(cuts: list[int]) -> None:
    async def run() -> None:
        bench = Bench()
        edges = [0, *sorted(cuts), len(STREAM)]
        for start, stop in itertools.pairwise(edges):
            await bench.come(STREAM[start:stop])
        assert bench.events == EVENTS

    asyncio.run(run())


async def test_a_large_message_is_collected_and_joined_once() -> None:
    bench = Bench()
    payload = bytes(range(256)) * 4096
    frame = b"MSG big 1 %d\r\n%b\r\nMSG next 1 1\r\nx\r\n" % (len(payload), payload)
    pieces = [frame[start : start + 4096] for start in range(0, len(frame), 4096)]
    for number, piece in enumerate(pieces[:-1], 1):
        await bench.come(piece)
        assert len(bench.wire._parts) == number, "the pieces so far were joined before the message was complete"
        assert not bench.events
    await bench.come(pieces[-1])
    assert bench.events == [(b"1", b"big", b"", b"", payload), (b"1", b"next", b"", b"", b"x")]
    assert not bench.wire._parts


async def test_a_handler_that_fails_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()

    def fail(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        raise RuntimeError("no")

    bench.link.handlers[b"22"] = fail
    await bench.come(STREAM)
    assert bench.events == [event for event in EVENTS if event[0] != b"22"]
    assert caplog.text.count("a handler failed") == 4


async def test_a_handler_may_end_its_own_subscription() -> None:
    bench = Bench()
    link = bench.link

    def once(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        bench.events.append((payload,))
        link.unsubscribe_raw(b"22")

    link.handlers[b"22"] = once
    await bench.come(b"MSG a 22 1\r\nx\r\nMSG a 22 1\r\ny\r\n")
    assert bench.events == [(b"x",), (b"foreign", b"22", b"a", b"", b"", b"y")]
    assert link.out == [b"UNSUB 22\r\n"]


async def test_what_is_collected_leaves_in_one_write() -> None:
    bench = Bench()
    link = bench.link
    link.out += [b"PUB a 1\r\nx\r\n", b"PUB b 1\r\ny\r\n"]
    link.kick()
    link.kick()
    assert not bench.transport.written
    await asyncio.sleep(0)
    assert bench.transport.written == [b"PUB a 1\r\nx\r\nPUB b 1\r\ny\r\n"]
    link.wire = None
    link.out.append(b"PUB c 1\r\nz\r\n")
    link.kick()
    await asyncio.sleep(0)
    assert len(bench.transport.written) == 1
    assert not link.out, "nothing is kept for the next connection: the store does that"


async def test_much_is_written_before_the_turn_ends() -> None:
    """So that the server can begin with it; few frames wait for what other clients send."""
    bench = Bench()
    link = bench.link
    frame = b"PUB a 1\r\nx\r\n"
    link.out += [frame] * (ENOUGH - 1)
    link.push()
    assert not bench.transport.written
    link.out.append(frame)
    link.push()
    assert bench.transport.written == [frame * ENOUGH]
    assert not link.out
    await asyncio.sleep(0)
    assert len(bench.transport.written) == 1
    link.stopped = True
    link.out += [frame] * ENOUGH
    link.push()
    assert len(bench.transport.written) == 1
    link.go_on()
    assert bench.transport.written[1:] == [frame * ENOUGH]


async def test_a_few_large_parts_leave_as_they_are() -> None:
    bench = Bench()
    link = bench.link
    parts = [b"PUB a %d\r\n" % LARGE_FRAMES_BYTES, bytes(LARGE_FRAMES_BYTES), b"\r\n"]
    link.out += parts
    link.write_out()
    assert bench.transport.lines == [parts]
    assert not link.out
    link.out += [b"PUB a 1\r\nx\r\n"] * LARGE_FRAMES_BYTES
    link.write_out()
    assert len(bench.transport.lines) == 1, "many small ones are joined"
    link.out += [b"PUB a 5000\r\n", memoryview(bytes(5000)), b"\r\n"] * 200
    link.write_out()
    assert [len(lines) for lines in bench.transport.lines[1:]] == [600], "many that are large on the average are not"
    assert len(bench.transport.written[-1]) == 12 * LARGE_FRAMES_BYTES


async def test_ping_and_err() -> None:
    bench = Bench()
    link = bench.link
    del link.control
    await bench.come(b"PING\r\n")
    assert link.out == [b"PONG\r\n"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await link.fence()
    waiting = asyncio.create_task(link.fence())
    second = asyncio.create_task(link.fence())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    written = b"".join(bench.transport.written)
    assert written.count(b"PING") == 2, "fences of one turn share one PING"
    await bench.come(b"PONG\r\nPONG\r\n")
    await asyncio.gather(waiting, second)


async def test_back_pressure() -> None:
    bench = Bench()
    seen: list[bool] = []
    bench.link.on_writable = seen.append
    bench.wire.pause_writing()
    assert not bench.link.writable
    bench.wire.resume_writing()
    bench.wire.pause_writing()
    bench.wire.connection_lost(None)
    assert seen == [False, True, False, True], "a connection that is gone holds nobody up"
    assert bench.former.lost == [None]
    assert bench.link.wire is None
    assert bench.wire.closed.done()


async def test_the_end_of_an_old_connection_leaves_the_new_one_alone() -> None:
    bench = Bench()
    new = bench.link.wire = NatsTransport(bench.link, FakeTransport(), cast(asyncio.BaseProtocol, Former()))
    bench.wire.connection_lost(ConnectionResetError())
    assert bench.link.wire is new


def many(count: int, kind: str) -> tuple[bytes, list[bytes]]:
    """Messages of subscription 1 in a row, or in turn with others, and their payloads."""
    payloads = [b"%05d" % number for number in range(count)]
    subjects = (b"a", b"a") if kind == "run" else (b"a", b"b")
    return b"".join(b"MSG %b 1 5\r\n%b\r\n" % (subjects[at % 2], one) for at, one in enumerate(payloads)), payloads


@pytest.mark.parametrize("kind", ["run", "single"])
async def test_what_takes_long_is_handled_in_turns(kind: str) -> None:
    """A read whose messages take a second: reading pauses, and the rest of the gateway has its turns."""
    bench = Bench(Slow)
    data, payloads = many(500, kind)
    bench.link.ticked = elapsed()
    bench.wire.data_received(data[:-3])
    assert 0 < len(bench.payloads) < 100
    assert not bench.transport.reading
    bench.wire.data_received(data[-3:] + b"PONG\r\n")
    turns = 0
    while len(bench.payloads) < 500:
        before = len(bench.payloads)
        await asyncio.sleep(0)
        bench.link.ticked = elapsed()
        turns += 1
        assert len(bench.payloads) - before < 100
    assert turns > 5
    assert bench.payloads == payloads
    await aeventually(lambda: bench.transport.reading)
    assert bench.events[-1] == (b"PONG",)


async def test_the_end_of_a_connection_comes_after_what_it_has_brought() -> None:
    bench = Bench(Slow)
    data, payloads = many(100, "single")
    bench.wire.data_received(data)
    assert len(bench.payloads) < 100
    bench.wire.connection_lost(None)
    assert bench.payloads == payloads
    assert bench.former.lost == [None]
    await asyncio.sleep(0)
    assert bench.payloads == payloads
