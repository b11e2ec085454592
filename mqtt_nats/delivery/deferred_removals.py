# SPDX-License-Identifier: Apache-2.0
"""Records of QoS 2 messages that are complete, kept until nobody can need them.

A nats-server writes what its consumers have delivered, and what was acknowledged, about ten times a second. One that is
killed has forgotten the end of it, also acknowledgements that it has confirmed, and delivers those messages once more.
The record of a PUBREL says that the client has the message, the assignment of a shared subscription's message that no
other member gets it; so each stays a little longer than it is needed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from mqtt_nats.protocol.ack_tokens import ASSIGNED

if TYPE_CHECKING:
    from mqtt_nats.backbone.pending import Op
    from mqtt_nats.gateway.broker import Broker

LINGER: Final = 0.3
"""Seconds from the end of an exchange to the end of its record."""

AFTERWARDS: Final = 5.0
"""Seconds from when the server that delivers may be another one: what it has forgotten comes again meanwhile."""


class Lingering:
    """The ends of one session's records, which are put off by `LINGER` seconds."""

    __slots__ = ("_broker", "_ended", "_loop", "_waiting")

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[float, bytes, Op]] = deque()
        self._ended = False

    def add(self, token: bytes, operation: Op) -> None:
        """Let go of a record later; ``operation`` hears of the end of an assignment.

        After the end of the connection it is left to the next owner, who may have read it already.
        """
        if self._ended:
            return
        if not self._waiting:
            self._loop.call_later(LINGER, self._flush)
        self._waiting.append((self._loop.time() + LINGER, token, operation))

    def end(self) -> None:
        """The connection ends: let go of all now, or the next owner finds a record that goes away under its hands.

        Where NATS may have forgotten what was acknowledged, all is left to the next owner: it sends PUBREL once more.
        """
        self._ended = True
        if self._forgetful:
            self._waiting.clear()
        while self._waiting:
            self._let_go()
        self._broker.link.kick()

    @property
    def _forgetful(self) -> bool:
        """Whether a server may send again what it has forgotten."""
        return not self._broker.link.online or self._loop.time() < self._broker.relinked + AFTERWARDS

    def _flush(self) -> None:
        now = self._loop.time()
        if self._forgetful:
            self._loop.call_later(LINGER, self._flush)
            return
        while self._waiting and self._waiting[0][0] <= now:
            self._let_go()
        self._broker.link.kick()
        if self._waiting:
            self._loop.call_at(self._waiting[0][0], self._flush)

    def _let_go(self) -> None:
        _, token, operation = self._waiting.popleft()
        if token.startswith(ASSIGNED):
            self._broker.drop_assignment(token[1:], operation)
        else:
            self._broker.link.out.append(b"PUB %b 0\r\n\r\n" % token[1:])
