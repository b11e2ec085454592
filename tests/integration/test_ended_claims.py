# SPDX-License-Identifier: Apache-2.0
"""A connection that ends while its CONNECT waits for the session: other connections of the client stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from mqtt_nats.client import connect
from mqtt_nats.client.account import Account
from mqtt_nats.client.authentication import authenticate
from mqtt_nats.client.client import Client
from mqtt_nats.client.disconnect import end_silent
from mqtt_nats.codec import Connect, Properties, ReasonCode
from mqtt_nats.lifecycle import claim
from mqtt_nats.lifecycle.claim import Claim, find_session
from mqtt_nats.lifecycle.will import Wills
from mqtt_nats.sessions.session import Session
from tests.backbone.certificates import Authority
from tests.base.support import running
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import eventually
from tests.transport.support import NAME, tls, trusting


def opening(account: Account) -> list[Client]:
    """Clients whose claims wait for JetStream."""
    return [one for one in list(account.registry.connections) if one.unanswered]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[], asyncio.Event]:
    """Has JetStream answer claims only when the event is set that the function returns."""
    go_on = asyncio.Event()

    async def held(client: Session, wills: Wills, connect: Connect) -> Claim:
        await go_on.wait()
        return await find_session(client, wills, connect)

    def begin() -> asyncio.Event:
        monkeypatch.setattr(claim, "find_session", held)
        return go_on

    return begin


@pytest.mark.sources  # it replaces a function of a native module
def test_a_refused_client_takes_nothing_over(nats_server: NatsServer, answer: Callable[[], asyncio.Event]) -> None:
    """JetStream answers a claim when its client was told that it cannot be served."""
    with running(nats_server.url, {"connect_timeout": 1}) as inside:
        port, account = inside.ports[0], inside.gateway.account
        assert account is not None
        with Raw5.open(port, "client") as living:
            go_on = answer()
            with Raw5(port) as late:
                late.send(raw5.connect("client", prop(SESSION_EXPIRY, 600), clean=False))
                assert late.answer(raw5.CONNACK).reason == ReasonCode.SERVER_UNAVAILABLE
            inside.call(go_on.set)
            eventually(lambda: inside.call(lambda: len(account.registry.connections) == 1))
            living.quiet()
            assert inside.client("client").alive
        assert account.services.counters.refused == {"server_unavailable": 1}


@pytest.mark.sources  # it replaces a function of a native module
def test_neither_does_one_whose_socket_stays(
    nats_server: NatsServer, answer: Callable[[], asyncio.Event], tmp_path: Path
) -> None:
    """A refused client that has gone without a word does not end its TLS connection, so that is not closed yet."""
    authority = Authority(tmp_path)
    listeners = {"connect_timeout": 1}, tls(authority.issue(NAME), connect_timeout=1)
    with running(nats_server.url, *listeners) as inside:
        plain, secure = inside.ports
        account = inside.gateway.account
        assert account is not None
        with Raw5.open(plain, "client") as living:
            go_on = answer()
            with Raw5(secure) as late:
                late.socket = trusting(authority).wrap_socket(late.socket, server_hostname=NAME)
                late.send(raw5.connect("client", prop(SESSION_EXPIRY, 600), clean=False))
                eventually(lambda: opening(account))
                (refused,) = opening(account)
                eventually(lambda: inside.call(lambda: refused.why is not None))
                inside.call(lambda: end_silent(account.registry, refused.services.clock.now + 10))
                inside.call(go_on.set)
                eventually(lambda: not inside.call(lambda: refused.busy))
                assert inside.call(lambda: refused.alive)
                living.quiet()
                assert inside.client("client").alive
        assert account.services.counters.refused == {"server_unavailable": 1}


@pytest.mark.sources  # it replaces a function of a native module
@pytest.mark.parametrize("clean", [True, False])
def test_neither_does_one_that_an_authenticator_lets_in_too_late(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    """The client has closed that connection, which nobody has noticed, and has another one by now."""
    go_on = asyncio.Event()

    async def slowly(client: Client, packet: Connect, client_id: str) -> Properties | None:
        await go_on.wait()
        return await authenticate(client, packet, client_id)

    with running(nats_server.url) as inside:
        port, account = inside.ports[0], inside.gateway.account
        assert account is not None
        with monkeypatch.context() as patched, Raw(port) as late:
            patched.setattr(connect, "authenticate", slowly)
            late.send(raw.connect("client", clean=clean))
            eventually(lambda: opening(account))
        with Raw.connected(port, "client", clean=clean) as living:
            inside.call(go_on.set)
            eventually(lambda: inside.call(lambda: len(account.registry.connections) == 1))
            living.ping()
            assert inside.client("client").alive
