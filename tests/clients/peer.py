# SPDX-License-Identifier: Apache-2.0
"""The other side of a scenario: MQTT 3.1.1 by hand, so that no library is tested against itself."""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Self

from tests.clients.program import Message
from tests.harness import raw


class Peer:
    """A client of the broker at ``port``, with a clean session or with the durable one of ``client_id``.

    Args:
        port: of the broker.
        client_id: empty for a clean session.
        clean: a clean session all the same, which removes a durable one.
    """

    def __init__(self, port: int, client_id: str = "", *, clean: bool = False) -> None:
        self._raw = raw.Raw.connected(port, client_id, clean=clean or not client_id, keepalive=0)
        self._ids = itertools.count(1)
        self._messages: list[Message] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._raw.send(raw.packet(raw.DISCONNECT << 4))
        self._raw.close()

    def subscribe(self, topic_filter: str, qos: int = 2) -> None:
        """Subscribe, and wait for SUBACK."""
        assert self._raw.subscribe((topic_filter, qos)) == [qos]

    def publish(self, topic: str, qos: int, payload: str, *, retain: bool = False) -> None:
        """Publish, and wait for the acknowledgement."""
        identifier = next(self._ids)
        self._raw.send(raw.publish(topic, payload.encode(), qos=qos, id=identifier, flags=int(retain)))
        if qos == 1:
            self._until(raw.PUBACK)
        elif qos == 2:
            self._until(raw.PUBREC)
            self._raw.send(raw.ack(raw.PUBREL, identifier))
            self._until(raw.PUBCOMP)

    def receive(self, count: int) -> list[Message]:
        """Wait for ``count`` messages in all; every one so far."""
        while len(self._messages) < count:
            self._next()
        return self._messages

    def receive_all(self, wanted: list[Message]) -> list[Message]:
        """Wait until each message has arrived, once or more; every one so far."""
        while set(wanted) - set(self._messages):
            self._next()
        return self._messages

    def settled(self) -> list[Message]:
        """Every message that the broker has sent before it answers a PINGREQ."""
        self._raw.send(raw.packet(raw.PINGREQ << 4))
        self._until(raw.PINGRESP)
        return self._messages

    def _until(self, kind: int) -> None:
        while self._next() != kind:
            pass

    def _next(self) -> int:
        try:
            one = self._raw.receive()
        except TimeoutError:
            raise AssertionError(f"nothing more arrives behind {self._messages}") from None
        assert one is not None, "the broker has closed the connection"
        if one.kind == raw.PUBREL:
            self._raw.send(raw.ack(raw.PUBCOMP, one.id))
        elif one.kind == raw.PUBLISH:
            if one.qos:
                self._raw.send(raw.ack(raw.PUBACK if one.qos == 1 else raw.PUBREC, one.id))
            self._messages.append(Message(one.topic, one.qos, one.payload.decode(errors="replace")))
        return one.kind
