# SPDX-License-Identifier: Apache-2.0
"""NATS clients in the place of the load generator's MQTT clients: plain messages, without headers."""

from __future__ import annotations

import json
from typing import Final

from benchmarks.generator.clients import Greeting, LoadError, Publisher, Subscriber
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


def layout_of(topic: str, payload: int, *, received: bool) -> NatsLayout:
    """Protocol frame of a message that is published, or ``received``."""
    return NatsLayout(subject_of(topic), payload, SID if received else "")
