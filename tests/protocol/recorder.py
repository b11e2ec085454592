# SPDX-License-Identifier: Apache-2.0
"""A durable session's sender, and ports that write down what it asks of them."""

from __future__ import annotations

from mqtt_nats.protocol.durable_sender import DurableSender
from mqtt_nats.protocol.inflight import Delivery, SubscriptionState

PUBACK, PUBREC, PUBREL, PUBCOMP = 4, 5, 6, 7


class Recorder:
    """Ports that write down what is asked of them, oldest first."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.sought = 0
        self.waited = 0
        self.written: list[SubscriptionState] = []

    def send(self, data: bytes) -> None:
        self.calls.append(("send", data))

    def publish(self, delivery: Delivery, dup: bool) -> bool:
        self.calls.append(("publish", delivery.sequence, delivery.qos, dup))
        return True

    def ack(self, reply: bytes, identifier: int = 0) -> None:
        self.calls.append(("confirm", reply, identifier) if identifier else ("ack", reply))

    def store_pubrel(self, identifier: int, sequence: int) -> None:
        self.calls.append(("store", identifier, sequence))

    def allocate(self, sequence: int, identifier: int) -> None:
        self.calls.append(("allocate", sequence, identifier))

    def end_allocation(self, sequence: int, identifier: int) -> None:
        self.calls.append(("end allocation", sequence, identifier))

    def report_no_identifier(self) -> None:
        self.calls.append(("no identifier",))

    def report_waiting(self) -> None:
        self.waited += 1

    def report_sent(self, source: SubscriptionState) -> None:
        self.written.append(source)

    def seek(self) -> None:
        self.sought += 1

    def take(self) -> list[tuple[object, ...]]:
        """What was asked since the last look."""
        calls, self.calls = self.calls, []
        return calls


def session(*sources: SubscriptionState, limit: int = 10, started: bool = True) -> tuple[DurableSender, Recorder]:
    ports = Recorder()
    machine = DurableSender(limit, ports)
    machine.sources.extend(sources)
    if started:
        machine.start()
    return machine, ports


def source(qos: int = 2, start: int = 1) -> SubscriptionState:
    return SubscriptionState(qos, start)
