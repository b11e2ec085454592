# SPDX-License-Identifier: Apache-2.0
"""The sender's side of a durable session without a client: what a test gives, and the state of a real one."""

from __future__ import annotations

from typing import Any

from mqtt_nats.protocol.durable_sender import DurableSender
from mqtt_nats.protocol.ports import NOWHERE
from mqtt_nats.sessions.consumer_binding import SessionConsumers


class Side(SessionConsumers):
    """In place of a `DurableDelivery`, with the attributes that a test gives."""

    client: Any
    keeper: Any
    stall: Any
    catching: Any

    def __init__(self, machine: DurableSender | None = None, **given: Any) -> None:
        super().__init__(DurableSender(10, NOWHERE) if machine is None else machine, 0)
        self.client = self.keeper = self.stall = self.catching = None
        for name, value in given.items():
            setattr(self, name, value)

    def begin_stall(self, stall: Any) -> None:
        self.stall = stall

    def end_stall(self) -> None:
        self.stall = None

    def store_position_with(self, keeper: Any) -> None:
        self.keeper = keeper
