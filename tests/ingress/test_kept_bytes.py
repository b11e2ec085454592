# SPDX-License-Identifier: Apache-2.0
"""Payloads of unfinished QoS 2 publishes that the gateway keeps in memory: they have a bound for each client."""

from __future__ import annotations

import pytest

from mqtt_nats.client.client import Client
from mqtt_nats.ingress.qos2 import KEEP_BYTES
from tests.base.support import Inside, running
from tests.harness import raw5
from tests.harness.nats import NatsServer
from tests.harness.raw5 import Raw5

PAYLOAD = bytes(KEEP_BYTES * 3 // 4)
"""One is kept; a second one is read back from its record."""


def kept(inside: Inside, client: Client) -> int:
    return inside.call(lambda: sum(len(one.payload or b"") for one in client.inbound._publishes.values()))


@pytest.mark.processes
def test_a_payload_that_was_read_back_does_not_loosen_the_bound(nats_server: NatsServer) -> None:
    with running(nats_server.url) as inside, Raw5.open(inside.ports[0], "sender") as client:
        found = inside.client("sender")
        for identifier in (1, 2):
            client.send(raw5.publish("kept/bytes", PAYLOAD, qos=2, id=identifier))
            client.answer(raw5.PUBREC, identifier)
        assert kept(inside, found) == len(PAYLOAD)
        client.send(raw5.ack(raw5.PUBREL, 2))
        client.answer(raw5.PUBCOMP, 2)
        client.send(raw5.publish("kept/bytes", PAYLOAD, qos=2, id=3))
        client.answer(raw5.PUBREC, 3)
        assert kept(inside, found) == len(PAYLOAD)
        for identifier in (1, 3):
            client.send(raw5.ack(raw5.PUBREL, identifier))
            client.answer(raw5.PUBCOMP, identifier)
        assert kept(inside, found) == 0
