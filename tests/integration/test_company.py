# SPDX-License-Identifier: Apache-2.0
"""nats-server's own MQTT listener has clients: claims of all sessions are heard, and readers go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from mqtt_nats.sessions import listener_clients as company
from mqtt_streams.api import call
from mqtt_streams.consumers import consumer_names, delete_consumer
from mqtt_streams.hashing import name_hash
from mqtt_streams.messages import STREAM as MESSAGES
from tests.base.support import PATIENCE, Inside, running
from tests.conftest import NatsFactory
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually

RETAINED = "$MQTT_rmsgs"


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory(mqtt=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at others come soon."""
    monkeypatch.setattr(company, "CHECK_IDLE_S", 0.2)
    monkeypatch.setattr(company, "CHECK_SELDOM_S", 0.2)
    monkeypatch.setattr(company, "QUIET_BEFORE_USE_S", 0.5)


@pytest.fixture
def inside(server: NatsServer, quick: None) -> Iterator[Inside]:
    with running(server.url) as found:
        yield found


@pytest.fixture
def auto(server: NatsServer, quick: None) -> Iterator[Inside]:
    """A gateway whose sessions have no consumers while there is no reason against it: there are many consumers."""
    with running(server.url, session_positions="auto", session_consumers=2) as found:
        account = found.gateway.account
        assert account is not None
        for number in range(10):
            config = {"durable_name": f"other{number}", "ack_policy": "explicit"}
            body = {"stream_name": MESSAGES, "config": config}
            do(found, call(account.services.nats.inbox, f"CONSUMER.DURABLE.CREATE.{MESSAGES}.other{number}", body))
        do(found, account.services.stream.check())
        yield found


def in_records(inside: Inside, client_id: str) -> bool:
    """Whether the stored record of a session says that it has no consumers; it has some, or none, then."""
    account = inside.gateway.account
    assert account is not None
    sessions, inbox = account.services.streams.sessions, account.services.nats.inbox

    async def look() -> tuple[bool, int]:
        found = await sessions.load(name_hash(client_id), client_id)
        assert found is not None
        assert found[0].v5 is not None
        names = await consumer_names(inbox, MESSAGES, f"{name_hash(client_id)}_")
        return found[0].v5.consumerless, len(names)

    def agree() -> bool:
        records, number = asyncio.run_coroutine_threadsafe(look(), inside.loop).result(PATIENCE)
        answer.append(records)
        return number == (not records)

    answer: list[bool] = []
    eventually(agree, PATIENCE)
    return answer[-1]


def deliver(writer: Raw, client: Raw, payload: bytes) -> None:
    writer.send(raw.publish("company", payload, qos=1, id=1))
    assert writer.expect(raw.PUBACK, PATIENCE).id == 1
    found = client.expect(raw.PUBLISH, PATIENCE)
    assert (found.payload, found.first >> 3 & 1) == (payload, 0)
    client.send(raw.ack(raw.PUBACK, found.id))


def do(inside: Inside, work: Any) -> None:
    asyncio.run_coroutine_threadsafe(work, inside.loop).result(PATIENCE)


def hears_all(inside: Inside) -> bool:
    """Whether the gateway hears the claims of all sessions."""
    account = inside.gateway.account
    assert account is not None
    return inside.call(lambda: account.claims.hears_all)


def test_the_listener_of_nats_server(server: NatsServer, inside: Inside) -> None:
    """From its first client on all claims are heard; its sessions, and those of the gateway, go on with the reader."""
    account = inside.gateway.account
    assert account is not None

    async def forget() -> None:
        assert account is not None
        for name in await consumer_names(account.services.nats.inbox, RETAINED):
            await delete_consumer(account.services.nats.inbox, RETAINED, name)

    with Raw.connected(inside.ports[0], "watched", clean=False) as client, Raw.connected(inside.ports[0]) as writer:
        assert client.subscribe(("company", 2)) == [2]
        eventually(lambda: not hears_all(inside), PATIENCE)
        deliver(writer, client, b"0")
        with Raw.connected(server.mqtt_port, "over-there"):
            eventually(lambda: hears_all(inside), PATIENCE)
            deliver(writer, client, b"1")
        do(inside, forget())
        eventually(lambda: not hears_all(inside), PATIENCE)
        deliver(writer, client, b"2")
        assert client.ping() == []


def test_a_session_is_claimed_there(server: NatsServer, inside: Inside) -> None:
    """The first client of the listener claims a session of the gateway: the gateway ends its connection."""
    with Raw.connected(inside.ports[0], "claimed", clean=False) as client:
        assert client.subscribe(("company", 1)) == [1]
        eventually(lambda: not hears_all(inside), PATIENCE)
        with Raw.connected(server.mqtt_port, "over-there"):
            eventually(lambda: hears_all(inside), PATIENCE)
            with Raw.connected(server.mqtt_port, "claimed", clean=False):
                assert client.expect_closed(PATIENCE) == []


def test_sessions_without_consumers_beside_the_listener_of_nats_server(server: NatsServer, auto: Inside) -> None:
    """They stay as they are while their clients are connected here, and go on with the reader."""
    with Raw.connected(auto.ports[0], "watched", clean=False) as client, Raw.connected(auto.ports[0]) as writer:
        assert client.subscribe(("company", 1)) == [1]
        eventually(lambda: in_records(auto, "watched"), PATIENCE)
        with Raw.connected(server.mqtt_port, "over-there"):
            eventually(lambda: hears_all(auto), PATIENCE)
            deliver(writer, client, b"1")
            assert in_records(auto, "watched")
