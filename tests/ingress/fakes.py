# SPDX-License-Identifier: Apache-2.0
"""Doubles of the parts of a gateway that modules of retained messages use."""

from __future__ import annotations

from typing import cast

from mqtt_nats.backbone.pending_stores import PendingStore
from mqtt_nats.client.client import Client
from mqtt_nats.config.settings import Settings
from mqtt_nats.ingress.publish import Ingress, Publisher
from mqtt_nats.ingress.retained.store import RetainedStores, Tombstones
from mqtt_nats.observability.counters import Counters
from mqtt_nats.sessions.services import Services
from mqtt_streams.api import ApiError
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeClient, FakeServices, FakeSettings, as_services


@stands_for(Tombstones)
class FakeTombstones:
    """Stands for `Tombstones`."""

    def __init__(self) -> None:
        self.fake_added: list[tuple[str, int, PendingStore | None, bytes]] = []

    def add(self, subject: str, sequence: int, parent: PendingStore | None, ack: bytes) -> None:
        self.fake_added.append((subject, sequence, parent, ack))


@stands_for(Settings)
class FakeRetainedSettings(FakeSettings):
    """Stands for `Settings`: how large a retained message may be."""

    def __init__(self) -> None:
        self.max_retained_size: int | None = None


@stands_for(Services)
class FakePublishingServices(FakeServices):
    """Stands for `Services`."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: FakeRetainedSettings = FakeRetainedSettings()
        self.counters = Counters([0] * 3, [0] * 3)


@stands_for(Ingress)
class FakeIngress:
    """Stands for `Ingress`: the stores of retained messages."""

    def __init__(self, services: FakePublishingServices) -> None:
        self.services, self.registry = services, services.registry
        self.retained = RetainedStores(as_services(services), limited=False)
        self.fake_tombstones = FakeTombstones()
        self.retained.tombstones = cast("Tombstones", self.fake_tombstones)


@stands_for(Client)
class FakePublisher(FakeClient):
    """Stands for `Client`, which publishes."""

    def __init__(self, services: FakePublishingServices) -> None:
        super().__init__(services)
        self.services: FakePublishingServices = services
        self.ingress = FakeIngress(services)
        self.sender_header = b"Nmqtt-Client:client\r\n"


def as_publisher(fake: FakeClient) -> Publisher:
    """The fake, for a function that wants a `Publisher`."""
    return cast("Publisher", fake)


class Parent(PendingStore):
    """The operation that a store is a part of; it may be one whose refusal has a reason code."""

    def __init__(self, *, explains: bool = False, waits: bool = False) -> None:
        self.fake_explains = explains
        self.fake_waits = waits
        self.fake_stored: list[bytes] = []
        self.fake_failed: list[str] = []

    def stored(self, ack: bytes) -> None:
        """Note that the message is stored."""
        self.fake_stored.append(ack)

    def failed(self, error: ApiError) -> None:
        """Note that the message is refused."""
        self.fake_failed.append(error.description)

    def explains(self) -> bool:
        """Whether its client can be told."""
        return self.fake_explains

    def waits(self) -> bool:
        """Whether it waits for room."""
        return self.fake_waits
