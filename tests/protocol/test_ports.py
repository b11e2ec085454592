# SPDX-License-Identifier: Apache-2.0
"""The ports after the end of a connection: they have every operation, and do nothing."""

from __future__ import annotations

import inspect

import pytest

from mqtt_nats.protocol.durable_sender import packet_id
from mqtt_nats.protocol.ports import Nowhere, Ports
from tests.protocol.recorder import PUBREC, session, source

OPERATIONS = [name for name, found in vars(Ports).items() if inspect.isfunction(found) and not name.startswith("_")]


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_can_still_be_called(name: str) -> None:
    """A port that is added has to be there too: a call after the end of the connection would raise."""
    assert inspect.signature(getattr(Nowhere, name)) == inspect.signature(getattr(Ports, name))


def test_there_are_operations() -> None:
    assert {"send", "publish", "ack", "store_pubrel", "seek"} <= set(OPERATIONS)


def test_after_the_end_of_its_connection_a_state_machine_asks_for_nothing() -> None:
    """What it has not done is left to the next connection: it gets the messages again."""
    some = source(qos=2)
    machine, ports = session(some)
    machine.arrived(some, 1, 1, b"reply", None, 2)
    assert ports.take() == [("publish", 1, 2, False)]
    machine.disconnect()
    machine.acknowledged(PUBREC, [packet_id(1)])
    machine.pubrel_stored(packet_id(1))
    machine.arrived(some, 2, 1, b"reply", None, 2)
    assert ports.take() == []
