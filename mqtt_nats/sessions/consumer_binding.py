# SPDX-License-Identifier: Apache-2.0
"""What a connection keeps about one of its consumers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mqtt_nats.protocol.inflight import Source
from mqtt_streams.consumers import ConsumerRef

if TYPE_CHECKING:
    from mqtt_nats.backbone.transport import Wire
    from mqtt_nats.messages.message import Stored


Came = Callable[["Stored", int], bool]
"""``came(message, sequence)``: whether core NATS has brought a stored message to the client."""


class Attachment:
    """One consumer, attached."""

    __slots__ = (
        "behind",
        "came",
        "consumer",
        "gone",
        "heirs",
        "key",
        "missed",
        "passing",
        "returning",
        "sid",
        "since",
        "source",
        "spent",
        "through",
        "wire",
    )

    def __init__(
        self,
        key: str,
        consumer: ConsumerRef,
        source: Source,
        came: Came | None = None,
    ) -> None:
        self.key = key
        """Key of the consumer in the session record; empty for one that is draining."""
        self.consumer = consumer
        self.source = source
        self.sid = b""
        self.wire: Wire | None = None
        """The connection to NATS on which the deliver subject was subscribed."""
        self.heirs: dict[Source, int] = {}
        """Once the subscription has ended: those that match the same, and how far they have left messages to it."""
        self.spent = True
        """Once the subscription has ended: nothing more comes that another subscription wants."""
        self.through = False
        """Once the subscription has ended: so it is, but for what was pending and has yet to come again."""
        self.returning = False
        """What was pending when it was attached last may have yet to come again: see `draining.returned`."""
        self.behind: list[Source] = []
        """Once the subscription has ended: those whose new messages wait until this is spent."""
        self.came = came
        """Where it has taken the place of QoS 0, or that its place: whether a message has come by that."""
        self.missed = False
        """A delivery was lost on its way: nothing more is taken until it has come again."""
        self.passing = False
        """The oldest messages are being passed over."""
        self.since = 0
        """Once it is live: the shared reader brings what comes after this sequence."""
        self.gone = (1, 0)
        """Sequences among which are those that were in flight and may have been removed."""
