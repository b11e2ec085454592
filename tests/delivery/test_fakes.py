# SPDX-License-Identifier: Apache-2.0
"""The fakes have the names of what they stand for."""

import pytest

from mqtt_nats.client.client import Client
from mqtt_nats.config.settings import Settings
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.delivery.position_handover import PositionHandover
from mqtt_nats.delivery.receiver import Delivery
from mqtt_nats.delivery.reconcile import Reconciling
from mqtt_nats.protocol.durable_sender import DurableSender
from mqtt_nats.pubsub.data_path import Path
from mqtt_nats.pubsub.fanout import Fanout
from mqtt_nats.sessions.services import Services
from mqtt_nats.transport.connection import Connection
from mqtt_nats.transport.write_buffer import FlushRound, WriteBuffer
from tests.delivery import fakes
from tests.harness.doubles import foreign_names

PAIRS: list[tuple[type, type]] = [
    (fakes.FakeReconciling, Reconciling),
    (fakes.FakeHandover, PositionHandover),
    (fakes.FakeDeliveryServices, Services),
    (fakes.FakeDelivery, Delivery),
    (fakes.FakeFanout, Fanout),
    (fakes.FakeFlushRound, FlushRound),
    (fakes.FakeBuffer, WriteBuffer),
    (fakes.FakeConnectionSettings, Settings),
    (fakes.FakeConnection, Connection),
    (fakes.FakeDeliveryPath, Path),
    (fakes.FakeReceiver, Client),
    (fakes.FakeMachine, DurableSender),
    (fakes.FakeWriterSide, DurableDelivery),
]


@pytest.mark.parametrize(("fake", "real"), PAIRS, ids=lambda one: one.__name__)
def test_a_fake_has_the_names_of_what_it_stands_for(fake: type, real: type) -> None:
    assert foreign_names(fake, real) == set()
