# SPDX-License-Identifier: Apache-2.0
"""Things in the streams that no gateway would have written."""

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory
from tests.harness import raw
from tests.harness.bystanders import Bystanders, Paho
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, connect, publish
from tests.harness.waiting import aeventually, eventually

pytestmark = pytest.mark.usefixtures("unharmed")

SESSIONS = "$MQTT_sess"


@pytest.fixture
async def js(nats_server: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(nats_server.url)
    yield client.jetstream()
    await client.close()


def consumer(client_id: str, **changes: Any) -> dict[str, Any]:
    """A consumer as a session record names it."""
    return {
        "durable_name": f"{name_hash(client_id)}_x",
        "deliver_subject": "$MQTT.sub.x",
        "filter_subject": "$MQTT.msgs.a",
        "max_ack_pending": 10,
    } | changes


POISONS: dict[str, Any] = {
    "nothing": b"",
    "no JSON": b'{"id": ',
    "no UTF-8": b"\xff\xfe\x00",
    "null": None,
    "a number": 7,
    "a list": [1],
    "deeply nested": b"[" * 100_000,
    "a huge number": b'{"id": "ID", "subs": {"a": 1e400}}',
    "subs is a list": {"subs": ["a"]},
    "a QoS that is none": {"subs": {"a": 3}},
    "a QoS that is a string": {"subs": {"a": "1"}},
    "a subject with a space": {"subs": {"a b": 1}},
    "a subject with a line end": {"subs": {"a\r\nPUB b 0\r\n": 1}},
    "an empty subject": {"subs": {"": 0}},
    "a subscription to everything internal": {"cons": {"x": consumer("ID", deliver_subject="$JS.API.STREAM.DELETE.x")}},
    "cons is a string": {"cons": "a"},
    "a consumer without name": {"cons": {"a": {}}},
    "another client's consumer": {"cons": {"a": consumer("ID", durable_name=f"{name_hash('other')}_x")}},
    "a consumer name with a dot": {"cons": {"a": consumer("ID", durable_name=f"{name_hash('ID')}_x.y")}},
    "a deliver subject with a wildcard": {"cons": {"a": consumer("ID", deliver_subject="$MQTT.sub.*")}},
    "a filter subject of another stream": {"cons": {"a": consumer("ID", filter_subject="$MQTT.sess.>")}},
    "v5 is a list": {"v5": []},
    "v5 without kind": {"v5": {"version": 1}},
    "draining another client's consumer": {
        "v5": {
            "version": 1,
            "kind": "durable",
            "draining": [{"name": "other_x", "filter_subject": "a", "qos": 1, "end": 1}],
        }
    },
    "a cursor below zero": {"v5": {"version": 1, "kind": "durable", "replay": {"a": -1}}},
}


def poison(value: Any, client_id: str) -> bytes:
    if isinstance(value, bytes):
        return value.replace(b"ID", client_id.encode())
    if isinstance(value, dict):
        text = json.dumps({"id": client_id} | value)
        return text.replace(name_hash("ID"), name_hash(client_id)).encode()
    return json.dumps(value).encode()


@pytest.mark.parametrize("value", POISONS.values(), ids=POISONS.keys())
async def test_a_poisoned_session_record(gateway: Gateway, js: JetStreamContext, value: Any) -> None:
    """CONNACK 3 until a clean start replaces it; after that everything is as always."""
    client_id = f"poisoned-{secrets.token_hex(4)}"
    subject = f"$MQTT.sess.{name_hash(client_id)}"
    data = poison(value, client_id)
    await js.publish(subject, data)
    for _ in range(2):
        with Raw(gateway.port) as client:
            client.send(connect(client_id, clean=False))
            (answer,) = client.expect_closed()
            assert (answer.kind, answer.body) == (raw.CONNACK, b"\0\x03")
    assert (await js.get_last_msg(SESSIONS, subject)).data in (data, None)
    with Raw(gateway.port) as client:
        client.send(connect(client_id, clean=True))
        assert client.expect(raw.CONNACK).body == b"\0\0"
        client.ping()
    for present in (0, 1):
        with Raw(gateway.port) as client:
            client.send(connect(client_id, clean=False))
            assert client.expect(raw.CONNACK).body == bytes((present, 0))
            assert client.subscribe((f"poisoned/{client_id}", 1)) == [1]
            client.send(publish(f"poisoned/{client_id}", b"x", qos=1))
            assert {one.kind for one in (client.receive(), client.receive()) if one} == {raw.PUBACK, raw.PUBLISH}
            client.send(raw.ack(raw.PUBACK, 2))
    Raw.connected(gateway.port, client_id).close()


async def test_a_record_with_filters_that_clients_may_not_have(gateway: Gateway, js: JetStreamContext) -> None:
    """nats-server's listener allows more: the session goes on with the rest."""
    client_id = f"migrated-{secrets.token_hex(4)}"
    subs = {"$JS.EVENT.>": 0, "_INBOX.x": 0, "odd.a+b": 0, client_id: 0}
    await js.publish(f"$MQTT.sess.{name_hash(client_id)}", poison({"subs": subs}, client_id))
    with Raw(gateway.port) as client:
        client.send(connect(client_id, clean=False))
        assert client.expect(raw.CONNACK).body == b"\1\0"
        client.send(publish(client_id, b"x"))
        assert (client.expect(raw.PUBLISH)).body.endswith(b"x")
        client.ping()
    Raw.connected(gateway.port, client_id).close()


@pytest.mark.parametrize("clean", [True, False])
async def test_a_record_of_another_client_id(gateway: Gateway, js: JetStreamContext, clean: bool) -> None:
    """Two ids with one hash do not share a session: the second has its own elsewhere, and the first keeps its own."""
    client_id = f"collision-{secrets.token_hex(4)}"
    subject = f"$MQTT.sess.{name_hash(client_id)}"
    data = json.dumps({"id": "the other one", "subs": {"a": 1}}).encode()
    await js.publish(subject, data)
    with Raw(gateway.port) as client:
        client.send(connect(client_id, clean=clean))
        assert client.expect(raw.CONNACK).body == b"\0\0"
        client.ping()
    assert (await js.get_last_msg(SESSIONS, subject)).data == data


async def test_a_record_overwritten_under_a_connected_client(gateway: Gateway, js: JetStreamContext) -> None:
    """The owner notices at its next write, and touches nothing of what is not its own any more."""
    client_id = f"overwritten-{secrets.token_hex(4)}"
    subject = f"$MQTT.sess.{name_hash(client_id)}"
    with Raw.connected(gateway.port, client_id, clean=False) as client:
        assert client.subscribe(("a", 1)) == [1]
        await js.publish(subject, b"garbage")
        client.send(raw.subscribe(("b", 1), id=2))
        assert [one.kind for one in client.expect_closed()] == []
    assert (await js.get_last_msg(SESSIONS, subject)).data == b"garbage"
    with Raw.connected(gateway.port, client_id) as client:
        client.ping()


@pytest.mark.long
async def test_a_poisoned_record_whose_deadline_passes(
    nats_server: NatsServer, gateway_factory: GatewayFactory, js: JetStreamContext
) -> None:
    """The timer of the record before it is void, and timers of others still work."""
    gateway = gateway_factory(nats_server, env={"MQTT_NATS_SESSION_EXPIRY_INTERVAL": "3"})
    poisoned, other = f"expired-{secrets.token_hex(4)}", f"expired-{secrets.token_hex(4)}"
    Raw.connected(gateway.port, poisoned, clean=False).close()
    await aeventually(lambda: _deadlines(js, poisoned))
    await js.publish(f"$MQTT.sess.{name_hash(poisoned)}", b"garbage")
    Raw.connected(gateway.port, other, clean=False).close()
    await aeventually(lambda: _gone(js, other))
    assert (await js.get_last_msg(SESSIONS, f"$MQTT.sess.{name_hash(poisoned)}")).data == b"garbage"
    await js.purge_stream(SESSIONS, subject=f"$MQTT.sess.{name_hash(poisoned)}")


async def _deadlines(js: JetStreamContext, client_id: str) -> bool:
    info = await js.stream_info("$MQTT_timers", subjects_filter="$MQTT.timers.>")
    return any(name_hash(client_id) in subject for subject in info.state.subjects or {})


async def _gone(js: JetStreamContext, client_id: str) -> bool:
    try:
        await js.get_last_msg(SESSIONS, f"$MQTT.sess.{name_hash(client_id)}")
    except NotFoundError:
        return True
    return False


async def test_garbage_in_every_stream(gateway: Gateway, bystanders: Bystanders, js: JetStreamContext) -> None:
    """Messages, retained messages, held publishes, PUBRELs and timers with headers that are wrong."""
    client_id = f"garbage-{secrets.token_hex(4)}"
    hashed = name_hash(client_id)
    with Paho(gateway.port, client_id, clean=False) as client:
        client.subscribe("garbage/#", 2)
    headers: list[dict[str, str] | None] = [
        None,
        {"Nmqtt-Pub": ""},
        {"Nmqtt-Pub": "9"},
        {"Nmqtt-Pub": "1", "Nmqtt-Id": "\u00e9" * 2000, "Nmqtt-Client": "%zz%"},
        {"Nmqtt-PubRel": "x"},
        {"Nmqtt-PubRel": "0"},
        {"Nmqtt-PubRel": "70000", "Nmqtt-Seq": "-1"},
        {"Nmqtt-PubRel": "99999999999999999999"},
        {"Nmqtt-RFlags": "-1"},
        {"Nmqtt-RFlags": "f", "Nmqtt-RTopic": "garbage/x"},
        {"Nmqtt-Pub": "2f", "Nmqtt-Subject": "$JS.API.STREAM.DELETE.$MQTT_msgs", "Nmqtt-Epoch": "x"},
        {"Nmqtt-Pub": "24", "Nmqtt-Subject": "garbage.q2", "Nmqtt-Epoch": "1", "Nmqtt-Id": "x"},
    ]
    for number, block in enumerate(headers):
        for subject in (
            "$MQTT.msgs.garbage.x",
            f"$MQTT.rmsgs.garbage.{number}",
            f"$MQTT.qos2.in.{client_id}.{number}",
            f"$MQTT.qos2.in.{client_id}.x{number}",
            f"$MQTT.out.pubrel.{hashed}",
            f"$MQTT.timers.garbage.{number}",
            f"$MQTT.timers.fired.expiry.{hashed}",
        ):
            for payload in (b"", b"{", b"null", b'{"msg": 5, "flags": "x"}'):
                try:
                    await js.publish(subject, payload, headers=block)
                except nats.js.errors.APIError as error:
                    assert error.err_code in (10077, 10060), error  # noqa: PT017  # held already; no such subject
                except nats.js.errors.NoStreamResponseError:
                    break
    with Paho(gateway.port, client_id, clean=False) as client:
        bystanders.publisher.publish_acknowledged("garbage/end", b"end", 2)
        eventually(lambda: b"end" in client.payloads())
        client.subscribe("garbage/+", 1)
        bystanders.publisher.publish_acknowledged("garbage/end", b"end 2", 1)
        eventually(lambda: b"end 2" in client.payloads())
        client.publish_acknowledged("garbage/end", b"end 3", 2)
        eventually(lambda: b"end 3" in client.payloads())
        assert client.disconnections == []
    assert (await js.stream_info("$MQTT_msgs")).config.name == "$MQTT_msgs"
    Raw.connected(gateway.port, client_id).close()
    await js.purge_stream("$MQTT_rmsgs", subject="$MQTT.rmsgs.garbage.>")


@pytest.mark.long
def test_the_deadline_of_a_session_is_its_own(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """A session that was taken up again does not end at its former deadline."""
    expiry = 4  # seconds; the client has to be back in time
    gateway = gateway_factory(nats_server, env={"MQTT_NATS_SESSION_EXPIRY_INTERVAL": str(expiry)})
    client_id = f"deadline-{secrets.token_hex(4)}"
    Raw.connected(gateway.port, client_id, clean=False).close()
    with Raw(gateway.port) as client:
        client.send(connect(client_id, clean=False))
        assert client.expect(raw.CONNACK).body == b"\1\0"
        deadline = time.monotonic() + expiry + 1
        eventually(lambda: client.ping() == [] and time.monotonic() > deadline)
        assert client.subscribe(("deadline", 1)) == [1]
