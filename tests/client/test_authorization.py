# SPDX-License-Identifier: Apache-2.0
"""Rules that change while a client is connected."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, cast

import pytest

from mqtt_nats.client import authorization as permitting
from mqtt_nats.client.client import Client
from mqtt_nats.codec import MqttError
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.protocol.transient_sender import TransientSender
from tests.harness.doubles import stands_for


@stands_for(TransientSender)
@dataclass
class FakeQueue:
    """Stands for `TransientSender`: how many messages wait."""

    waiting: int


@stands_for(DurableDelivery)
@dataclass
class FakeDurable:
    """Stands for `DurableDelivery`: whether its client reads."""

    stalled: bool


@stands_for(Client)
class FakeGuarded:
    """Stands for `Client`, whose rules have changed."""

    will = None

    def __init__(self, regular: FakeQueue | None, durable: FakeDurable | None) -> None:
        self.guarded = object()
        self.regular_side, self.durable_side = regular, durable
        self.fake_done: list[str] = []
        self.fake_jobs: list[Coroutine[Any, Any, None]] = []

    def end_connection(self, error: MqttError) -> None:
        self.fake_done.append(str(error))

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        self.fake_jobs.append(work)


@pytest.mark.parametrize(
    ("regular", "durable", "ends"),
    [
        (FakeQueue(0), None, False),
        (FakeQueue(1), None, True),
        (None, FakeDurable(False), False),
        (None, FakeDurable(True), True),
    ],
    ids=["regular", "with a queue", "durable", "stalled"],
)
async def test_where_nobody_can_tell_what_is_permitted_the_connection_ends(
    regular: FakeQueue | None, durable: FakeDurable | None, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stalled session has left to JetStream what one subscription would have brought for another."""
    monkeypatch.setattr(permitting, "denied_subscriptions", lambda client: {"a/#"})

    client = FakeGuarded(regular, durable)

    async def withdraw(_: Client, denied: set[str]) -> None:
        client.fake_done.append(f"withdraw {denied}")

    monkeypatch.setattr(permitting, "withdraw", withdraw)
    permitting._check(cast(Client, client))
    for job in client.fake_jobs:
        await job
    assert client.fake_done == (["permissions have changed"] if ends else ["withdraw {'a/#'}"])
