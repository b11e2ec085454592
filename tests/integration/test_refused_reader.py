# SPDX-License-Identifier: Apache-2.0
"""JetStream does not let the gateway have its shared reader: sessions are left to their own consumers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mqtt_nats.shared_reader import session_checks
from mqtt_streams.consumers import delete_consumer, reader_request
from mqtt_streams.messages import STREAM as MESSAGES
from tests.base.support import PATIENCE, running
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually


@pytest.mark.parametrize("positions", ["consumers", "records"])
def test_sessions_without_a_reader(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, positions: str) -> None:
    """What comes meanwhile is delivered, once; and by the reader again when there is one.

    Without a reader every session has consumers, and its record does not say otherwise.
    """
    monkeypatch.setattr(session_checks, "REFUSED", 0.2)
    with running(nats_server.url, session_positions=positions) as inside:
        broker, port = inside.gateway.own.broker, inside.ports[0]
        assert broker is not None
        assert broker.live is not None
        reader, inbox = broker.live.reader, broker.account.services.nats.inbox

        def wrong(*arguments: Any, **more: Any) -> dict[str, Any]:
            return reader_request(*arguments, **more, ack_policy="none at all")

        def served() -> bool:
            side = inside.client("without").durable_side
            return side is not None and side.live

        def consumerless() -> bool:
            record = inside.client("without").record
            return record is not None and record.v5 is not None and record.v5.consumerless

        def deliver(writer: Raw, client: Raw, number: int) -> None:
            writer.send(raw.publish("without/reader", b"%d" % number, qos=1, id=number))
            assert writer.expect(raw.PUBACK, PATIENCE).id == number
            found = client.expect(raw.PUBLISH)
            assert found.payload == b"%d" % number
            client.send(raw.ack(raw.PUBACK, found.id))

        with Raw.connected(port, "without", clean=False, patience=PATIENCE) as client, Raw.connected(port) as writer:
            assert client.subscribe(("without/reader", 1)) == [1]
            eventually(served, PATIENCE)
            deliver(writer, client, 1)
            assert consumerless() is (positions == "records")

            def refuse() -> None:
                monkeypatch.setattr("mqtt_nats.shared_reader.reader.reader_request", wrong)

            inside.call(refuse)
            gone = asyncio.run_coroutine_threadsafe(delete_consumer(inbox, MESSAGES, reader.name), inside.loop)
            gone.result(PATIENCE)
            deliver(writer, client, 2)
            eventually(lambda: not served(), PATIENCE)
            deliver(writer, client, 3)
            eventually(lambda: not consumerless(), PATIENCE)
            monkeypatch.setattr("mqtt_nats.shared_reader.reader.reader_request", reader_request)
            eventually(served, PATIENCE)
            deliver(writer, client, 4)
            assert consumerless() is (positions == "records")
            client.ping()
        with Raw.connected(port, "without") as client:
            client.ping()
