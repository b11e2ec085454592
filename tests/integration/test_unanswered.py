# SPDX-License-Identifier: Apache-2.0
"""Requests about a session's consumers that JetStream does not answer at once, as while it elects a leader.

They are asked again; nobody is disconnected, and nothing waits longer than for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from mqtt_nats.delivery import dormant_consumers, durable
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import consumer_info, delete_consumer
from mqtt_streams.messages import STREAM as MESSAGES
from tests.base.support import PATIENCE, Inside, running
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually

Fail = Callable[[ModuleType, str], list[Exception]]


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer) -> Iterator[Inside]:
    """A gateway that can be looked into."""
    with running(nats_server.url) as found:
        yield found


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Have a module's first requests of one kind not answered; returns what is still to be raised."""

    def fail(module: ModuleType, name: str) -> list[Exception]:
        ask = getattr(module, name)
        errors: list[Exception] = [NoResponders("a test"), RequestTimeout("a test")]

        async def asked(*arguments: Any) -> Any:
            if errors:
                raise errors.pop()
            return await ask(*arguments)

        monkeypatch.setattr(module, name, asked)
        return errors

    return fail


def side_of(inside: Inside, client_id: str) -> DurableDelivery:
    side = inside.client(client_id).durable_side
    assert side is not None
    return side


async def _exists(inside: Inside, name: str) -> bool:
    account = inside.gateway.account
    assert account is not None
    return await consumer_info(account.services.nats.inbox, MESSAGES, name) is not None


def exists(inside: Inside, name: str) -> bool:
    """Whether JetStream has a consumer."""
    return asyncio.run_coroutine_threadsafe(_exists(inside, name), inside.loop).result(PATIENCE)


def test_the_consumer_of_an_ended_subscription_is_removed(inside: Inside, fail: Fail) -> None:
    """The message in flight stays the client's to acknowledge."""
    with Raw.connected(inside.ports[0], "ends", clean=False) as client, Raw.connected(inside.ports[0]) as writer:
        assert client.subscribe(("ends", 1)) == [1]
        (name,) = side_of(inside, "ends").bindings
        writer.send(raw.publish("ends", b"1", qos=1, id=1))
        found = client.expect(raw.PUBLISH, PATIENCE)
        errors = fail(durable, "delete_for_good")
        client.send(raw.unsubscribe("ends", id=2))
        client.expect(raw.UNSUBACK, PATIENCE)
        eventually(lambda: not exists(inside, name), PATIENCE)
        assert not errors
        client.send(raw.ack(raw.PUBACK, found.id))
        assert client.ping() == []


@pytest.mark.parametrize("asked", ["existing_consumer", "create_consumer"])
def test_a_dormant_consumer_that_was_deleted_is_made_again(inside: Inside, fail: Fail, asked: str) -> None:
    """Where JetStream does not answer, at a later resume: nothing waits for that."""
    with Raw.connected(inside.ports[0], asked, clean=False) as client:
        assert client.subscribe((asked, 1)) == [1]
        (name,) = side_of(inside, asked).bindings
        account = inside.gateway.account
        assert account is not None
        inbox = account.services.nats.inbox
        errors = fail(dormant_consumers, asked)
        left = len(errors)
        asyncio.run_coroutine_threadsafe(delete_consumer(inbox, MESSAGES, name), inside.loop).result(PATIENCE)
        eventually(lambda: len(errors) < left, PATIENCE)
        assert client.ping() == []
        assert not exists(inside, name)
    while errors:
        left = len(errors)
        with Raw.connected(inside.ports[0], asked, clean=False) as client:
            eventually(lambda: len(errors) < left, PATIENCE)  # noqa: B023
            assert client.ping() == []
    with Raw.connected(inside.ports[0], asked, clean=False) as client:
        eventually(lambda: exists(inside, name), PATIENCE)
        assert client.ping() == []


def test_a_dormant_consumer_that_jetstream_refuses(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client stays, and gets its messages; the consumer is created when the session is resumed."""
    asked: list[object] = []

    async def refuse(*arguments: object) -> None:
        asked.append(arguments)
        raise ApiError(400, 10026, "maximum consumers limit reached")

    with Raw.connected(inside.ports[0], "refused", clean=False) as client:
        assert client.subscribe(("refused", 1)) == [1]
        (name,) = side_of(inside, "refused").bindings
        account = inside.gateway.account
        assert account is not None
        inbox = account.services.nats.inbox
        monkeypatch.setattr(dormant_consumers, "create_consumer", refuse)
        asyncio.run_coroutine_threadsafe(delete_consumer(inbox, MESSAGES, name), inside.loop).result(PATIENCE)
        eventually(lambda: asked, PATIENCE)
        with Raw.connected(inside.ports[0]) as writer:
            writer.send(raw.publish("refused", b"1", qos=1, id=1))
            writer.expect(raw.PUBACK, PATIENCE)
        found = client.expect(raw.PUBLISH, PATIENCE)
        client.send(raw.ack(raw.PUBACK, found.id))
        assert client.ping() == []
    monkeypatch.undo()
    assert not exists(inside, name)
    with Raw.connected(inside.ports[0], "refused", clean=False) as client:
        eventually(lambda: exists(inside, name), PATIENCE)
        assert client.ping() == []
