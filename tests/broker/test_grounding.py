# SPDX-License-Identifier: Apache-2.0
"""What is pending in a position while a consumer brings it, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.broker.grounding import fetch_pending
from mqtt_nats.broker.keeping import TAKEN
from mqtt_nats.session.delivery import Source
from mqtt_nats.session.durable import DurableOutbound, packet_id
from mqtt_nats.session.ledger import Ledger

PUBACK, PUBREC = 4, 5


class Ports:
    """Acknowledges to whom it has to."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.acks: list[bytes] = []

    def publish(self, delivery: object, dup: bool) -> bool:
        return True

    def send(self, data: bytes) -> None:
        pass

    def look(self, source: Source, sequence: int) -> None:
        pass

    def store_pubrel(self, identifier: int, sequence: int) -> None:
        pass

    def ack(self, reply: bytes) -> None:
        if reply.startswith(TAKEN):
            self.ledger.done(int(reply[1:]))
        else:
            self.acks.append(reply)

    def ack_confirmed(self, reply: bytes, identifier: int) -> None:
        if reply.startswith(TAKEN):
            assert self.ledger.confirm(int(reply[1:]), identifier)
        else:
            self.acks.append(reply)


@pytest.mark.parametrize("qos", [1, 2])
async def test_both_hear_that_it_is_complete(qos: int) -> None:
    """Else it would be pending for ever, and be sent again by whoever goes on with the session."""
    ledger = Ledger()
    ports = Ports(ledger)
    machine = DurableOutbound(10, ports)
    source = Source(qos, 1, 10)
    source.expected = 0
    machine.sources.append(source)
    for sequence in (6, 7):
        machine.arrived(source, sequence, 2, b"$JS.ACK.%d" % sequence, None, qos)
    ledger.take(6, qos)
    keeper = SimpleNamespace(ledger=ledger)
    side: Any = SimpleNamespace(keeper=keeper, machine=machine, past=None)
    client: Any = SimpleNamespace(broker=SimpleNamespace(inbox=None))
    await fetch_pending(client, side)
    await fetch_pending(client, side)
    machine.start()
    for sequence in (6, 7):
        if qos == 1:
            machine.acknowledged(PUBACK, [packet_id(sequence)])
        else:
            machine.acknowledged(PUBREC, [packet_id(sequence)])
            machine.pubrel_stored(packet_id(sequence))
    assert ledger.pending == {}
    assert ports.acks == [b"$JS.ACK.6", b"$JS.ACK.7"]
