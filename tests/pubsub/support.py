# SPDX-License-Identifier: Apache-2.0
"""A link without NATS, members that keep what they get, and a table with both."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from mqtt_nats.backbone.link import Handler, NatsConnection
from mqtt_nats.backbone.transport import RunHandler
from mqtt_nats.messages.message import Message
from mqtt_nats.pubsub.backlog import Gate
from mqtt_nats.pubsub.fanout import Fanout
from mqtt_nats.pubsub.routing_table import PLAIN, Choice, Filter, Member, Options, Route, Table
from mqtt_nats.transport.write_buffer import FlushRound, WriteBuffer
from mqtt_streams.subjects import filter_to_subjects


def key_of(topic: str) -> bytes:
    """A topic as it stands in a PUBLISH packet."""
    encoded = topic.encode()
    return len(encoded).to_bytes(2, "big") + encoded


class FakeLink:
    """A link that keeps what it is given."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.subscribed: dict[bytes, tuple[bytes, Handler]] = {}
        self.renewed: list[bytes] = []
        self._count = 0

    def subscribe_raw(self, subject: bytes, handler: Handler) -> bytes:
        self._count += 1
        sid = b"%d" % self._count
        self.subscribed[sid] = subject, handler
        return sid

    def unsubscribe_raw(self, sid: bytes) -> None:
        del self.subscribed[sid]

    def renew(self, sid: bytes, subject: bytes) -> None:
        assert self.subscribed[sid][0] == subject
        self.renewed.append(subject)

    @property
    def subjects(self) -> list[bytes]:
        """What is subscribed, in order."""
        return [subject for subject, _ in self.subscribed.values()]


class Subscriber(Member):
    """A member that writes down what it gets, as (way, topic key, QoS)."""

    def __init__(
        self, bench: Bench, name: str, *, durable: bool = False, bridge: bool = False, version: int = 4
    ) -> None:
        super().__init__(WriteBuffer(bench.round, 10_000), durable, bridge)
        self.client_id = name
        self.version = version
        self.bytes: list[bytes | bytearray] = []
        self.write_buffer.send = self.bytes.append
        self.taken: list[tuple[bytes, int]] = []
        self.guarded: list[tuple[str, bytes, int, int]] = []

    def send_or_queue(self, message: Message, qos: int) -> None:
        self.taken.append((message.payload, qos))

    def guard(self, choice: Choice, message: Message, known: bytes = b"") -> None:
        self.guarded.append((choice.found.text, message.payload, message.qos, choice.qos))

    def close_gate(self, found: Filter) -> None:
        """Have new messages of a filter wait."""
        self.gates = {found: Gate(found, 1000)}

    @property
    def copies(self) -> int:
        """Messages received, whatever the way; each must have a payload of one byte."""
        return sum(map(len, self.bytes)) // 6 + len(self.taken) + len(self.guarded)


class Bench:
    """A table, a fan-out and two links."""

    def __init__(self, *, local_dispatch: bool = True) -> None:
        self.scheduled: list[Callable[[], None]] = []
        self.round = FlushRound(self.scheduled.append)
        self.main = FakeLink()
        self.wild = FakeLink()
        self.table = Table(local_dispatch)
        self.fanout = Fanout(self.table, cast(NatsConnection, self.main), self.round)

    def subscribe(
        self, member: Member, text: str, qos: int, options: Options = PLAIN, subjects: tuple[str, ...] = ()
    ) -> Filter:
        link = cast(NatsConnection, self.wild if text[0] in "#+" else self.main)
        subjects = subjects or filter_to_subjects(text)
        return self.table.subscribe(member, text, qos, subjects, link, self.fanout.arrival, options)

    def route(self, topic: str) -> Route:
        return self.table.route(key_of(topic))

    def turn(self) -> None:
        """End the turn of the event loop."""
        while self.scheduled:
            self.scheduled.pop(0)()

    def from_nats(self, subject: bytes, headers: bytes = b"", payload: bytes = b"x", reply: bytes = b"") -> None:
        """NATS delivers a message once for each subscription that matches."""
        for link in (self.main, self.wild):
            for pattern, handler in list(link.subscribed.values()):
                if _matches(pattern.decode().split("."), subject.decode().split(".")):
                    handler(subject, reply, headers, payload)
        self.turn()

    def run_from_nats(self, subject: bytes, *payloads: bytes) -> None:
        """NATS delivers messages in a row, and the link hands them on at once."""
        for link in (self.main, self.wild):
            for pattern, handler in list(link.subscribed.values()):
                if not _matches(pattern.decode().split("."), subject.decode().split(".")):
                    continue
                if isinstance(handler, RunHandler):
                    handler.run(subject, list(payloads))
                else:
                    for payload in payloads:
                        handler(subject, b"", b"", payload)
        self.turn()


def _matches(pattern: list[str], subject: list[str]) -> bool:
    for index, part in enumerate(pattern):
        if part == ">":
            return len(subject) > index
        if index >= len(subject) or part not in ("*", subject[index]):
            return False
    return len(pattern) == len(subject)
