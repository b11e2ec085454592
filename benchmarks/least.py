# SPDX-License-Identifier: Apache-2.0
"""Not a broker: the least that a gateway in pure Python has to do for a message at QoS 1, to see what is left to gain.

Pairs at QoS 1 only, 3.1.1, well-formed packets. Each message is published in NATS, stored, and acknowledged when
JetStream has stored it. A clean subscriber gets it at once; a durable one gets what one consumer brings for all of
them. Nothing is checked, counted, limited or resumed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Final, cast

import uvloop

STORED: Final = b"least.stored."
INBOX: Final = b"least.inbox."
DELIVER: Final = b"least.deliver"
STREAM: Final = {"name": "LEAST", "subjects": ["least.stored.>"], "storage": "file", "num_replicas": 1}
CONSUMER: Final = {"ack_policy": "none", "deliver_subject": DELIVER.decode(), "mem_storage": True}
HEADERS: Final = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:0123456789ab0123456789ab01234567\r\nNmqtt-Client:least\r\n\r\n"


class Buffer:
    """Buffer of parts that are written together at the end of a turn of the event loop."""

    __slots__ = ("parts", "write")

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.write = write
        self.parts: list[bytes] = []

    def add(self, part: bytes) -> None:
        """Write a part with the others of this turn."""
        if not self.parts:
            asyncio.get_running_loop().call_soon(self._flush)
        self.parts.append(part)

    def _flush(self) -> None:
        parts, self.parts = self.parts, []
        self.write(b"".join(parts))


class Nats(asyncio.Protocol):
    """The connection to nats-server."""

    def __init__(self) -> None:
        self.waiting: dict[bytes, tuple[Buffer, bytes]] = {}
        """By the last token of the reply subject: who gets PUBACK, and the packet."""
        self.durable: dict[bytes, Subscriber] = {}
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count = 0
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make the stream and its consumer."""
        self.out = Buffer(cast("asyncio.Transport", transport).write)
        self.out.add(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n')
        self.out.add(b"SUB %b* 1\r\nSUB %b 2\r\n" % (INBOX, DELIVER))
        self._ask(b"STREAM.CREATE.LEAST", STREAM)

    def _ask(self, verb: bytes, body: object) -> None:
        payload = json.dumps(body).encode()
        self.out.add(b"PUB $JS.API.%b %bready %d\r\n%b\r\n" % (verb, INBOX, len(payload), payload))

    def _answered(self, answer: bytes) -> None:
        if b'"error"' in answer:
            self.ready.set_exception(RuntimeError(answer.decode()))
        elif b"stream_create_response" in answer:
            self._ask(b"CONSUMER.CREATE.LEAST", {"stream_name": "LEAST", "config": CONSUMER})
        elif b"consumer_create_response" in answer:
            self.ready.set_result(None)

    def publish(self, topic: bytes, payload: bytes, client: Buffer, puback: bytes) -> None:
        """Publish a message in NATS, and store it."""
        self._count += 1
        token = b"%x" % self._count
        self.waiting[token] = client, puback
        head, size = len(HEADERS), len(HEADERS) + len(payload)
        subject = topic.replace(b"/", b".")
        self.out.add(b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, head, size, HEADERS, payload))
        stored = (STORED, subject, INBOX, token, head, size, HEADERS, payload)
        self.out.add(b"HPUB %b%b %b%b %d %d\r\n%b%b\r\n" % stored)

    def data_received(self, data: bytes) -> None:
        """Handle acknowledgements of stores, and the consumer's messages."""
        data = self._rest + data
        at, end = 0, len(data)
        while (line := data.find(b"\r\n", at)) >= 0:
            if data[at] not in b"MH":
                if data.startswith(b"PING", at):
                    self.out.add(b"PONG\r\n")
                at = line + 2
                continue
            words = data[at:line].split(b" ")
            start = line + 2
            stop = start + int(words[-1])
            if stop + 2 > end:
                break
            at = stop + 2
            if words[2] == b"2":
                subscriber = self.durable.get(words[1][len(STORED) :])
                if subscriber is not None:
                    subscriber.deliver(data[start + int(words[-2]) : stop])
            elif (waiting := self.waiting.pop(words[1][len(INBOX) :], None)) is not None:
                waiting[0].add(waiting[1])
            elif words[1] == INBOX + b"ready":
                self._answered(data[start:stop])
        self._rest = data[at:]


class Subscriber:
    """A subscription, with the packet identifiers of messages that are not acknowledged."""

    __slots__ = ("_next", "_out", "_topic", "flying")

    def __init__(self, out: Buffer, topic: bytes) -> None:
        self._out = out
        self._topic = len(topic).to_bytes(2, "big") + topic
        self._next = 0
        self.flying: dict[bytes, bytes] = {}

    def deliver(self, payload: bytes) -> None:
        """Send a message at QoS 1."""
        self._next = self._next % 0xFFFF + 1
        identifier = self._next.to_bytes(2, "big")
        self.flying[identifier] = payload
        topic = self._topic
        self._out.add(b"2%b%b%b%b" % (_length(2 + len(topic) + len(payload)), topic, identifier, payload))


def _length(size: int) -> bytes:
    return bytes((size,)) if size < 128 else bytes((size & 0x7F | 0x80, size >> 7))


class Client(asyncio.Protocol):
    """The connection of an MQTT client."""

    def __init__(self, nats: Nats, clean: dict[bytes, Subscriber]) -> None:
        self._nats = nats
        self._clean = clean
        self._subscribers = clean
        self._own: Subscriber | None = None
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way to the client."""
        self._out = Buffer(cast("asyncio.Transport", transport).write)

    def data_received(self, data: bytes) -> None:
        """Handle packets of less than 16 KB."""
        data = self._rest + data
        at, end = 0, len(data)
        while end - at >= 2:
            size, start = data[at + 1], at + 2
            if size > 127:
                if start == end:
                    break
                size, start = size & 0x7F | data[start] << 7, start + 1
            if start + size > end:
                break
            kind = data[at]
            at = start + size
            if kind == 0x32:
                head = start + 2 + (data[start] << 8 | data[start + 1])
                topic = data[start + 2 : head]
                payload = data[head + 2 : at]
                self._nats.publish(topic, payload, self._out, b"@\2" + data[head : head + 2])
                if (subscriber := self._clean.get(topic)) is not None:
                    subscriber.deliver(payload)
            elif kind == 0x40:
                if self._own is not None:
                    del self._own.flying[data[start:at]]
            else:
                self._control(kind, data[start:at])
        self._rest = data[at:]

    def _control(self, kind: int, body: bytes) -> None:
        if kind == 0x10:
            if not body[7] & 2:
                self._subscribers = self._nats.durable
            self._out.add(b" \2\0\0")
        elif kind == 0x82:
            topic = body[4:-1]
            self._own = Subscriber(self._out, topic)
            self._subscribers[topic.replace(b"/", b".") if self._subscribers is self._nats.durable else topic] = (
                self._own
            )
            self._out.add(b"\x90\3" + body[:2] + b"\1")


async def serve(nats_port: int, port: int) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    _, nats = await loop.create_connection(Nats, "127.0.0.1", nats_port)
    await nats.ready
    clean: dict[bytes, Subscriber] = {}
    server = await loop.create_server(lambda: Client(nats, clean), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
