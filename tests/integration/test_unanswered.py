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

from mqtt_nats.delivery import durable
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.gateway import reconnect as recovery
from mqtt_streams.api import NoResponders, RequestTimeout
from mqtt_streams.consumers import consumer_info, delete_consumer
from mqtt_streams.messages import STREAM as MESSAGES
from tests.base.support import PATIENCE, Inside, running
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually

Fail = Callable[[ModuleType, str], list[Exception]]


@pytest.fixture(scope="module")
def own(nats_server: NatsServer) -> Iterator[Inside]:
    """A gateway that can be looked into, where each subscription's own consumer brings its messages."""
    with running(nats_server.url) as found:
        yield found


@pytest.fixture(scope="module")
def shared(nats_server: NatsServer) -> Iterator[Inside]:
    """One with a shared reader."""
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


def test_what_a_quiet_consumer_has_left(own: Inside, fail: Fail) -> None:
    """What waits for that may be the last that comes, and then nobody else would ask."""
    with Raw.connected(own.ports[0], "quiet", clean=False) as client:
        assert client.subscribe(("quiet", 1)) == [1]
        side = side_of(own, "quiet")
        (binding,) = side.bindings.values()
        errors = fail(durable, "consumer_info")
        own.call(lambda: side.request_state(binding.source, 1 << 40))
        eventually(lambda: own.call(lambda: binding.source.clear) == 1 << 40, PATIENCE)
        assert not errors
        client.ping()


def test_the_consumer_of_an_ended_subscription_is_removed(own: Inside, fail: Fail) -> None:
    """That is once the client has acknowledged what was in flight."""
    with Raw.connected(own.ports[0], "ends", clean=False) as client, Raw.connected(own.ports[0]) as writer:
        assert client.subscribe(("ends", 1)) == [1]
        side = side_of(own, "ends")
        writer.send(raw.publish("ends", b"1", qos=1, id=1))
        found = client.expect(raw.PUBLISH, PATIENCE)
        client.send(raw.unsubscribe("ends", id=2))
        client.expect(raw.UNSUBACK, PATIENCE)
        record = own.client("ends").record
        assert record is not None
        assert record.v5 is not None
        draining = record.v5
        errors = fail(durable, "delete_for_good")
        client.send(raw.ack(raw.PUBACK, found.id))
        eventually(lambda: own.call(lambda: not side.bindings and not draining.draining), PATIENCE)
        assert not errors
        client.ping()


@pytest.mark.parametrize("asked", ["consumer_info", "create_consumer"])
def test_a_dormant_consumer_that_was_deleted_is_made_again(shared: Inside, fail: Fail, asked: str) -> None:
    with Raw.connected(shared.ports[0], asked, clean=False) as client:
        assert client.subscribe((asked, 1)) == [1]
        side = side_of(shared, asked)
        eventually(lambda: shared.call(lambda: side.live), PATIENCE)
        (name,) = side.bindings
        account = shared.gateway.account
        assert account is not None
        inbox = account.services.nats.inbox
        errors = fail(recovery, asked)
        asyncio.run_coroutine_threadsafe(delete_consumer(inbox, MESSAGES, name), shared.loop).result(PATIENCE)

        def there() -> bool:
            info = asyncio.run_coroutine_threadsafe(consumer_info(inbox, MESSAGES, name), shared.loop)
            return not errors and info.result(PATIENCE) is not None

        eventually(there, PATIENCE)
        client.ping()
