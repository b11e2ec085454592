# SPDX-License-Identifier: Apache-2.0
"""The fakes have the names of what they stand for."""

import pytest

from mqtt_nats.client.client import Client
from mqtt_nats.config.settings import Settings
from mqtt_nats.ingress.publisher import Ingress
from mqtt_nats.ingress.retained_store import Tombstones
from mqtt_nats.sessions.services import Services
from tests.harness.doubles import foreign_names
from tests.ingress import fakes

PAIRS: list[tuple[type, type]] = [
    (fakes.FakeTombstones, Tombstones),
    (fakes.FakeRetainedSettings, Settings),
    (fakes.FakePublishingServices, Services),
    (fakes.FakeIngress, Ingress),
    (fakes.FakePublisher, Client),
]


@pytest.mark.parametrize(("fake", "real"), PAIRS, ids=lambda one: one.__name__)
def test_a_fake_has_the_names_of_what_it_stands_for(fake: type, real: type) -> None:
    assert foreign_names(fake, real) == set()
