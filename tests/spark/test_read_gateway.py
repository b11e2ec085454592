# SPDX-License-Identifier: Apache-2.0
"""What publishers of every kind have stored, column by column."""

from typing import Any

from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import PubAck, Publish, publish_all
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading.ranges import snapshot, split
from pyspark_mqtt_nats.reading.read import read_range
from pyspark_mqtt_nats.schema import COLUMNS
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.bystanders import Paho
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.rawclient5 import RawClient5

NOTHING: dict[str, Any] = {
    "qos": 1,
    "retain": False,
    "publisher": None,
    "content_type": None,
    "payload_format": None,
    "response_topic": None,
    "correlation_data": None,
    "message_expiry": None,
    "user_properties": [],
}


def pairs(*given: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value} for key, value in given]


def read(options: Options, connection: Connection) -> list[dict[str, Any]]:
    found = snapshot(options, connection)
    return [
        row
        for part in split(found, 3)
        for batch in read_range(options, found, part, list(COLUMNS))
        for row in batch.to_pylist()
    ]


async def test_publishers_of_every_kind(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    server = nats_factory(mqtt=True)
    gateway = gateway_factory(server)
    expected: list[tuple[str, bytes, dict[str, Any]]] = []

    with Paho(gateway.port, "sensor 1") as paho:
        for index in range(3):
            paho.publish_acknowledged(f"hall/{index}/temp", b"%d" % index, retain=index == 2)
            expected.append((f"hall/{index}/temp", b"%d" % index, {"publisher": "sensor 1", "retain": index == 2}))
        paho.publish("not/stored", b"QoS 0")
        paho.publish_acknowledged("a.b//c d/é*", b"", qos=2)
        expected.append(("a.b//c d/é*", b"", {"publisher": "sensor 1", "qos": 2}))

    async with await RawClient.connect(gateway.port, "raw-311") as old:
        await old.deliver("hall/raw", b"\0\xff", 1)
        expected.append(("hall/raw", b"\0\xff", {"publisher": "raw-311"}))

    async with await RawClient5.connect5(gateway.port, "raw-5") as new:
        rich: dict[str, Any] = {
            "payload_format_indicator": 1,
            "message_expiry_interval": 7200,
            "content_type": "application/json",
            "response_topic": "answers/für uns",
            "correlation_data": b"\0\1\2\xff",
            "user_property": [("unit", "°C"), ("a", "1"), ("a", "2")],
        }
        columns = {
            "publisher": "raw-5",
            "payload_format": 1,
            "message_expiry": 7200,
            "content_type": "application/json",
            "response_topic": "answers/für uns",
            "correlation_data": b"\0\1\2\xff",
            "user_properties": pairs(("unit", "°C"), ("a", "1"), ("a", "2")),
        }
        for qos in (1, 2):
            number = new.publish5("hall/rich", b"{}", qos, **rich)
            if qos == 1:
                await new.expect_ack(PUBACK, number)
            else:
                await new.expect_ack(PUBREC, number)
                new.ack(PUBREL, number)
                await new.expect_ack(PUBCOMP, number)
            expected.append(("hall/rich", b"{}", {**columns, "qos": qos}))
        odd = [("Nats-TTL", "1s"), ("", ""), ("with space", " kept "), ("Nmqtt-Pub", "2")]
        number = new.publish5("hall/odd", b"odd", 1, retain=True, content_type="a\u2028b", user_property=odd)
        await new.expect_ack(PUBACK, number)
        columns = {"publisher": "raw-5", "retain": True, "content_type": "a\u2028b", "user_properties": pairs(*odd)}
        expected.append(("hall/odd", b"odd", columns))

    with Paho(server.mqtt_port, "native") as native:
        for qos in (1, 2):
            native.publish_acknowledged("hall/native", b"native", qos=qos)
            expected.append(("hall/native", b"native", {"qos": qos}))

    base = {"servers": server.url, "includeHeaders": True}
    with Connection(Options.parse(base).access) as connection:
        given_block = b"NATS/1.0\r\nNmqtt-Pub: 1\r\nunit: C\r\ncontent-type: text/csv\r\n\r\n"
        frames = [
            Publish(b"$MQTT.msgs.hall.nats", b"", b"plain"),
            Publish(b"$MQTT.msgs.hall.nats", given_block, b"1,2"),
        ]
        assert all(isinstance(outcome, PubAck) for outcome in publish_all(connection, frames))
        expected.append(("hall/nats", b"plain", {"qos": None}))
        expected.append(("hall/nats", b"1,2", {"content_type": "text/csv", "user_properties": pairs(("unit", "C"))}))

        both = {way: read(Options.parse({**base, "readMode": way}), connection) for way in ("pull", "direct")}
        assert both["pull"] == both["direct"]
        found = both["pull"]
        assert [(row["topic"], row["payload"]) for row in found] == [(topic, payload) for topic, payload, _ in expected]
        for row, (topic, _, known) in zip(found, expected, strict=True):
            assert {name: row[name] for name in NOTHING} == {**NOTHING, **known}, topic
            assert row["topic_levels"] == topic.split("/")
        assert [row["sequence"] for row in found] == list(range(1, len(found) + 1))
        times = [row["timestamp"] for row in found]
        assert times == sorted(times)
        assert [one["key"] for one in found[0]["headers"]] == ["Nmqtt-Pub", "Nmqtt-Id", "Nmqtt-Client"]
        ids = [one["value"] for row in found for one in row["headers"] if one["key"] == "Nmqtt-Id"]
        assert len(set(ids)) == len(ids) == 8
        assert found[-1]["headers"] == pairs(("Nmqtt-Pub", b"1"), ("unit", b"C"), ("content-type", b"text/csv"))

        for filters, topics in (
            ("hall/+/temp", ["hall/0/temp", "hall/1/temp", "hall/2/temp"]),
            ("a.b/#,hall/raw", ["a.b//c d/é*", "hall/raw"]),
            ("+/+/c d/+", ["a.b//c d/é*"]),
        ):
            for mode in ("pull", "direct"):
                rows = read(Options.parse({**base, "readMode": mode, "topics": filters}), connection)
                assert [row["topic"] for row in rows] == topics


async def test_the_retained_state(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    """The last value of each topic, with its properties; what was cleared is not there."""
    server = nats_factory(mqtt=True)
    gateway = gateway_factory(server)
    with Paho(gateway.port, "sensor") as paho, Paho(server.mqtt_port, "native") as native:
        for index in range(5):
            paho.publish_acknowledged(f"lamp/{index}", b"old", retain=True)
        for index in range(4):
            paho.publish_acknowledged(f"lamp/{index}", b"new", qos=index % 2 + 1, retain=True)
        paho.publish_acknowledged("lamp/1", b"", retain=True)
        native.publish_acknowledged("lamp/native", b"on", qos=2, retain=True)
    async with await RawClient5.connect5(gateway.port, "five") as new:
        properties: dict[str, Any] = {"content_type": "text/plain", "user_property": [("a", "b")]}
        new.publish5("lamp/zero", b"0", 0, retain=True, **properties)
        await new.expect_ack(PUBACK, new.publish5("lamp/five", b"5", 1, retain=True, **properties))

    options = Options.parse({"servers": server.url, "mode": "retained"})
    with Connection(options.access) as connection:
        rows = {row["topic"]: row for row in read(options, connection)}
    assert {topic: (row["payload"], row["qos"]) for topic, row in rows.items()} == {
        "lamp/0": (b"new", 1),
        "lamp/2": (b"new", 1),
        "lamp/3": (b"new", 2),
        "lamp/4": (b"old", 1),
        "lamp/native": (b"on", 2),
        "lamp/zero": (b"0", 0),
        "lamp/five": (b"5", 1),
    }
    assert all(row["retain"] is True for row in rows.values())
    assert rows["lamp/five"]["content_type"] == rows["lamp/zero"]["content_type"] == "text/plain"
    assert rows["lamp/five"]["user_properties"] == pairs(("a", "b"))
    assert rows["lamp/0"]["subject"] == "lamp.0"
