# SPDX-License-Identifier: Apache-2.0
"""Topics and filters that are illegal, too long for NATS, or not the clients' business."""

import secrets
import socket
from collections.abc import AsyncIterator, Callable

import nats
import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from tests.harness import raw
from tests.harness.bystanders import Bystanders, Paho
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, connect, publish, subscribe, unsubscribe
from tests.harness.waiting import aeventually, eventually

pytestmark = pytest.mark.usefixtures("unharmed")

LONGEST = 3800
"""Bytes of the longest subject that fits into a NATS control line with all that surrounds it."""

RESERVED = ("$MQTT", "$JS", "$JSC", "$SYS", "$KV", "$O", "$OBJ", "$NRG", "$GNR", "_INBOX", "_R_", "_GR_")
"""First levels that belong to NATS, to JetStream or to the gateways."""

ILLEGAL = (
    *("", "a/#/b", "#/", "a#", "#a", "a/b#", "##", "a+", "+a", "a/+b/c", "++", "a/++", "+#"),
    *("$share/g", "$share/", "$share//a", "$share/g/", "$share/g+/a", "$share/#/a", "$share/g/a#"),
)


@pytest.fixture
async def nats_client(nats_server: NatsServer) -> AsyncIterator[NatsClient]:
    client = await nats.connect(nats_server.url)
    yield client
    await client.close()


# -- filters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic_filter", ILLEGAL)
@pytest.mark.parametrize("clean", [True, False])
def test_illegal_filters_end_the_connection(gateway: Gateway, topic_filter: str, clean: bool) -> None:
    """[MQTT-4.7.1-2] [MQTT-4.7.1-3] [MQTT-4.7.3-1] [MQTT-4.8.0-1]: a violation, and nothing of the packet is done."""
    topic, client_id = f"legal/{secrets.token_hex(4)}", f"filters-{secrets.token_hex(4)}"
    for data in (subscribe((topic, 1), (topic_filter, 1)), unsubscribe(topic, topic_filter)):
        with Raw.connected(gateway.port, client_id, clean=clean) as client:
            client.send(data)
            assert client.expect_closed() == []
    with Raw.connected(gateway.port, client_id, clean=clean) as client:
        client.send(publish(topic, b"x", qos=1))
        assert client.expect(raw.PUBACK).id == 1
        assert client.ping() == []


@pytest.mark.parametrize("clean", [True, False])
def test_filters_beyond_limits_are_refused(gateway: Gateway, clean: bool) -> None:
    """[MQTT-3.9.3-2]: 0x80 for the one, the others are served."""
    topic_filter = "/".join("x" * 129)
    topic = f"legal/{secrets.token_hex(4)}"
    with Raw.connected(gateway.port, f"filters-{secrets.token_hex(4)}", clean=clean) as client:
        assert client.subscribe((topic_filter, 1)) == [0x80]
        assert client.subscribe((topic_filter, 0), (topic, 1), (topic_filter, 2)) == [0x80, 1, 0x80]
        client.send(unsubscribe(topic_filter, id=3))
        assert client.expect(raw.UNSUBACK).id == 3
        client.send(publish(topic, b"x"))
        assert client.expect(raw.PUBLISH).payload == b"x"


def test_shared_subscriptions(gateway: Gateway) -> None:
    """``$share`` alone is a topic like others; what looks like a shared subscription has to be one."""
    with Raw.connected(gateway.port) as client:
        codes = client.subscribe(("$share/group/topic", 1), ("$share", 0), ("$share/g/$JS/a", 1))
        assert list(codes) == [1, 0, 0x80]


# -- too long for a control line -----------------------------------------------------------------

