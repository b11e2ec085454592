# SPDX-License-Identifier: Apache-2.0
"""Which gateway is asked whether it has left a session, and under which names a gateway is asked."""

from __future__ import annotations

import pytest

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.delivery.position_handover import PositionHandover
from mqtt_streams.api import NoResponders
from mqtt_streams.gateway_subjects import LEFT
from tests.sessions.fakes import FakeServices, as_services


class Gateway(FakeServices):
    """Services of a gateway that is told about positions; nobody listens on what it asks."""

    def __init__(self) -> None:
        super().__init__()
        self.identity.id = "former00"
        self.fake_asked: list[str] = []
        self.fake_inbox.before = self._ask

    def _ask(self, subject: str) -> None:
        self.fake_asked.append(subject)
        raise NoResponders(subject)


def test_a_gateway_with_another_name_answers_to_both() -> None:
    """It was taken for dead: positions that were written before name it as it was."""
    services = Gateway()
    leaving = PositionHandover(as_services(services))
    services.identity.id = "present0"
    leaving.named()
    subjects = [f"{LEFT}former00".encode(), f"{LEFT}present0".encode()]
    assert list(services.fake_link.fake_subjects.values()) == subjects
    services.nats.reconnect.renew(Phase.REQUESTS)
    assert services.fake_link.fake_renewed == [(b"1", subjects[0]), (b"2", subjects[1])]


@pytest.mark.parametrize("name", ["", "former00", "present0", "a b", "a\r\nPUB x 0", "*", ">", "a.b", "é"])
async def test_who_is_not_asked(name: str) -> None:
    """Itself, and what is no gateway's name: a position may be damaged."""
    services = Gateway()
    leaving = PositionHandover(as_services(services))
    services.identity.id = "present0"
    leaving.named()
    assert not await leaving.elsewhere("client", name)
    assert not services.fake_asked


async def test_a_dead_gateway_does_not_answer() -> None:
    services = Gateway()
    assert not await PositionHandover(as_services(services)).elsewhere("client", "another0")
    assert services.fake_asked == [f"{LEFT}another0"]
