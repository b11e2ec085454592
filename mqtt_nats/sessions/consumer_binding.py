# SPDX-License-Identifier: Apache-2.0
"""What a connection keeps about one of its consumers."""

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
"""``came(message, sequence)``: whether core NATS has brought a stored message to the client."""


class ConsumerBinding:
    """One consumer, attached."""

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
        """The connection to NATS on which the deliver subject was subscribed."""
        self.handover_limits: dict[SubscriptionState, int] = {}
        """Once the subscription has ended: those that match the same, and how far they have left messages to it."""
        self.drained = True
        """Once the subscription has ended: nothing more comes that another subscription wants."""
        self.through = False
        """Once the subscription has ended: so it is, but for what was pending and has yet to come again."""
        self.redelivering = False
        """What was pending when it was attached last may have yet to come again: see `draining.returned`."""
        self.behind: list[SubscriptionState] = []
        """Once the subscription has ended: those whose new messages wait until this is spent."""
        self.came = came
        """Where it has taken the place of QoS 0: whether a message has come by that."""
        self.gates: list[Gate] = []
        """Once QoS 0 has taken its place: what comes by that, and waits until this is spent and all of it is sent."""
        self._idle: asyncio.Event | None = None
        self.missed = False
        """A delivery was lost on its way: nothing more is taken until it has come again."""
        self.passing = False
        """The oldest messages are being passed over."""
        self.since = 0
        """Once it is live: the shared reader brings what comes after this sequence."""
        self.gone = (1, 0)
        """Sequences among which are those that were in flight and may have been removed."""

    def lowered(self, gates: list[Gate]) -> None:
        """QoS 0 has taken its place; what comes by that waits in ``gates``."""
        self.key = ""
        self.gates = gates
        self._idle = asyncio.Event()
        for gate in gates:
            gate.hold()

    def brings(self, message: Stored) -> None:
        """Its consumer has brought what may have come at QoS 0 too, and waits: that comes once."""
        known = identity(message.headers)
        for gate in self.gates:
            gate.discard(known)

    def emptied(self) -> None:
        """Its consumer says that it has nothing more."""
        if self._idle is not None:
            self._idle.set()

    async def rest(self, seconds: float) -> None:
        """Wait until it has said so since, for so many seconds at most."""
        if self._idle is None:
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        self._idle.clear()

    def release(self) -> list[Gate]:
        """What waits for it waits no more; returns the gates."""
        gates, self.gates = self.gates, []
        return gates
