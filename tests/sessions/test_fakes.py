# SPDX-License-Identifier: Apache-2.0
"""The fakes have the names of what they stand for: a renamed attribute fails here, and not in silence."""

import pytest

from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.base.tasks import Tasks
from mqtt_nats.client.client import Client
from mqtt_nats.config.settings import Settings
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.messages.identity import Identity
from mqtt_nats.pubsub.data_path import Path
from mqtt_nats.pubsub.interest_propagation import Nodes
from mqtt_nats.sessions.message_stream import StreamIdentity
from mqtt_nats.sessions.quotas import Quotas
from mqtt_nats.sessions.services import Services
from mqtt_nats.transport.turns import Clock
from mqtt_nats.transport.write_buffer import FlushRound, WriteBuffer
from tests.harness.doubles import foreign_names
from tests.sessions import fakes

PAIRS: list[tuple[type, type]] = [
    (fakes.FakeLink, NatsConnection),
    (fakes.FakeStore, AckedPublisher),
    (fakes.FakeQuotas, Quotas),
    (fakes.FakeOutlet, WriteBuffer),
    (fakes.FakeIdentity, StreamIdentity),
    (fakes.FakeNodes, Nodes),
    (fakes.FakeSide, DurableDelivery),
    (fakes.FakeRound, FlushRound),
    (fakes.FakeClock, Clock),
    (fakes.FakeSettings, Settings),
    (fakes.FakeServices, Services),
    (fakes.FakeTasks, Tasks),
    (fakes.FakePath, Path),
    (fakes.FakeGatewayIdentity, Identity),
    (fakes.FakeClient, Client),
]


@pytest.mark.parametrize(("fake", "real"), PAIRS, ids=lambda one: one.__name__)
def test_a_fake_has_the_names_of_what_it_stands_for(fake: type, real: type) -> None:
    assert foreign_names(fake, real) == set()


def test_another_name_is_found() -> None:
    class Renamed:
        def __init__(self) -> None:
            self.tenant = ""
            self.no_such_attribute = 0

        def no_such_method(self) -> None:
            pass

    assert foreign_names(Renamed, Identity) == {"no_such_attribute", "no_such_method"}
