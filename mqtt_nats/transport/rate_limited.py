# SPDX-License-Identifier: Apache-2.0
"""Rate-limited connections: a client that exceeds its rate is read from less often.

These connections have a class of their own, so that connections without a rate count nothing. A read is handled as a
whole; if the read exceeds the client's budget, the next read waits until the budget is balanced. TCP then slows the
client down.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from mqtt_nats.base.bucket import Bucket, depth
from mqtt_nats.codec import Limits, MqttError, Packet, Publish, PublishRun, ReasonCode
from mqtt_nats.transport.connection import Clock, Connection, Handler, Hold
from mqtt_nats.transport.write_buffer import FlushRound

if TYPE_CHECKING:
    from collections.abc import Callable

    from mqtt_nats.transport.listener_settings import ConnectionSettings


def paced(settings: ConnectionSettings) -> bool:
    """Return whether the settings have a rate."""
    return settings.message_rate is not None or settings.byte_rate is not None


class PacedConnection(Connection):
    """Connection with `message_rate` or `byte_rate`."""

    __slots__ = ("_bytes", "_messages", "_timer")

    def __init__(
        self,
        limits: Limits,
        round_: FlushRound,
        settings: ConnectionSettings,
        clock: Clock,
        made: Callable[[Connection], Handler | None],
    ) -> None:
        super().__init__(limits, round_, settings, clock, made)  # by position: mypyc does not pass `*arguments` on
        now = monotonic()

        def bucket(rate: float | None) -> Bucket | None:
            return None if rate is None else Bucket(rate, depth(rate, settings.rate_burst), now)

        self._bytes = bucket(settings.byte_rate)
        self._messages = bucket(settings.message_rate)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up the connection, with a counter of messages if there is a rate."""
        super().connection_made(transport)
        if self.handler is not None and self._messages is not None:
            self.handler = Counting(self.handler, self)

    def data_received(self, data: bytes) -> None:
        """Handle a read, and delay the next read if this one exceeds the rate."""
        kept = self._holds & Hold.STANDSTILL
        super().data_received(data)
        if self._bytes is not None and not kept:
            self.wait(self._bytes.pour(len(data), monotonic()))

    @property
    def metered(self) -> bool:
        """Whether the read bytes or messages are counted: always."""
        return True

    def inner(self, otherwise: Handler) -> Handler:
        """Return the handler behind the counter, for packets that were counted before."""
        handler = self.handler
        return (handler.handler if isinstance(handler, Counting) else handler) or otherwise

    def published(self, count: int) -> None:
        """Count PUBLISH packets of the client."""
        assert self._messages is not None
        self.wait(self._messages.pour(count, monotonic()))

    def wait(self, seconds: float) -> None:
        """Read nothing for some seconds; end the connection if the time is longer than `rate_pause`."""
        handler = self.handler
        if not seconds or handler is None:
            return
        if seconds > self.settings.rate_pause:
            handler.broken(
                MqttError("the client exceeds message_rate or byte_rate by far", ReasonCode.MESSAGE_RATE_TOO_HIGH)
            )
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() >= loop.time() + seconds:
                return
            self._timer.cancel()
        self.hold(Hold.RATE)
        self._timer = loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        self.release(Hold.RATE)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer: the socket is closed."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)


class Counting:
    """Handler that counts PUBLISH packets and passes all packets to another handler."""

    __slots__ = ("_connection", "handler")

    def __init__(self, handler: Handler, connection: PacedConnection) -> None:
        self.handler: Handler | None = handler
        self._connection = connection

    def hand_to(self, handler: Handler) -> None:
        """Pass the packets to another handler from now on."""
        self.handler = handler

    def broken(self, error: MqttError) -> None:
        """Pass a protocol violation on."""
        if self.handler is not None:
            self.handler.broken(error)

    def lost(self) -> None:
        """Pass the end on."""
        if self.handler is not None:
            self.handler.lost()

    def packets(self, packets: list[Packet]) -> None:
        """Pass the packets of one read on, and count the PUBLISH packets."""
        if self.handler is None:
            return
        self.handler.packets(packets)
        count = sum(
            one.count if isinstance(one, PublishRun) else 1 for one in packets if isinstance(one, PublishRun | Publish)
        )
        if count:
            self._connection.published(count)
