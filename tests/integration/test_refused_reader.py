# SPDX-License-Identifier: Apache-2.0
"""JetStream does not let the gateway have a reader: messages wait, and come when it does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mqtt_nats.shared_reader import catch_up
from mqtt_streams.consumers import delete_consumer, reader_request
from mqtt_streams.messages import STREAM as MESSAGES
from tests.base.support import PATIENCE, Inside, running
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually

SHARED, OWN = "mqtt_nats.shared_reader.reader.reader_request", "mqtt_nats.shared_reader.catch_up.reader_request"


def wrong(*arguments: Any, **more: Any) -> dict[str, Any]:
    """A reader that JetStream refuses."""
    return reader_request(*arguments, **more, ack_policy="none at all")


def publish(writer: Raw, topic: str, *numbers: int) -> None:
    for number in numbers:
        writer.send(raw.publish(topic, b"%d" % number, qos=1, id=number))
        assert writer.expect(raw.PUBACK, PATIENCE).id == number


def take(client: Raw, *numbers: int) -> None:
    for number in numbers:
        found = client.expect(raw.PUBLISH, PATIENCE)
        assert (found.payload, found.first >> 3 & 1) == (b"%d" % number, 0)
        client.send(raw.ack(raw.PUBACK, found.id))


def delete_reader(inside: Inside) -> None:
    """As an administrator may do."""
    broker = inside.gateway.own.broker
    assert broker is not None
    assert broker.live is not None
    inbox, name = broker.account.services.nats.inbox, broker.live.reader.name
    asyncio.run_coroutine_threadsafe(delete_consumer(inbox, MESSAGES, name), inside.loop).result(PATIENCE)


@pytest.mark.parametrize("positions", ["consumers", "records"])
def test_sessions_without_a_shared_reader(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, positions: str
) -> None:
    """What is published meanwhile is stored, and comes once, in order, when there is a reader."""
    topic = client_id = f"without-{positions}"
    with (
        running(nats_server.url, session_positions=positions) as inside,
        Raw.connected(inside.ports[0], client_id, clean=False, patience=PATIENCE) as client,
        Raw.connected(inside.ports[0]) as writer,
    ):
        assert client.subscribe((topic, 1)) == [1]
        publish(writer, topic, 1)
        take(client, 1)
        monkeypatch.setattr(SHARED, wrong)
        delete_reader(inside)
        eventually(lambda: "JetStream refuses the shared reader" in caplog.text, PATIENCE)
        publish(writer, topic, 2, 3)
        assert client.ping() == []
        monkeypatch.setattr(SHARED, reader_request)
        take(client, 2, 3)
        publish(writer, topic, 4)
        take(client, 4)
        assert client.ping() == []
        Raw.connected(inside.ports[0], client_id).close()


@pytest.mark.parametrize("positions", ["consumers", "records"])
def test_a_session_that_cannot_catch_up(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, positions: str
) -> None:
    """Its client stays connected, and gets what it has missed when JetStream allows the reader."""
    topic = client_id = f"behind-{positions}"
    monkeypatch.setattr(catch_up, "REFUSED_PAUSE_S", 0.2)
    with (
        running(nats_server.url, session_positions=positions) as inside,
        Raw.connected(inside.ports[0]) as writer,
    ):
        port = inside.ports[0]
        with Raw.connected(port, client_id, clean=False) as client:
            assert client.subscribe((topic, 1)) == [1]
        publish(writer, topic, 1, 2, 3)
        monkeypatch.setattr(OWN, wrong)
        with Raw.connected(port, client_id, clean=False, patience=PATIENCE) as client:
            eventually(lambda: "JetStream refuses the reader of what it has missed" in caplog.text, PATIENCE)
            publish(writer, topic, 4)
            assert client.ping() == []
            monkeypatch.setattr(OWN, reader_request)
            take(client, 1, 2, 3, 4)
            assert client.ping() == []
        with Raw.connected(port, client_id) as client:
            client.ping()
