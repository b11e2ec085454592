# SPDX-License-Identifier: Apache-2.0
"""A connection that ends while its CONNECT waits for the session: other connections of the client stay."""

from __future__ import annotations

import asyncio

import pytest

from mqtt_nats.codec import Connect, ReasonCode
from mqtt_nats.lifecycle import claim
from mqtt_nats.lifecycle.claim import Claim, find_session
from mqtt_nats.sessions.session import Session
from mqtt_nats.sessions.takeover import Claims
from tests.base.support import running
from tests.harness import raw5
from tests.harness.nats import NatsServer
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import eventually


@pytest.mark.sources  # it replaces a function of a native module
def test_a_refused_client_takes_nothing_over(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """JetStream answers a claim when its client was told that it cannot be served."""
    go_on = asyncio.Event()

    async def held(client: Session, claims: Claims, connect: Connect) -> Claim:
        await go_on.wait()
        return await find_session(client, claims, connect)

    with running(nats_server.url, {"connect_timeout": 1}) as inside:
        port, account = inside.ports[0], inside.gateway.account
        assert account is not None
        with Raw5.open(port, "client") as living:
            monkeypatch.setattr(claim, "find_session", held)
            with Raw5(port) as late:
                late.send(raw5.connect("client", prop(SESSION_EXPIRY, 600), clean=False))
                assert late.answer(raw5.CONNACK).reason == ReasonCode.SERVER_UNAVAILABLE
            inside.call(go_on.set)
            eventually(lambda: inside.call(lambda: len(account.registry.connections) == 1))
            living.quiet()
            assert inside.client("client").alive
        assert account.services.counters.refused == {"server_unavailable": 1}
