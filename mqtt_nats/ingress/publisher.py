# SPDX-License-Identifier: Apache-2.0
"""The publishing side of a session: its acknowledgements to come, and the services that publishing needs."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from mqtt_nats.ingress.qos2 import Inbound
from mqtt_nats.ingress.receipts import RECEIPTS_LOW, Acknowledgement
from mqtt_nats.sessions.session import Session
from mqtt_nats.transport.connection import Connection, Hold

if TYPE_CHECKING:
    from mqtt_nats.ingress.interceptors import Takers
    from mqtt_nats.ingress.request_reply import Replying
    from mqtt_nats.ingress.retained_store import RetainedStores
    from mqtt_nats.observability.sys_topics import System
    from mqtt_nats.sessions.services import Registry, Services


class Ingress:
    """Services of one account for messages that are published, by clients or by the gateway."""

    __slots__ = ("registry", "replying", "retained", "services", "system", "takers")

    def __init__(
        self,
        services: Services,
        registry: Registry[Publisher],
        replying: Replying,
        takers: Takers,
        retained: RetainedStores,
        system: System,
    ) -> None:
        self.services = services
        self.registry = registry
        self.replying = replying
        self.takers = takers
        self.retained = retained
        self.system = system


class Publisher(Session):
    """A session and its publishes that are not acknowledged; abstract: `Client` handles the packets."""

    __slots__ = ("ingress", "qos2", "receipts", "unacknowledged")

    def __init__(self, connection: Connection, ingress: Ingress) -> None:
        super().__init__(connection, ingress.services)
        self.ingress = ingress
        self.qos2: Inbound | None = None
        """QoS 2 publishes of the client; None = there were none, as of most clients."""
        self.receipts: list[Acknowledgement] = []  # a deque takes 700 bytes more in every connection
        self.unacknowledged = 0
        """Number of QoS 1 publishes of a 5.0 client that wait for PUBACK."""

    @property
    def inbound(self) -> Inbound:
        """QoS 2 publishes of the client; made with the first one, since most clients have none."""
        if self.qos2 is None:
            self.qos2 = Inbound()
        return self.qos2

    @abstractmethod
    def proceed(self) -> None:
        """Handle the waiting packets, unless a packet before them has not taken effect yet."""

    def count_unacknowledged(self) -> None:
        """Count a QoS 1 publish that waits for PUBACK."""
        self.unacknowledged += 1

    def settle(self) -> None:
        """Send every acknowledgement that is due, in order [MQTT-4.6.0-2] [MQTT-4.6.0-3]."""
        receipts = self.receipts
        data, due = b"", 0
        for receipt in receipts:
            if receipt.left:
                break
            due += 1
            data += receipt.packet()
            if receipt.kind == 4:
                self.unacknowledged -= 1
        if due:
            del receipts[:due]
            self.outlet.write(data)
        if len(receipts) < RECEIPTS_LOW:
            self.connection.release(Hold.WINDOW)
