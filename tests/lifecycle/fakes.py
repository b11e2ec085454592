# SPDX-License-Identifier: Apache-2.0
"""What the modules of a session's end use of a gateway."""

from __future__ import annotations

from mqtt_nats.hooks.registry import Hooks
from mqtt_nats.lifecycle.will import Wills
from mqtt_nats.sessions.quotas import Quotas
from mqtt_nats.sessions.services import Services
from mqtt_nats.sessions.takeover import Claims
from mqtt_streams.sessions import SessionRecord
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeQuotas, FakeServices


@stands_for(Quotas)
class FakeForgettingQuotas(FakeQuotas):
    """Stands for `Quotas`: which sessions count no more."""

    def __init__(self) -> None:
        super().__init__()
        self.fake_forgotten: list[str] = []

    async def forget(self, record: SessionRecord) -> None:
        self.fake_forgotten.append(record.client_id)


@stands_for(Services)
class FakeEndingServices(FakeServices):
    """Stands for `Services`, with hooks and quotas."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks = Hooks(lambda work, name: work.close())
        self.quotas: FakeForgettingQuotas = FakeForgettingQuotas()


@stands_for(Wills)
class FakeEndingWills:
    """Stands for `Wills`: services and claims."""

    def __init__(self) -> None:
        self.services = FakeEndingServices()
        self.claims = Claims(self.services.nats, self.services.streams.sessions, "", self.services.identity.id)
