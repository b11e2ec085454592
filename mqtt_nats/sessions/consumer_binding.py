# SPDX-License-Identifier: Apache-2.0
"""Binding of a durable session's consumer to the client's connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from mqtt_nats.messages.headers import identity
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_streams.consumers import ConsumerRef

if TYPE_CHECKING:
    from mqtt_nats.backbone.transport import NatsTransport
    from mqtt_nats.messages.message import Stored
    from mqtt_nats.pubsub.backlog import Gate


Came = Callable[["Stored", int], bool]
"""``came(message, sequence)``: whether core NATS has already brought a stored message to the client."""


class ConsumerBinding:
    """A consumer of a durable session, attached to the client's connection or about to be."""

    __slots__ = (
        "_idle",
        "behind",
        "came",
        "consumer",
        "drained",
        "gates",
        "gone",
        "handover_limits",
        "key",
        "missed",
        "passing",
        "redelivering",
        "sid",
        "since",
        "source",
        "through",
        "wire",
    )

    def __init__(
        self,
        key: str,
        consumer: ConsumerRef,
        source: SubscriptionState,
        came: Came | None = None,
    ) -> None:
        self.key = key
        """Key of the consumer in the session record; empty for one that is draining."""
        self.consumer = consumer
        self.source = source
        self.sid = b""
        self.wire: NatsTransport | None = None
        """Connection to NATS on which the deliver subject was subscribed; None = not subscribed yet."""
        self.handover_limits: dict[SubscriptionState, int] = {}
        """Stream sequences up to which overlapping subscriptions left messages to this one, which has ended."""
        self.drained = True
        """Drained: no undelivered message of this consumer matches a remaining filter. Set by `delivery.draining`."""
        self.through = False
        """Drained, except for redeliveries of messages that were pending when the subscription ended."""
        self.redelivering = False
        """Whether pending messages may have to come again since the last attachment: see `draining.returned`."""
        self.behind: list[SubscriptionState] = []
        """Subscriptions whose new messages wait until this one, which has ended, is drained."""
        self.came = came
        """Whether core NATS has brought a message, for a subscription raised from QoS 0; None = it was not raised."""
        self.gates: list[Gate] = []
        """Gates of a subscription lowered to QoS 0: messages of core NATS wait there until the consumer's are sent."""
        self._idle: asyncio.Event | None = None
        self.missed = False
        """Whether a delivery was lost on its way: later deliveries are not taken until it has come again."""
        self.passing = False
        """Whether the oldest messages are being passed over (`max_backlog`)."""
        self.since = 0
        """Stream sequence after which the shared reader brings the messages of a live subscription; 0 = not live."""
        self.gone = (1, 0)
        """First and last stream sequence between which messages were pending when the consumer was attached."""

    @property
    def not_come(self) -> tuple[int, int]:
        """First and last sequence of `gone`, without the messages that have come for the first time since then."""
        first, last = self.gone
        return first, min(last, self.source.base - 1) if self.source.base else last

    def lowered(self, gates: list[Gate]) -> None:
        """Mark the subscription as lowered to QoS 0; messages of core NATS wait in ``gates``."""
        self.key = ""
        self.gates = gates
        self._idle = asyncio.Event()
        for gate in gates:
            gate.hold()

    def brings(self, message: Stored) -> None:
        """Discard the copy of a message that waits in a gate: the consumer has brought the message."""
        known = identity(message.headers)
        for gate in self.gates:
            gate.discard(known)

    def emptied(self) -> None:
        """Note that the consumer reports no further messages."""
        if self._idle is not None:
            self._idle.set()

    async def rest(self, seconds: float) -> None:
        """Wait until :meth:`emptied` is called, for at most ``seconds``."""
        if self._idle is None:
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        self._idle.clear()

    def release(self) -> list[Gate]:
        """Return the gates, which do not wait for this consumer any more."""
        gates, self.gates = self.gates, []
        return gates
