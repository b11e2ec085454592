# SPDX-License-Identifier: Apache-2.0
"""The fakes have the names of what they stand for."""

import pytest

from mqtt_nats.config.settings import Settings
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.sessions.services import Services
from mqtt_nats.shared_reader.reader import SharedReader
from mqtt_nats.shared_reader.sessions import SharedReaderSessions
from tests.harness.doubles import foreign_names
from tests.shared_reader import fakes

PAIRS: list[tuple[type, type]] = [
    (fakes.FakeReaderSettings, Settings),
    (fakes.FakeReaderServices, Services),
    (fakes.FakeReader, SharedReader),
    (fakes.FakeReaderSide, DurableDelivery),
    (fakes.FakeSessions, SharedReaderSessions),
]


@pytest.mark.parametrize(("fake", "real"), PAIRS, ids=lambda one: one.__name__)
def test_a_fake_has_the_names_of_what_it_stands_for(fake: type, real: type) -> None:
    assert foreign_names(fake, real) == set()
