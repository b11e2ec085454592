# SPDX-License-Identifier: Apache-2.0
"""Which identifiers a client is asked to give up after what it had half-way was removed."""

from collections.abc import Callable

import pytest

from mqtt_nats.delivery.pubrels import missing
from mqtt_nats.protocol.durable_sender import ID_SPACE, DurableSender, packet_id
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.ports import NOWHERE

Come = Callable[[DurableSender, SubscriptionState], None]

CASES: dict[str, tuple[Come, list[int]]] = {
    "nothing has come": (lambda machine, one: None, [5]),
    "it has come again": (lambda machine, one: machine.arrived(one, 5, 2, b"r", None, 2), []),
    "its PUBREL is owed": (lambda machine, one: machine.owe(packet_id(5), 5), []),
    "the PUBREL of a later one is owed": (lambda machine, one: machine.owe(packet_id(5), 5 + ID_SPACE), []),
    "a later one comes again": (lambda machine, one: machine.arrived(one, 5 + ID_SPACE, 2, b"r", None, 2), []),
    "a later one comes": (lambda machine, one: machine.arrived(one, 5 + ID_SPACE, 1, b"r", None, 2), [5]),
}


@pytest.mark.parametrize("case", CASES)
def test_identifiers(case: str) -> None:
    come, expected = CASES[case]
    one = SubscriptionState(2, 1)
    machine = DurableSender(10, NOWHERE)
    machine.sources.append(one)
    come(machine, one)
    assert missing(machine, [5]) == expected
