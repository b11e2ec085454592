# SPDX-License-Identifier: Apache-2.0
"""A publish whose store waits while a later one of its client is stored."""

from __future__ import annotations

import pytest

from mqtt_nats.backbone.pending_stores import PendingStore
from mqtt_nats.client.client import Client
from mqtt_nats.ingress.publish import Acknowledgement
from mqtt_nats.ingress.qos2 import HeldPublish, Inbound, PublishHeld
from tests.backbone.bench import Bench
from tests.harness.doubles import stands_for
from tests.ingress.fakes import FakePublisher, FakePublishingServices, as_publisher

FULL = b'{"error":{"code":503,"err_code":10023,"description":"insufficient resources"}}'


HELD = HeldPublish(1, b"\0\1a", b"", False, b"id", None)


@stands_for(Inbound)
class FakeInbound:
    """Stands for `Inbound`: the held record is not removed."""

    def stored(self, client: FakePublisher, held: HeldPublish, receipt: Acknowledgement) -> None:
        """Nothing follows."""


@stands_for(Client)
class FakeAwaiting(FakePublisher):
    """Stands for `Client`, which waits for acknowledgements of what it publishes by MQTT 3.1.1."""

    def __init__(self) -> None:
        super().__init__(FakePublishingServices())
        self.version = 4
        self.receipts: list[Acknowledgement] = []
        self.inbound = FakeInbound()


@pytest.mark.sources
@pytest.mark.parametrize("qos", [1, 2])
async def test_what_a_later_publish_has_overtaken(qos: int) -> None:
    """At QoS 1 the client repeats both, in order. A release would be stored behind the other one in any case."""
    bench = Bench()
    client = FakeAwaiting()
    tokens = []
    for number in (1, 2):
        receipt = Acknowledgement(as_publisher(client), 4 if qos == 1 else 7, number, 1)
        operation: PendingStore = receipt if qos == 1 else PublishHeld(as_publisher(client), HELD, receipt, 1)
        bench.store.put(b"HPUB $MQTT.msgs.s ", b"NATS/1.0\r\n\r\n", bytes(100 // number), operation)
        tokens.append(list(bench.store.pending)[-1])
    assert bench.link.handler is not None
    for token, answer in zip(tokens, (FULL, b'{"seq":1}'), strict=True):
        bench.link.handler(bench.store.prefix + token, b"", b"", answer)
    assert bool(client.fake_ended) is (qos == 1)
    assert list(bench.store.pending) == ([] if qos == 1 else tokens[:1])
