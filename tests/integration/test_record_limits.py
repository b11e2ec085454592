# SPDX-License-Identifier: Apache-2.0
"""How many messages per subject the streams of records keep: one beside programs that do not roll records up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from mqtt_nats.gateway import account
from mqtt_streams import stored
from mqtt_streams.api import call
from mqtt_streams.consumers import consumer_names, delete_consumer
from mqtt_streams.definitions import RECORDS
from mqtt_streams.hashing import name_hash
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.retained import retained_subject
from mqtt_streams.sessions import PREFIX as SESSION_PREFIX
from mqtt_streams.sessions import STREAM as SESSIONS
from tests.base.support import PATIENCE, Inside, running
from tests.conftest import NatsFactory
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually

SHARED_WITH_LISTENER = {SESSIONS, RETAINED}
OTHER = "another1"


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory(mqtt=True)


@pytest.fixture
def inside(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    monkeypatch.setattr(account, "GROWN", 0.2)
    monkeypatch.setattr(account, "STREAMS_CHECK_S", 0.1)
    with running(server.url) as found:
        yield found


def do(inside: Inside, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, inside.loop).result(PATIENCE)


def inbox(inside: Inside) -> Any:
    found = inside.gateway.account
    assert found is not None
    return found.services.nats.inbox


def single(inside: Inside) -> set[str]:
    """The streams that keep one message per subject."""

    async def look() -> set[str]:
        infos = {stream: await call(inbox(inside), f"STREAM.INFO.{stream}") for stream in RECORDS}
        limits = {stream: info["config"]["max_msgs_per_subject"] for stream, info in infos.items()}
        assert set(limits.values()) <= {1, 16}
        return {stream for stream, limit in limits.items() if limit == 1}

    found: set[str] = do(inside, look())
    return found


def count(inside: Inside, stream: str, subject: str) -> int:
    return len(do(inside, stored.all_of(inbox(inside), stream, subject)))


async def forget(inside: Inside) -> None:
    """Remove what shows that nats-server's listener has clients, as after its end."""
    for name in await consumer_names(inbox(inside), RETAINED):
        await delete_consumer(inbox(inside), RETAINED, name)


def test_the_listener_of_nats_server(server: NatsServer, inside: Inside, caplog: pytest.LogCaptureFixture) -> None:
    """What ends there does not come back: neither at once, by a record that was stored before, nor later."""
    caplog.set_level("INFO", "mqtt_nats.gateway")
    gateway = inside.ports[0]
    for text in (b"1", b"2"):
        _retain(gateway, "kept", text)
    for _ in range(2):
        _session(gateway, "wanders", clean=False)
    assert single(inside) == set()
    with Raw.connected(server.mqtt_port, "first"):
        eventually(lambda: single(inside) == SHARED_WITH_LISTENER, PATIENCE)
    assert [one.message for one in caplog.records if "may come back after a kill of nats-server" in one.message] == [
        "nats-server's own MQTT listener has clients: what is removed from $MQTT_sess, $MQTT_rmsgs may come back after "
        "a kill of nats-server"
    ]
    for port in (server.mqtt_port, gateway, server.mqtt_port):
        assert _session(port, "wanders", clean=False)
    _session(server.mqtt_port, "wanders", clean=True)
    _retain(server.mqtt_port, "kept", b"3")
    _retain(server.mqtt_port, "kept", b"")
    eventually(lambda: count(inside, RETAINED, retained_subject("kept")) == 0, PATIENCE)
    eventually(lambda: count(inside, SESSIONS, SESSION_PREFIX + name_hash("wanders")) == 0, PATIENCE)
    assert not _session(gateway, "wanders", clean=False)
    with Raw.connected(gateway, "reader") as reader:
        assert reader.subscribe(("kept", 1)) == [1]
        assert reader.ping() == []
    do(inside, forget(inside))
    eventually(lambda: single(inside) == set(), PATIENCE)


def test_a_gateway_that_starts_beside_the_listener(server: NatsServer) -> None:
    """It makes the streams that the listener has not made, and leaves the others as they are."""
    with Raw.connected(server.mqtt_port, "first"), running(server.url) as inside:
        assert single(inside) == SHARED_WITH_LISTENER
        _retain(inside.ports[0], "kept", b"1")
        _retain(inside.ports[0], "kept", b"2")
        assert count(inside, RETAINED, retained_subject("kept")) == 1


def test_a_limit_of_retained_messages(server: NatsServer) -> None:
    """A topic whose message is retained gets another one, and is cleared, also where no further topic has room."""
    with running(server.url, max_retained=2) as inside:
        assert single(inside) == {RETAINED}
        for topic in ("a", "b", "a", "b"):
            _retain(inside.ports[0], topic, b"x")
        _retain(inside.ports[0], "a", b"")
        eventually(lambda: count(inside, RETAINED, retained_subject(">")) == 1, PATIENCE)


def _retain(port: int, topic: str, payload: bytes) -> None:
    with Raw.connected(port, "writer") as writer:
        writer.send(raw.publish(topic, payload, qos=1, id=1, flags=1))
        assert writer.expect(raw.PUBACK, PATIENCE).id == 1


def _session(port: int, name: str, *, clean: bool) -> bool:
    """Connect, subscribe and disconnect; return whether the session was there."""
    with Raw(port) as client:
        client.send(raw.connect(name, clean=clean))
        answer = client.expect(raw.CONNACK)
        assert answer.body[1] == 0, answer
        client.subscribe(("some", 1))
        client.send(b"\xe0\x00")  # DISCONNECT
        client.expect_closed()
        return bool(answer.body[0])
