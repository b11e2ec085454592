# SPDX-License-Identifier: Apache-2.0
"""`migrate sessions` with a broker that a test writes: what comes in which order, and what is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import Connack, Connect, Packet, Properties, Publish, Suback, Subscribe, ack_bytes
from mqtt_nats.ctl.migration.transfer import carry
from mqtt_nats.ctl.migration.transfer.carry import carry_sessions
from mqtt_nats.ctl.migration.transfer.mosquitto_db import Database, Session, Waiting
from mqtt_nats.ctl.migration.transfer.mqtt_client import Broker
from mqtt_nats.ctl.migration.transfer.publisher import Carried
from tests.ctl.migration.test_retained import PUBACK, broker, message

pytestmark = pytest.mark.anyio


class Gateway:
    """Answers a command as a gateway does, and notes what it gets."""

    def __init__(self, *, there: tuple[str, ...] = (), refused: tuple[str, ...] = (), carries: bool = True) -> None:
        self._there, self._refused = there, refused
        self._properties: Properties = {"user_property": [("Nmqtt-For", "")]} if carries else {}
        self.log: list[str] = []

    def connack(self, connect: Connect) -> Connack:
        if connect.client_id in self._refused:
            return Connack(False, 0x87)
        if connect.client_id:
            expiry = (connect.properties or {}).get("session_expiry_interval")
            self.log.append(f"session {connect.client_id} {expiry}")
        else:
            self.log.append(f"publisher {connect.username}")
        return Connack(connect.client_id in self._there, 0, self._properties)

    def answer(self, packet: Packet) -> list[Packet | bytes]:
        if isinstance(packet, Subscribe):
            self.log.append("subscribe " + " ".join(one.topic_filter for one in packet.filters))
            return [Suback(packet.packet_id, tuple(one.qos for one in packet.filters))]
        if isinstance(packet, Publish):
            pairs = (packet.properties or {}).get("user_property", [])
            assert packet.qos == 1
            self.log.append(
                f"publish {packet.payload.decode()} " + " ".join(f"{name}={value}" for name, value in pairs)
            )
            return [ack_bytes(PUBACK, packet.packet_id)]
        return []


def waiting(payload: str, *clients: str, user: str | None = None) -> Waiting:
    return Waiting(message("t", retain=False, qos=1, payload=payload.encode()), user, list(clients))


def sessions(*names: str) -> dict[str, Session]:
    """Sessions of 5.0 clients, which the broker of a test speaks."""
    return {name: Session(None, {"t": 1}, {}, 60) for name in names}


async def carried(gateway: Gateway, database: Database) -> tuple[Carried, Carried]:
    made, messages = Carried(), Carried()
    async with broker(gateway.answer, gateway.connack) as target:

        def of(user: str | None) -> Broker:
            return replace(target, user=user)

        await carry_sessions(database, of, made, messages)
    return made, messages


async def test_sessions_are_made_before_messages() -> None:
    """Each message names the sessions that it waits for, and its QoS."""
    gateway = Gateway()
    database = Database(sessions("idle", "late", "early"), [waiting("1", "early"), waiting("2", "early", "late")])
    made, messages = await carried(gateway, database)
    found = [one for one in gateway.log if not one.startswith("subscribe")]
    assert found[0] == "publisher None"
    assert set(found[1:4]) == {"session early 60", "session late 60", "session idle 60"}
    assert found[4:] == [
        "publisher None",
        "publish 1 Nmqtt-For=early Nmqtt-Pub=1",
        "publish 2 Nmqtt-For=early Nmqtt-For=late Nmqtt-Pub=1",
    ]
    assert (made.count, messages.count, made.lost, messages.lost) == (3, 2, [], [])


async def test_messages_of_a_session_that_was_there_are_not_published() -> None:
    gateway = Gateway(there=("a",))
    made, messages = await carried(gateway, Database(sessions("a"), [waiting("1", "a")]))
    assert gateway.log == ["publisher None", "session a 60"]
    assert (made.there, messages.there, messages.count) == (1, 1, 0)


async def test_messages_of_a_session_that_is_refused_are_lost() -> None:
    """A message that another session waits for is published all the same."""
    gateway = Gateway(refused=("a",))
    database = Database(sessions("a", "b"), [waiting("1", "a"), waiting("2", "a", "b")])
    made, messages = await carried(gateway, database)
    assert [one for one in gateway.log if one.startswith("publish ")] == ["publish 2 Nmqtt-For=b Nmqtt-Pub=1"]
    assert (made.count, messages.count, messages.there) == (1, 1, 0)
    assert len(made.lost) == 1
    assert messages.lost == ["session 'a': 2 waiting, since the session is not carried over"]


async def test_connections_of_publishers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are open are closed for the next one, and opened again."""
    monkeypatch.setattr(carry, "USERS_AT_ONCE", 2)
    gateway = Gateway()
    database = Database(sessions("a"), [waiting(one, "a", user=one) for one in ("x", "y", "x", "z", "x")])
    _, messages = await carried(gateway, database)
    assert messages.count == 5
    assert [one.partition(" Nmqtt")[0] for one in gateway.log[3:]] == [
        "publisher x",
        "publish x",
        "publisher y",
        "publish y",
        "publish x",
        "publisher z",
        "publish z",
        "publisher x",
        "publish x",
    ]


async def test_a_gateway_that_would_give_messages_to_others_gets_nothing() -> None:
    """Neither messages nor sessions. Sessions without messages are made all the same."""
    gateway = Gateway(carries=False)
    with pytest.raises(StartupError, match="use the listener that `migrate key` prints"):
        await carried(gateway, Database(sessions("a"), [waiting("1", "a")]))
    assert gateway.log == ["publisher None"]
    made, _ = await carried(gateway, Database(sessions("a")))
    assert made.count == 1


async def test_a_message_for_many_sessions_is_stored_for_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "SESSIONS_OF_ONE", 2)
    gateway = Gateway()
    await carried(gateway, Database(sessions("a", "b", "c"), [waiting("1", "a", "b", "c")]))
    assert [one for one in gateway.log if one.startswith("publish ")] == [
        "publish 1 Nmqtt-For=a Nmqtt-For=b Nmqtt-Pub=1",
        "publish 1 Nmqtt-For=c Nmqtt-Pub=1",
    ]
