# SPDX-License-Identifier: Apache-2.0
"""Clients that read as fast, as slowly or as little as an experiment wants, and what goes on beside them.

They write no histories: a million messages are counted as they come. Payloads begin with a number and a blank.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, cast

import psutil

from mqtt_nats.codec import (
    PINGREQ,
    AckRun,
    ClientDecoder,
    Connack,
    Connect,
    Limits,
    PingResp,
    Publish,
    PublishRun,
    Suback,
    Subscribe,
    Subscription,
    ack_bytes,
    encode,
    encode_publish,
)
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT
from tests.harness.process import LoggedProcess
from tests.harness.waiting import aeventually

MIB = 1024 * 1024
PATIENCE = 60.0
"""Seconds for anything that a client asks for."""

_LIMITS = Limits(1 << 28, 1 << 28, 65_535, 65_535, 65_535)
_SAMPLE = 0.05  # seconds between two looks at the memory

Heard = Callable[[str, bytes, int, bool, bool], None]
"""``heard(topic, payload, qos, dup, retain)`` for each message of the application."""


class Paced(asyncio.Protocol):
    """An MQTT 3.1.1 client; :meth:`connect` makes one.

    Args:
        heard: gets every message; at QoS 2 once.
    """

    def __init__(self, heard: Heard | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.rate = 0.0
        """Bytes per second that are read; 0: as many as come."""
        self.received = 0
        """Messages."""
        self.closed = loop.create_future()
        """Done when the connection has ended."""
        self._heard = heard
        self._decoder = ClientDecoder(_LIMITS, 4)
        self._transport: asyncio.Transport | None = None
        self._stopped = False
        self._answers: dict[str, asyncio.Future[None]] = {}
        self._pending: set[int] = set()
        self._room = asyncio.Event()
        self._next = 0
        self._held: set[int] = set()
        self._later: asyncio.TimerHandle | None = None

    @classmethod
    async def connect(
        cls, port: int, client_id: str, *, clean: bool = True, heard: Heard | None = None, buffer: int = 0
    ) -> Self:
        """A client that was let in; ``buffer``: bytes of its socket's receive buffer, 0 = as the kernel likes."""
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setblocking(False)
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        client = cls(heard)
        await loop.create_connection(lambda: client, sock=sock)
        await client._ask("connack", encode(Connect(4, client_id, clean, 0), 4))
        return client

    async def _ask(self, name: str, data: bytes) -> None:
        answer = self._answers[name] = asyncio.get_running_loop().create_future()
        self._write(data)
        async with asyncio.timeout(PATIENCE):
            await answer

    def _answered(self, name: str) -> None:
        answer = self._answers.pop(name, None)
        if answer is not None and not answer.done():
            answer.set_result(None)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The TCP connection is there."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self.closed.set_result(None)
        self._room.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the gateway has closed the connection"))

    # -- reading --------------------------------------------------------------------------------

    def stop(self) -> None:
        """Read nothing more."""
        self._stopped = True
        if self._transport is not None:
            self._transport.pause_reading()

    def go_on(self) -> None:
        """Read again."""
        self._stopped = False
        self._resume()

    def _resume(self) -> None:
        self._later = None
        if not self._stopped and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Bytes of the server's."""
        if self.rate and self._transport is not None:
            self._transport.pause_reading()
            if self._later is None:
                self._later = asyncio.get_running_loop().call_later(len(data) / self.rate, self._resume)
        answers: list[bytes] = []
        for packet in self._decoder.feed(data):
            if isinstance(packet, Publish):
                self._message(packet, answers)
            elif isinstance(packet, PublishRun):
                self.received += packet.count
                if self._heard is not None:
                    for payload in packet.payloads():
                        self._heard(packet.key[2:].decode(), payload, 0, False, False)
            elif isinstance(packet, AckRun):
                self._acknowledged(packet, answers)
            elif isinstance(packet, Connack):
                assert not packet.code, packet
                self._answered("connack")
            elif isinstance(packet, Suback):
                assert all(code < 0x80 for code in packet.codes), packet
                self._answered("suback")
            elif isinstance(packet, PingResp):
                self._answered("pingresp")
        assert self._decoder.error is None, self._decoder.error
        if answers:
            self._write(b"".join(answers))

    def _message(self, packet: Publish, answers: list[bytes]) -> None:
        qos, identifier = packet.qos, packet.packet_id
        if qos:
            answers.append(ack_bytes(4 if qos == 1 else 5, identifier))
        if qos == 2:
            if identifier in self._held:
                return
            self._held.add(identifier)
        self.received += 1
        if self._heard is not None:
            self._heard(packet.key[2:].decode(), packet.payload, qos, packet.dup, packet.retain)

    def _acknowledged(self, packet: AckRun, answers: list[bytes]) -> None:
        if packet.kind == 6:
            self._held.difference_update(packet.ids)
            answers.extend(ack_bytes(7, identifier) for identifier in packet.ids)
        elif packet.kind == 5:
            answers.extend(ack_bytes(6, identifier) for identifier in packet.ids)
        else:
            self._pending.difference_update(packet.ids)
            self._room.set()

    # -- what the application does ----------------------------------------------------------------

    async def subscribe(self, topic_filter: str, qos: int) -> None:
        """Subscribe and wait for SUBACK."""
        await self._ask("suback", encode(Subscribe(1, (Subscription(topic_filter, qos),)), 4))

    def subscribe_soon(self, topic_filter: str, qos: int) -> None:
        """Subscribe without waiting."""
        self._write(encode(Subscribe(1, (Subscription(topic_filter, qos),)), 4))

    async def ping(self) -> None:
        """A PINGREQ round trip."""
        await self._ask("pingresp", PINGREQ)

    async def publish(
        self, messages: list[tuple[str, bytes]], qos: int, *, window: int = 500, retain: bool = False
    ) -> None:
        """Publish, with at most ``window`` messages unacknowledged; returns when all are acknowledged."""
        step = max(window // 4, 1)
        for start in range(0, len(messages), step):
            frames: list[bytes] = []
            for topic, payload in messages[start : start + step]:
                identifier = 0
                if qos:
                    self._next = identifier = self._next % 65_535 + 1
                    self._pending.add(identifier)
                key = topic.encode()
                key = len(key).to_bytes(2, "big") + key
                frames.append(encode_publish(key, payload, qos, retain, False, identifier, 4, None))
            self._write(b"".join(frames))
            if not qos:
                await self.ping()  # no faster than the server takes it
            while len(self._pending) > window - step and not self.closed.done():
                await self._wait()
        while self._pending and not self.closed.done():
            await self._wait()
        assert not self.closed.done(), "a publisher has lost its connection"

    async def _wait(self) -> None:
        self._room.clear()
        async with asyncio.timeout(PATIENCE):
            await self._room.wait()

    def drop(self) -> None:
        """End the connection, as a crash would."""
        if self._transport is not None:
            self._transport.abort()


@dataclass
class Tally:
    """Numbers that have to come once and in order, counted from 0.

    Attributes:
        expected: how many.
        next: the number that comes next.
        dups: how many came with DUP.
        wrong: one line for each that was lost, repeated or out of order; the first few.
    """

    expected: int
    next: int = 0
    dups: int = 0
    wrong: list[str] = field(default_factory=list)

    def heard(self, topic: str, payload: bytes, qos: int, dup: bool, retain: bool) -> None:
        """A message has come."""
        number = int(payload.split(b" ", 1)[0])
        self.dups += dup
        if number != self.next and len(self.wrong) < 5:
            self.wrong.append(f"{topic}: {number} came in place of {self.next}")
        self.next = number + 1

    @property
    def complete(self) -> bool:
        """Whether the last has come."""
        return self.next >= self.expected


# -- beside them ----------------------------------------------------------------------------------------


class Memory:
    """The resident memory of a gateway, sampled; all in bytes."""

    def __init__(self, gateway: Gateway) -> None:
        self._process = psutil.Process(gateway.pid)
        self.peak = 0

    @property
    def now(self) -> int:
        """What it has now."""
        found: int = self._process.memory_info().rss
        self.peak = max(self.peak, found)
        return found

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[Self]:
        """Sample until the end."""

        async def sample() -> None:
            while True:
                _ = self.now
                await asyncio.sleep(_SAMPLE)

        task = asyncio.create_task(sample())
        try:
            yield self
        finally:
            task.cancel()


class Probe:
    """A process of its own that publishes to itself all the time: how long others wait, unmoved by our own load.

    Delays are in seconds: from PUBLISH at QoS 1 to the message's arrival, and to its PUBACK.
    """

    def __init__(self, log: Path, port: int) -> None:
        self.process = LoggedProcess("probe", log)
        self._command = [sys.executable, "-m", "tests.chaos.probing", str(port)]
        self._log = log

    def start(self) -> None:
        """Begin."""
        self.process.start(self._command, None, ROOT)

    def measured(self, since: float, until: float = float("inf")) -> tuple[list[float], list[float]]:
        """Delays of arrivals and of PUBACKs of what was under way between two times of the monotonic clock."""
        arrivals: list[float] = []
        acks: list[float] = []
        for line in self._log.read_text(encoding="utf-8").splitlines():
            parts = line.split()
            if len(parts) != 3:
                continue
            begun, arrival, ack = map(float, parts)
            if begun <= until and since <= begun + max(arrival, ack):
                arrivals.append(arrival)
                acks.append(ack)
        return arrivals, acks

    @property
    def alive(self) -> bool:
        """Whether it goes on: it ends when something that it waits for does not come."""
        return self.process.alive

    async def settled(self, count: int = 20) -> None:
        """Wait until it has measured some more."""
        since = time.monotonic()
        await aeventually(lambda: len(self.measured(since)[0]) >= count or not self.alive, PATIENCE)


def spread(delays: list[float]) -> str:
    """Median, 99th percentile and maximum, in milliseconds."""
    if len(delays) < 2:
        return "none"
    p99 = statistics.quantiles(delays, n=100)[98]
    return f"{statistics.median(delays) * 1e3:.1f} / {min(p99, max(delays)) * 1e3:.1f} / {max(delays) * 1e3:.1f}"
