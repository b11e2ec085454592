# SPDX-License-Identifier: Apache-2.0
"""A durable session subscribes what it has subscribed already: new messages wait for the retained ones once more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from mqtt_nats.client import subscribe as subscribing
from mqtt_nats.ingress.retained.replay import prepare
from mqtt_streams.api import ApiError
from tests.base.support import PATIENCE, Inside, running
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import Raw5
from tests.harness.waiting import eventually


@pytest.fixture(scope="module", params=["consumers", "records"])
def inside(nats_server: NatsServer, request: pytest.FixtureRequest) -> Iterator[Inside]:
    """A gateway that can be looked into, whose sessions have consumers, or none."""
    with running(nats_server.url, session_positions=request.param) as found:
        yield found


@pytest.fixture
def topic(inside: Inside, request: pytest.FixtureRequest) -> str:
    """One that no other test uses."""
    account = inside.gateway.account
    assert account is not None
    return f"{request.function.__name__}/{account.services.settings.session_positions}"


def publish(writer: Raw, topic: str, payload: bytes) -> None:
    """Have something retained."""
    writer.send(raw.publish(topic, payload, qos=1, flags=1))
    writer.expect(raw.PUBACK, PATIENCE)


def take(client: Raw) -> tuple[bytes, bool]:
    """The payload of the next message, which is acknowledged, and whether it was retained."""
    found = client.expect(raw.PUBLISH, PATIENCE)
    client.send(raw.ack(raw.PUBACK, found.id))
    return found.payload, bool(found.first & 1)


def begin(inside: Inside, client: Raw, client_id: str, topic: str) -> Any:
    """Subscribe; the session's side, once its messages come as they are to."""
    assert client.subscribe((topic, 1)) == [1]
    side: Any = inside.client(client_id).durable_side
    assert side.live
    return side


def reached(side: Any) -> int:
    """The last message that has come for a session."""
    found: int = max(side.machine.reached, *(one.source.last for one in side.bindings.values()))
    return found


def test_what_is_new_waits_for_what_is_retained(inside: Inside, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after the retained message was read, and before that is sent: the last one is the newest."""
    read, let = asyncio.Event(), asyncio.Event()

    async def prepare_later(*given: Any) -> None:
        read.set()
        await let.wait()
        await prepare(*given)

    port = inside.ports[0]
    with Raw.connected(port, topic, clean=False) as client, Raw.connected(port) as writer:
        side = begin(inside, client, topic, topic)
        publish(writer, topic, b"v1")
        assert take(client) == (b"v1", False)
        monkeypatch.setattr(subscribing, "prepare", prepare_later)
        client.send(raw.subscribe((topic, 1), id=2))
        eventually(lambda: inside.call(read.is_set), PATIENCE)
        before = inside.call(lambda: reached(side))
        publish(writer, topic, b"v2")
        eventually(lambda: inside.call(lambda: reached(side)) > before, PATIENCE)
        inside.call(let.set)
        client.expect(raw.SUBACK, PATIENCE)
        assert [take(client), take(client)] == [(b"v1", True), (b"v2", False)]
        publish(writer, topic, b"v3")
        assert take(client) == (b"v3", False)


def test_what_is_new_goes_where_subscribing_again_fails(
    inside: Inside, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The subscription is as it was before."""

    async def refuse(*_: object) -> None:
        raise ApiError(503, 10077, "maximum bytes exceeded")

    port = inside.ports[0]
    with Raw.connected(port, topic, clean=False) as client, Raw.connected(port) as writer:
        begin(inside, client, topic, topic)
        publish(writer, topic, b"v1")
        assert take(client) == (b"v1", False)
        monkeypatch.setattr(subscribing, "prepare", refuse)
        assert client.subscribe((topic, 1), id=2) == [0x80]
        publish(writer, topic, b"v2")
        assert take(client) == (b"v2", False)


def test_what_came_while_subscribing_again_failed(inside: Inside, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was kept back for the retained messages of the new subscription; the one before goes on, and has it."""
    read, let = asyncio.Event(), asyncio.Event()

    async def refuse_later(*_: object) -> None:
        read.set()
        await let.wait()
        raise ApiError(503, 10077, "maximum bytes exceeded")

    port = inside.ports[0]
    with Raw.connected(port, topic) as client, Raw.connected(port) as writer:
        assert client.subscribe((topic, 1)) == [1]
        monkeypatch.setattr(subscribing, "prepare", refuse_later)
        client.send(raw.subscribe((topic, 1), (f"{topic}/new", 1), id=2))
        eventually(lambda: inside.call(read.is_set), PATIENCE)
        publish(writer, topic, b"v1")
        inside.call(let.set)
        assert take(client) == (b"v1", False)
        assert client.expect(raw.SUBACK, PATIENCE).body[2:] == b"\x80\x80"
        publish(writer, topic, b"v2")
        assert take(client) == (b"v2", False)


@pytest.mark.sources
def test_who_asks_for_no_retained_messages_does_not_wait_for_others(
    inside: Inside, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of former subscriptions may not be sent yet."""
    asked: list[object] = []

    async def wait(client: object) -> None:
        asked.append(client)

    monkeypatch.setattr(subscribing, "room_for_replays", wait)
    with Raw5.open(inside.ports[0], topic) as client:
        assert client.subscribed((topic, 0x21)) == (1,)
        assert not asked
        assert client.subscribed((f"{topic}/more", 0x01), id=2) == (1,)
        assert len(asked) == 1
