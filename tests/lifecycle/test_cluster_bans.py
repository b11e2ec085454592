# SPDX-License-Identifier: Apache-2.0
"""Bans that are heard of before they are stored."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import orjson

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.config.settings import Settings
from mqtt_nats.lifecycle.cluster_bans import Banning
from mqtt_streams.bans import BanStore
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeServices, FakeSettings, as_services


@stands_for(Settings)
class FakeBanSettings(FakeSettings):
    """Stands for `Settings`: connections are not counted."""

    flapping_window = 1.0
    flapping_connects = None
    flapping_connects_per_address = None
    jetstream_domain = None
    tenants: ClassVar[dict[str, object]] = {}


@stands_for(BanStore)
class FakeBanStore:
    """Stands for `BanStore`: the bans that are stored."""

    def __init__(self) -> None:
        self.fake_stored: list[dict[str, Any]] = []

    async def all(self) -> list[dict[str, Any]]:
        return self.fake_stored


def banning() -> Banning:
    """The bans of a gateway without clients."""
    services = FakeServices()
    services.settings = FakeBanSettings()
    return Banning(as_services(services))


async def test_a_ban_that_is_not_stored_yet() -> None:
    """The look at all bans that follows does not take it away; one that does not find it later does."""
    found = banning()
    store = FakeBanStore()
    found._store = cast(BanStore, store)
    body = {"kind": "client", "value": "c", "until": 0, "reason": "", "by": ""}
    found._arrived(b"", b"", b"", orjson.dumps(body))
    await found._read()
    assert found.bans.get("client", "c") is not None
    await found._read()
    assert found.bans.get("client", "c") is None
    found._arrived(b"", b"", b"", orjson.dumps(body))
    store.fake_stored.append(body | {"lifted": True})
    found._services.nats.reconnect.renew(Phase.REQUESTS)  # its end was missed
    await found._read()
    assert found.bans.get("client", "c") is None
