# SPDX-License-Identifier: Apache-2.0
"""What the way of a message needs of its gateway, where compiled code has it without looking names up.

The parts are those of :class:`mqtt_nats.gateway.broker.Broker`, for as long as it lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqtt_nats.backbone.acked_publisher import Store
from mqtt_nats.backbone.link import ENOUGH
from mqtt_nats.messages.ids import MessageIds
from mqtt_nats.pubsub.fanout import Fanout
from mqtt_nats.pubsub.routing_table import Table
from mqtt_nats.transport.write_buffer import Round

if TYPE_CHECKING:
    from mqtt_nats.backbone.link import Link


class Path:
    """The message path of one gateway.

    Args:
        received: messages of clients, by QoS, and their payloads in bytes: counted here.
    """

    __slots__ = (
        "blocked",
        "fanout",
        "ids",
        "link",
        "out",
        "received",
        "received_bytes",
        "round",
        "store",
        "table",
        "with_ids",
    )

    def __init__(
        self,
        link: Link,
        store: Store,
        table: Table,
        fanout: Fanout,
        round_: Round,
        received: list[int],
        received_bytes: list[int],
        ids: MessageIds,
    ) -> None:
        self.link, self.store, self.table, self.fanout, self.round = link, store, table, fanout, round_
        self.out: list[bytes | memoryview] = link.out
        """Frames for NATS that leave at the end of this turn; the link has no other list."""
        self.received, self.received_bytes = received, received_bytes
        self.ids = ids
        self.blocked = False
        """NATS does not take as much as clients publish: publishers are not read from."""
        self.with_ids = False
        """QoS 1 messages are stored under an id, by which their stream recognises a repetition."""

    def leave(self) -> None:
        """Something has been collected for clients and for NATS: it leaves when the turn ends, or before."""
        self.round.start()
        link = self.link
        if not link.scheduled or len(self.out) >= ENOUGH:  # else that is seen to: there are many reads in a turn
            link.push()
