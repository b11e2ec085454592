# SPDX-License-Identifier: Apache-2.0
"""NATS clients on the load generator's loop: in the place of its MQTT clients, and one for requests."""

from __future__ import annotations

import json
import socket
from abc import abstractmethod
from typing import Final

from benchmarks.generator.clients import Connection, Greeting, LoadError, Loop, Publisher, Subscriber
from benchmarks.generator.packets import DeliveryError, NatsLayout

SID: Final = "1"

_PING, _PONG = b"PING\r\n", b"PONG\r\n"
_CONNECT: Final = json.dumps({"verbose": False, "pedantic": False, "headers": False, "protocol": 0, "lang": "bench"})


def subject_of(topic_filter: str) -> str:
    """The NATS subject of a topic or filter that has no other special characters."""
    return topic_filter.translate(str.maketrans("/+", ".*"))


class NatsGreeting(Greeting):
    """From connect() to the PONG that follows the subscription."""

    def hello(self) -> bytes:
        """CONNECT, the subscription if there is one, and PING; the server's INFO tells nothing that matters."""
        topic_filter = self.client.topic_filter
        subscription = f"SUB {subject_of(topic_filter)} {SID}\r\n" if topic_filter else ""
        return f"CONNECT {_CONNECT}\r\n{subscription}".encode() + _PING

    def readable(self) -> None:
        end = self.fill()
        data = bytes(self.loop.view[:end])
        if b"-ERR" in data:
            raise LoadError(f"{self.name}: {data.decode(errors='replace').strip()}")
        found = data.find(_PONG)
        self.done = found >= 0
        self.keep(found + len(_PONG) if self.done else 0, end)


class NatsSubscriber(Subscriber):
    """Verifies and counts messages; PINGs of the server may stand between them."""

    def handle(self, end: int) -> None:
        layout, data = self.verifier.layout, self.loop.buffer
        size, start = layout.size, 0
        self._stamp = 0
        while (count := (end - start) // size) or end - start >= len(_PING):
            column = data[start : start + count * size : size]
            whole = len(column) - len(column.lstrip(b"M"))
            if whole:
                self._stamp = self._stamp or self.stamp(start, whole)
                self.verifier.take(data, start, whole)
                start += whole * size
            elif data.startswith(_PING, start):
                self.send(_PONG)
                start += len(_PING)
            elif data.startswith(b"MSG", start):
                break
            else:
                raise DeliveryError(f"{self.name}: unexpected {bytes(data[start : min(end, start + 40)])!r}")
        self.keep(start, end)
        self.loop.ready.update(self.publishers)


class NatsPublisher(Publisher):
    """Sends numbered messages; nothing is acknowledged."""

    def readable(self) -> None:
        end = self.fill()
        data = bytes(self.loop.view[:end])
        if b"-ERR" in data:
            raise LoadError(f"{self.name}: {data.decode(errors='replace').strip()}")
        for _ in range(data.count(_PING)):
            self.send(_PONG)
        kept = data.rfind(b"\n") + 1
        self.keep(kept, end)


class NatsRequester(Connection):
    """Hands over whole messages, with headers or without; what it sends, it sends as frames of the protocol."""

    def __init__(self, loop: Loop, address: tuple[str, int], name: str, *subjects: str) -> None:
        """Connect, and subscribe to the subjects."""
        sock = socket.create_connection(address, 10)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(loop, sock, name)
        loop.add(self)
        self.send(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n')
        for sid, subject in enumerate(subjects, 1):
            self.send(f"SUB {subject} {sid}\r\n".encode())

    @abstractmethod
    def message(self, subject: bytes, headers: bytes, payload: bytes) -> None:
        """Take a message; no headers: empty."""

    def readable(self) -> None:
        end, at = self.fill(), 0
        data = bytes(self.loop.view[:end])
        while (found := data.find(b"\r\n", at)) >= 0:
            words, after = data[at:found].split(), found + 2
            if words[0] in (b"MSG", b"HMSG"):
                body = after + (int(words[-2]) if words[0] == b"HMSG" else 0)
                stop = after + int(words[-1])
                if stop + 2 > end:
                    break
                self.message(words[1], data[after:body], data[body:stop])
                after = stop + 2
            elif words[0] == b"PING":
                self.send(_PONG)
            elif words[0] == b"-ERR":
                raise LoadError(f"{self.name}: {data[at:found].decode(errors='replace')}")
            at = after
        self.keep(at, end)


def layout_of(topic: str, payload: int, *, received: bool) -> NatsLayout:
    """Protocol frame of a message that is published, or ``received``."""
    return NatsLayout(subject_of(topic), payload, SID if received else "")
