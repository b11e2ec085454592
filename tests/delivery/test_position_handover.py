# SPDX-License-Identifier: Apache-2.0
"""Which gateway is asked whether it has left a session, and under which names a gateway is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.backbone.connect import Phase, Reconnect
from mqtt_nats.delivery.position_handover import PositionHandover
from mqtt_streams.api import NoResponders
from mqtt_streams.gateway_subjects import LEFT


class Link:
    """Writes down what is subscribed."""

    def __init__(self) -> None:
        self.subjects: list[bytes] = []
        self.renewed: list[tuple[bytes, bytes]] = []

    def subscribe_raw(self, subject: bytes, handler: object) -> bytes:
        self.subjects.append(subject)
        return b"%d" % len(self.subjects)

    def renew(self, sid: bytes, subject: bytes) -> None:
        self.renewed.append((sid, subject))


class Inbox:
    """Nobody listens on what is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def request(self, subject: str, payload: bytes, *, timeout: float) -> None:
        self.asked.append(subject)
        raise NoResponders(subject)


def gateway() -> Any:
    link: Any = Link()
    nats = SimpleNamespace(link=link, reconnect=Reconnect(link), inbox=Inbox())
    return SimpleNamespace(identity=SimpleNamespace(id="former00"), nats=nats)


def test_a_gateway_with_another_name_answers_to_both() -> None:
    """It was taken for dead: positions that were written before name it as it was."""
    services = gateway()
    leaving = PositionHandover(services)
    services.identity.id = "present0"
    leaving.named()
    subjects = [f"{LEFT}former00".encode(), f"{LEFT}present0".encode()]
    assert services.nats.link.subjects == subjects
    services.nats.reconnect.renew(Phase.REQUESTS)
    assert services.nats.link.renewed == [(b"1", subjects[0]), (b"2", subjects[1])]


@pytest.mark.parametrize("name", ["", "former00", "present0", "a b", "a\r\nPUB x 0", "*", ">", "a.b", "é"])
async def test_who_is_not_asked(name: str) -> None:
    """Itself, and what is no gateway's name: a position may be damaged."""
    services = gateway()
    leaving = PositionHandover(services)
    services.identity.id = "present0"
    leaving.named()
    assert not await leaving.elsewhere("client", name)
    assert not services.nats.inbox.asked


async def test_a_dead_gateway_does_not_answer() -> None:
    services = gateway()
    assert not await PositionHandover(services).elsewhere("client", "another0")
    assert services.nats.inbox.asked == [f"{LEFT}another0"]