TOO_LONG = {
    "plain": "a" * (LONGEST + 1),
    "dots": "." * (LONGEST // 2 + 1),
    "escapes": " " * (LONGEST // 2 + 1),
    "three bytes each": "\u20ac" * (LONGEST // 3 + 1),
    "the longest string": "b" * 65535,
}


@pytest.mark.parametrize("topic", TOO_LONG.values(), ids=TOO_LONG.keys())
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("retain", [0, 1])
def test_publish_on_a_topic_too_long_for_nats(gateway: Gateway, topic: str, qos: int, retain: int) -> None:
    """3.1.1 has no other answer than to close."""
    with Raw.connected(gateway.port) as client:
        client.send(publish(topic, b"x", qos=qos, flags=retain))
        assert client.expect_closed() == []


@pytest.mark.parametrize("topic", TOO_LONG.values(), ids=TOO_LONG.keys())
def test_subscribe_to_a_filter_too_long_for_nats(gateway: Gateway, topic: str) -> None:
    with Raw.connected(gateway.port) as client:
        filters = [topic, topic + "/#", "+/" + topic] if len(topic) < 60_000 else [topic]
        for topic_filter in filters:
            assert client.subscribe((topic_filter, 1)) == [0x80]
        assert client.ping() == []


@pytest.mark.parametrize("topic", ["a" * 3801, "$JS/API/INFO", "$MQTT/msgs/x", "_INBOX/x"])
def test_a_will_that_may_not_be_published(gateway: Gateway, topic: str) -> None:
    """Refused when it is announced, not when it is too late to tell anybody."""
    with Raw(gateway.port) as client:
        client.send(connect("will", flags=0x0E, tail=(topic, b"payload")))
        (answer,) = client.expect_closed()
        assert answer.kind == raw.CONNACK
        assert answer.body[0] == 0
        assert answer.body[1] != 0


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("make", [lambda n: "c" * n, lambda n: "." * (n // 2), lambda n: "d" * (n - 4) + "/e/f"])
def test_the_longest_topic(gateway: Gateway, clean: bool, make: Callable[[int], str]) -> None:
    """It passes through everything that makes subjects longer: streams, consumers, held publishes."""
    topic = make(LONGEST)
    client_id = secrets.token_hex(100)  # 200 characters: as long as a subject token can be
    with Raw.connected(gateway.port, client_id, clean=clean) as client:
        assert client.subscribe((topic, 2), (topic[:-2] + "/#", 1), (topic[:-2] + "/+", 0)) == [2, 1, 0]
        for qos in (0, 1):
            client.send(publish(topic, b"%d" % qos, qos=qos, id=20 + qos))
            found = [client.receive() for _ in range(1 + qos)]
            delivered = next(one for one in found if one is not None and one.kind == raw.PUBLISH)
            assert (delivered.topic, delivered.payload, delivered.qos) == (topic, b"%d" % qos, qos)
            if qos:
                client.send(raw.ack(raw.PUBACK, delivered.id))
        client.send(publish(topic, b"2", qos=2, id=30))
        client.expect(raw.PUBREC)
        client.send(raw.ack(raw.PUBREL, 30))
        found = [client.receive() for _ in range(2)]
        assert {one.kind for one in found if one is not None} == {raw.PUBLISH, raw.PUBCOMP}
        delivered = next(one for one in found if one is not None and one.kind == raw.PUBLISH)
        client.send(raw.ack(raw.PUBREC, delivered.id))
        client.expect(raw.PUBREL)
        client.send(raw.ack(raw.PUBCOMP, delivered.id))
        client.send(publish(topic, b"retained", qos=1, id=31, flags=1))
        kinds = {one.kind for one in (client.receive(), client.receive()) if one is not None}
        assert kinds == {raw.PUBACK, raw.PUBLISH}
        client.ping()
        client.send(publish(topic, b"", qos=1, id=32, flags=1))
        client.ping()
        client.send(raw.packet(0xE0))
        client.expect_closed()
    with Raw.connected(gateway.port, client_id) as client:
        client.ping()  # and nothing of the session is left


# -- reserved subjects ---------------------------------------------------------------------------


@pytest.mark.parametrize("root", RESERVED)
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("retain", [0, 1])
async def test_reserved_topics_are_not_published(
    gateway: Gateway, nats_client: NatsClient, root: str, qos: int, retain: int
) -> None:
    """[MQTT-3.3.5-2]: the connection is closed."""
    seen: list[Msg] = []

    async def see(message: Msg) -> None:
        seen.append(message)

    token = secrets.token_hex(4)
    if root != "$SYS":
        await nats_client.subscribe(f"{root}.{token}.>", cb=see)
        await nats_client.subscribe(f"$MQTT.*.{root}.{token}.>", cb=see)
    await nats_client.subscribe(f"end.{token}", cb=see)
    await fence(nats_client)
    for topic in (f"{root}/{token}/x", root):
        with Raw.connected(gateway.port) as client:
            client.send(publish(topic, b"x", qos=qos, flags=retain))
            assert client.expect_closed() == []
    with Raw.connected(gateway.port) as client:
        client.send(publish(f"end/{token}", b"end"))
        client.ping()
    await aeventually(lambda: seen)
    assert [message.data for message in seen] == [b"end"]


@pytest.mark.parametrize("topic", ["$JS.API.INFO", "$MQTT.msgs.x", "$KV.bucket.key", "$", "$x/y", "_x/y", "$mqtt/x"])
def test_topics_that_only_look_reserved(gateway: Gateway, topic: str) -> None:
    """A dot in a level is no separator, and other names with `$` or `_` belong to the clients."""
    with Raw.connected(gateway.port) as client:
        assert client.subscribe((topic, 1)) == [1]
        client.send(publish(topic, b"mine", qos=0))
        assert client.expect(raw.PUBLISH).topic == topic


@pytest.mark.parametrize("root", [root for root in RESERVED if root != "$SYS"])
@pytest.mark.parametrize("clean", [True, False])
def test_reserved_filters_are_refused(gateway: Gateway, root: str, clean: bool) -> None:
    with Raw.connected(gateway.port, f"reserved-{secrets.token_hex(4)}", clean=clean) as client:
        for rest in ("", "/#", "/+", "/+/#", "/x"):
            assert client.subscribe((root + rest, 2)) == [0x80]
        assert client.ping() == []


async def test_wildcards_never_show_internal_traffic(
    gateway: Gateway, bystanders: Bystanders, nats_client: NatsClient
) -> None:
    """`#` and `+/...` show what clients publish, and nothing of NATS, JetStream or the gateways."""
    js = nats_client.jetstream()
    bucket = await js.create_key_value(bucket=f"bucket{secrets.token_hex(4)}")
    token = secrets.token_hex(4)
    # What only a NATS client can do: stored and retained messages under reserved subjects.
    headers = {"Nmqtt-Pub": "1", "Nmqtt-RTopic": f"$KV/{token}", "Nmqtt-RFlags": "3"}
    for root in ("$KV", "$MQTT", "_INBOX"):
        await js.publish(f"$MQTT.rmsgs.{root}.{token}", b"internal", headers=headers)
    patterns = ("#", "+/#", "+", "+/+", "+/+/+", "+/+/+/+", "+/+/+/+/+", "+/+/+/+/+/+", "+/+/x/#", "$SYS/#", "$SYS/+/#")
    with (
        Paho(gateway.port) as regular,
        Paho(gateway.port, f"everything-{token}", clean=False) as durable,
        Paho(gateway.port, f"levels-{token}", clean=False) as levels,
        Paho(gateway.port) as zero,
    ):
        regular.subscribe("#", 2)
        durable.subscribe("#", 2)
        zero.subscribe("#", 0)
        for pattern in patterns[1:]:
            levels.subscribe(pattern, 1)
        for root in ("$KV", "$MQTT", "_INBOX", "$O"):
            await js.publish(f"$MQTT.msgs.{root}.{token}", b"internal", headers={"Nmqtt-Pub": "1"})
            if root != "$MQTT":
                await nats_client.publish(f"{root}.{token}", b"internal")
        await bucket.put("key", b"internal")
        await bucket.get("key")
        await js.account_info()
        await js.stream_info("$MQTT_msgs")
        await fence(nats_client)
        regular.publish_acknowledged(f"{token}/b/retained", b"end", 2, retain=True)
        subscribers = (regular, durable, levels, zero)
        for subscriber in subscribers:
            eventually(lambda s=subscriber: s.payloads(f"{token}/b/retained") == [b"end"])  # type: ignore[misc]
        for subscriber in subscribers:
            roots = {topic.partition("/")[0] for topic, _, _, _ in subscriber.received}
            if subscriber is levels:
                roots.discard("$SYS")  # which it has asked for
            assert not {root for root in roots if root in RESERVED or root[:1] == "$"}
            assert b"internal" not in subscriber.payloads()
    for client_id in (f"everything-{token}", f"levels-{token}"):
        Raw.connected(gateway.port, client_id).close()


def test_subjects_that_are_no_topics(gateway: Gateway, nats_server: NatsServer) -> None:
    """What NATS clients publish under subjects without a legal topic name is not delivered, and does no harm."""
    token = secrets.token_bytes(4).hex().encode()
    illegal = (b"a+b", b"a#b", b"#", b"+", b"\xe2\x82", b"\xff", b"\xed\xa0\x80", b"a\0b")
    with (
        Paho(gateway.port) as client,
        socket.create_connection(("127.0.0.1", nats_server.port)) as connection,
        connection.makefile("rwb") as stream,
    ):
        client.subscribe("#", 1)
        client.subscribe(f"{token.decode()}/+", 1)
        stream.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
        for level in illegal:
            stream.write(b"PUB %b.%b 7\r\nillegal\r\n" % (token, level))
            stream.write(b"PUB $MQTT.msgs.%b.%b 7\r\nillegal\r\n" % (token, level))
            headers = b"NATS/1.0\r\nNmqtt-RFlags:1\r\n\r\n"
            stream.write(b"HPUB $MQTT.rmsgs.%b.%b %d " % (token, level, len(headers)))
            stream.write(b"%d\r\n%billegal\r\n" % (len(headers) + 7, headers))
        stream.write(b"PUB %b.end 3\r\nend\r\n" % token)
        stream.flush()
        eventually(lambda: client.payloads(f"{token.decode()}/end") == [b"end"])
        client.subscribe(f"{token.decode()}/#", 1)  # with the retained ones
        assert [one for one in client.received if one[1] == b"illegal"] == []
        assert client.disconnections == []
