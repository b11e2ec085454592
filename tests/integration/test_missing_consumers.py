# SPDX-License-Identifier: Apache-2.0
"""Dormant consumers that are gone, or that nats-server does not answer for: their clients wait for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from mqtt_nats.client import grant
from mqtt_nats.delivery import dormant_consumers
from mqtt_nats.gateway import reconnect
from mqtt_streams.api import NoResponders, RequestTimeout
from mqtt_streams.hashing import name_hash
from tests.base.support import PATIENCE, Inside, running
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import Raw5
from tests.harness.waiting import aeventually, eventually
from tests.integration.conftest import Stored

SOON = 10.0
"""Seconds for an answer that waits for no consumer."""


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer) -> Iterator[Inside]:
    """A gateway whose sessions have consumers."""
    with running(nats_server.url, session_positions="consumers") as found:
        yield found


class Silence:
    """No consumer has a leader: what is asked of one is not answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
        self.asked = 0
        self._error = error
        monkeypatch.setattr(dormant_consumers, "existing_consumer", self._ask)
        for module in (dormant_consumers, grant):
            monkeypatch.setattr(module, "create_consumer", self._ask)

    async def _ask(self, *_: object) -> Any:
        self.asked += 1
        raise self._error("no leader")


silences = pytest.mark.parametrize("error", [RequestTimeout, NoResponders])


def deliver(inside: Inside, client: Raw, topic: str) -> None:
    """Publish a message, which has to come."""
    with Raw.connected(inside.ports[0]) as writer:
        writer.send(raw.publish(topic, b"x", qos=1))
        writer.expect(raw.PUBACK, SOON)
    found = client.expect(raw.PUBLISH, SOON)
    assert found.topic == topic
    client.send(raw.ack(raw.PUBACK, found.id))


def change(client: Raw, name: str) -> None:
    """Subscribe, and unsubscribe another filter: both are answered."""
    client.send(raw.subscribe((f"{name}/b", 1), id=9))
    found = client.expect(raw.SUBACK, SOON)
    assert (found.id, found.body[2:]) == (9, b"\1")
    client.send(raw.unsubscribe(f"{name}/a", id=10))
    assert client.expect(raw.UNSUBACK, SOON).id == 10


@silences
async def test_a_resume_holds_up_nothing(
    inside: Inside, name: str, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    with Raw.connected(inside.ports[0], name, clean=False) as client:
        assert client.subscribe((f"{name}/a", 1)) == [1]
    silence = Silence(monkeypatch, error)
    with Raw.connected(inside.ports[0], name, clean=False, patience=SOON) as client:
        deliver(inside, client, f"{name}/a")
        eventually(lambda: silence.asked, PATIENCE)
        change(client, name)
        deliver(inside, client, f"{name}/b")


@silences
async def test_a_deleted_consumer_holds_up_nothing(
    inside: Inside, name: str, stored: Stored, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """It is to be created again at once, and would be at the next resume."""
    with Raw.connected(inside.ports[0], name, clean=False, patience=SOON) as client:
        assert client.subscribe((f"{name}/a", 1)) == [1]
        silence = Silence(monkeypatch, error)
        (consumer,) = await stored.session_consumers(name)
        await stored.js.delete_consumer("$MQTT_msgs", consumer.name)
        await aeventually(lambda: silence.asked, PATIENCE)
        await asyncio.to_thread(change, client, name)
        await asyncio.to_thread(deliver, inside, client, f"{name}/b")


@pytest.mark.long
async def test_disconnect_changes_the_expiry_of_a_session_without_its_consumer(
    inside: Inside, name: str, stored: Stored, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client leaves in the moment of the deletion: its connection ends in order, and the expiry is stored."""
    asked: list[object] = []

    async def later(client: object, side: object) -> None:
        asked.append(client)

    monkeypatch.setattr(reconnect, "check_dormant", later)
    kept = raw5.prop(raw5.SESSION_EXPIRY, 100)
    with Raw5.open(inside.ports[0], name, kept) as client:
        assert client.subscribed((f"{name}/a", 1), (f"{name}/b", 1)) == (1, 1)
        gone, left = await stored.session_consumers(name)
        await stored.js.delete_consumer("$MQTT_msgs", gone.name)
        await aeventually(lambda: asked, PATIENCE)
        client.send(raw5.disconnect(0, raw5.prop(raw5.SESSION_EXPIRY, 300)))
        assert await asyncio.to_thread(client.expect_closed, SOON) == []
    assert [one.getMessage() for one in caplog.records if one.levelname in ("WARNING", "ERROR")] == []
    assert (await stored.record(name))["v5"]["expiry"] == 300
    threshold = (await stored.js.consumer_info("$MQTT_msgs", left.name)).config.inactive_threshold
    assert threshold == (left.config.inactive_threshold or 0) + 200


async def test_the_record_forgets_consumers_of_an_older_gateway(inside: Inside, name: str, stored: Stored) -> None:
    """Those of ended subscriptions, which an older gateway had kept for their messages in flight."""
    with Raw.connected(inside.ports[0], name, clean=False) as client:
        assert client.subscribe((f"{name}/a", 1)) == [1]
    await stored.detached(name)
    record = await stored.record(name)
    ended = {"name": f"{name_hash(name)}_ended", "filter_subject": f"$MQTT.msgs.{name}.b", "qos": 1, "end": 5}
    record["v5"]["draining"] = [ended]
    await stored.js.publish(f"$MQTT.sess.{name_hash(name)}", orjson.dumps(record))
    with Raw.connected(inside.ports[0], name, clean=False) as client:
        client.ping()
        found = await stored.record(name)
        assert found["v5"].get("draining") is None
        assert found["subs"] == record["subs"]
