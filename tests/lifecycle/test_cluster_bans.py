# SPDX-License-Identifier: Apache-2.0
"""Bans that are heard of before they are stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import orjson

from mqtt_nats.backbone.connect import Phase, Reconnect
from mqtt_nats.lifecycle.cluster_bans import Banning
from mqtt_nats.sessions.services import Registry


def banning() -> Banning:
    """The bans of a gateway without clients."""
    link = SimpleNamespace(subscribe_raw=lambda subject, handler: b"1", renew=lambda sid, subject: None)
    settings = SimpleNamespace(flapping_window=1, flapping_connects=None, flapping_connects_per_address=None)
    reconnect = Reconnect(cast(Any, link))
    nats = SimpleNamespace(reconnect=reconnect, inbox=None)
    services: Any = SimpleNamespace(nats=nats, settings=settings, registry=Registry())
    return Banning(services, {})


async def test_a_ban_that_is_not_stored_yet() -> None:
    """The look at all bans that follows does not take it away; one that does not find it later does."""
    found = banning()
    stored: list[dict[str, Any]] = []

    async def everything() -> list[dict[str, Any]]:
        return stored

    found._store = SimpleNamespace(all=everything)  # type: ignore[assignment]
    body = {"kind": "client", "value": "c", "until": 0, "reason": "", "by": ""}
    found._arrived(b"", b"", b"", orjson.dumps(body))
    await found._read()
    assert found.bans.get("client", "c") is not None
    await found._read()
    assert found.bans.get("client", "c") is None
    found._arrived(b"", b"", b"", orjson.dumps(body))
    stored.append(body | {"lifted": True})
    found._services.nats.reconnect.renew(Phase.REQUESTS)  # its end was missed
    await found._read()
    assert found.bans.get("client", "c") is None
