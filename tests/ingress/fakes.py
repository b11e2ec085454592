# SPDX-License-Identifier: Apache-2.0
"""What the modules of retained messages use of a gateway; `test_fakes.py` compares the names."""

from __future__ import annotations

from mqtt_nats.backbone.pending_stores import PendingStore
from mqtt_streams.api import ApiError
from mqtt_streams.retained import RetainedStore
from tests.sessions.fakes import FakeBroker, FakeClient, FakeSettings


class FakeTombstones:
    """Stands for `Tombstones`."""

    def __init__(self) -> None:
        self.fake_added: list[tuple[int, PendingStore | None, bytes]] = []

    def add(self, sequence: int, parent: PendingStore | None, ack: bytes) -> None:
        self.fake_added.append((sequence, parent, ack))


class FakeRetainedSettings(FakeSettings):
    """Stands for `Settings`: how large a retained message may be."""

    def __init__(self) -> None:
        self.max_retained_size: int | None = None


class FakeRetainingBroker(FakeBroker):
    """Stands for `Broker`."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: FakeRetainedSettings = FakeRetainedSettings()
        self.tombstones = FakeTombstones()
        self.retained = RetainedStore(self.inbox)
        self.retaining: set[PendingStore] = set()
        self.unchecked: set[FakeClient] = set()
        self.withholding = None
        self.not_retained = 0

    def count_not_retained(self) -> None:
        self.not_retained += 1

    def retained_now(self, operation: PendingStore) -> None:
        self.retaining.discard(operation)


class FakePublisher(FakeClient):
    """Stands for `Client`, which publishes."""

    def __init__(self, broker: FakeRetainingBroker) -> None:
        super().__init__(broker)
        self.broker: FakeRetainingBroker = broker
        self.sender_header = b"Nmqtt-Client:client\r\n"


class Parent(PendingStore):
    """The operation that a store is a part of; it may be one whose refusal has a reason code."""

    def __init__(self, *, explains: bool = False, waits: bool = False) -> None:
        self.fake_explains = explains
        self.fake_waits = waits
        self.fake_stored: list[bytes] = []
        self.fake_failed: list[str] = []

    def stored(self, ack: bytes) -> None:
        """It is stored."""
        self.fake_stored.append(ack)

    def failed(self, error: ApiError) -> None:
        """It is refused."""
        self.fake_failed.append(error.description)

    def explains(self) -> bool:
        """Whether its client can be told."""
        return self.fake_explains

    def waits(self) -> bool:
        """Whether it waits for room."""
        return self.fake_waits
