# SPDX-License-Identifier: Apache-2.0
"""Batch reads through Spark: what MQTT clients have published, a pinned end, schemas, and what users are told."""

import itertools
import threading
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from pyspark_mqtt_nats.nats.jetstream import Publish
from tests.conftest import NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import PUBACK, PUBCOMP, PUBREC, PUBREL, Raw, ack, publish
from tests.harness.raw5 import CONTENT_TYPE, CORRELATION, EXPIRY, FORMAT, RESPONSE_TOPIC, USER, Raw5, prop
from tests.harness.waiting import eventually
from tests.spark.storing import SOURCE, Store, complaint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.timeout(360)

PROPERTIES = (
    prop(FORMAT, 1),
    prop(EXPIRY, 600),
    prop(CONTENT_TYPE, "text/plain"),
    prop(RESPONSE_TOPIC, "answers/here"),
    prop(CORRELATION, b"\0\xff"),
    prop(USER, ("unit", "\u00b0C")),
    prop(USER, ("unit", "K: kelvin")),
)
COLUMNS = (
    *("topic", "topic_levels", "subject", "payload", "qos", "retain", "publisher", "content_type", "payload_format"),
    *("response_topic", "correlation_data", "message_expiry", "user_properties", "headers"),
)


def deliver(client: Raw, topic: str, payload: bytes, qos: int, flags: int = 0) -> None:
    """Publish as a 3.1.1 client and see the message acknowledged."""
    client.send(publish(topic, payload, qos=qos, flags=flags))
    if qos == 2:
        client.expect(PUBREC)
        client.send(ack(PUBREL, 1))
    client.expect(PUBACK if qos == 1 else PUBCOMP)


def test_messages_of_mqtt_clients_and_of_nats_clients(
    spark: "SparkSession", nats_server: NatsServer, gateway: Gateway
) -> None:
    with Raw.connected(gateway.port, "old/one") as old, Raw5.open(gateway.port, "new one") as new:
        deliver(old, "house/kitchen/temp", b"20.5", 1)
        deliver(old, "house//living room", b"21", 2, flags=1)
        new.deliver("house/v1.2/temp", b"\xc2\xb0", *PROPERTIES, qos=2)
        new.deliver("house", b"", prop(USER, ("Nats-TTL", "5")))
        new.deliver("$house/x/temp", b"hidden from a wildcard")
        new.deliver("other", b"of another topic")
    with Store(nats_server.url) as store:
        store.publish(Publish(b"$MQTT.msgs.house.nats", b"", b"of a NATS client"))
    read = spark.read.format(SOURCE).option("servers", nats_server.url)
    found = read.option("topics", "house/#, +/+/temp").option("includeHeaders", "true").load()
    rows = found.selectExpr("sequence", "timestamp > now() - interval 1 hour as fresh", *COLUMNS).collect()
    none: tuple[object, ...] = (None, None, None, None, None, [])
    all_of_it = ("text/plain", 1, "answers/here", b"\0\xff", 600, [("unit", "\u00b0C"), ("unit", "K: kelvin")])
    assert [(row.sequence, row.fresh) for row in rows] == [(number, True) for number in (1, 2, 3, 4, 7)]
    assert [tuple(row)[2:-1] for row in rows] == [
        ("house/kitchen/temp", ["house", "kitchen", "temp"], "house.kitchen.temp", b"20.5", 1, False, "old/one", *none),
        ("house//living room", ["house", "", "living room"], "house./.living/_room", b"21", 2, True, "old/one", *none),
        (
            "house/v1.2/temp",
            ["house", "v1.2", "temp"],
            "house.v1//2.temp",
            b"\xc2\xb0",
            2,
            False,
            "new one",
            *all_of_it,
        ),
        ("house", ["house"], "house", b"", 1, False, "new one", *none[:-1], [("Nats-TTL", "5")]),
        ("house/nats", ["house", "nats"], "house.nats", b"of a NATS client", None, False, None, *none),
    ]
    assert ("Nmqtt-Pub", b"1") in [tuple(pair) for pair in rows[0].headers]
    assert rows[-1].headers == []


def numbers(frame: "DataFrame") -> list[int]:
    return [row.sequence for row in frame.select("sequence").collect()]


def test_all_actions_on_a_dataframe_see_the_same_rows(spark: "SparkSession", nats_server: NatsServer) -> None:
    """Also when they begin long after it was made, while publishing goes on."""
    with Store(nats_server.url) as store:
        store.put(range(5000))
        ended = threading.Event()

        def go_on() -> None:
            with Store(nats_server.url) as other:
                for number in itertools.count():
                    other.prefix = store.prefix
                    other.put(range(number, number + 100))
                    if ended.wait(0.01):
                        return

        publisher = threading.Thread(target=go_on)
        publisher.start()
        try:
            eventually(lambda: store.state["messages"] > 5100)
            frame = store.load(spark, numPartitions=3, batchSize=700)
            pinned = store.state["last_seq"]
            first = numbers(frame)
            end = len(first)
            assert first == list(range(1, end + 1))
            assert 5100 < end <= pinned
            eventually(lambda: store.state["last_seq"] > pinned + 100)
            assert numbers(frame) == first
            assert frame.where("sequence > 10 and topic = 'a/1'").count() == sum(
                one % 3 == (2 if one <= 5000 else 1) for one in range(11, end + 1)
            )
            assert store.load(spark).count() > end
        finally:
            ended.set()
            publisher.join()


def test_a_schema_selects_columns_and_options_the_range(spark: "SparkSession", nats_server: NatsServer) -> None:
    with Store(nats_server.url) as store:
        store.put(range(200))
        read = spark.read.format(SOURCE).options(**store.given(startingSequence=11, endingSequence=20, numPartitions=4))
        schema = "topic STRING, sequence BIGINT, number DOUBLE"
        frame = read.schema(schema).option("decoders", '{"a/1": "number", "#": "text"}').load()
        assert [tuple(row) for row in frame.collect()] == [
            (f"a/{one % 3}", one + 1, one if one % 3 == 1 else None) for one in range(10, 20)
        ]
        assert frame.schema.simpleString() == "struct<topic:string,sequence:bigint,number:double>"
        nothing = store.load(spark, startingTimestamp="2100-01-01", topics="a/+")
        assert nothing.collect() == []
        assert "headers" not in nothing.columns
        # Requests for a later start or an earlier end are no errors.
        assert store.load(spark, endingTimestamp="2001-01-01T00:00:00Z").count() == 0


def test_what_users_are_told(spark: "SparkSession", nats_server: NatsServer, nats_factory: NatsFactory) -> None:
    """One line each, which names the option to change; at ``load()`` where that can be known then."""
    with Store(nats_server.url) as store:
        store.put(range(10))
        store.purge_before(5)
        locked = nats_factory(config='authorization {user: spark, password: "%secret%"}')
        absent = nats_factory()
        absent.stop()
        at_load = [
            ({"topic_filter": "a"}, "there is no option 'topic_filter'"),
            ({"topics": "a/#/b"}, "topics = 'a/#/b'"),
            ({"stream": "nowhere"}, "there is no stream nowhere (option stream)"),
            ({"servers": locked.url}, "(option user)"),
            ({"servers": locked.url, "user": "spark", "password": "%wrong%"}, "refused the login by user and password"),
            ({"servers": absent.url, "connectTimeout": "0.5"}, "(option servers)"),
            ({"subjectPrefix": "a b"}, "subjectPrefix = 'a b'"),
            ({"decoders": '{"a/+": "avro"}'}, "'a/+': the format avro needs 'schema' or 'registry'"),
        ]
        for options, message in at_load:
            with pytest.raises(PySparkException) as told:
                store.load(spark, **options)
            assert message in complaint(told.value)
            assert "%" not in str(told.value)
        at_read = [
            ({"startingSequence": "2"}, "", "startingSequence 2 is gone"),
            ({"startingSequence": "2"}, "", "set failOnDataLoss to false"),
            ({"endingSequence": "20"}, "", "endingSequence 20 is not in stream"),
            ({"startingOffsets": "latest"}, "", "startingOffsets"),
            ({"maxMessagesPerTrigger": "5"}, "", "maxMessagesPerTrigger has no effect for a batch read"),
            ({}, "sequence BIGINT, topik STRING", "did you mean 'topic'?"),
            ({}, "sequence INT", "it must be BIGINT"),
            ({}, "headers STRING", "headers"),
        ]
        for options, schema, message in at_read:
            read = spark.read.format(SOURCE).options(**store.given(**options))
            frame = read.schema(schema).load() if schema else read.load()
            with pytest.raises(PySparkException) as told:
                frame.collect()
            assert message in complaint(told.value)
        assert store.load(spark, startingSequence=2, failOnDataLoss=False).count() == 6
        # The server goes away when the DataFrame is there already.
        absent.start()
        with Store(absent.url) as gone:
            frame = gone.load(spark, connectTimeout=0.5)
            gone.put(range(3))
            frame = gone.load(spark, connectTimeout=0.5, numPartitions=1)
            absent.kill()
            with pytest.raises(PySparkException) as told:
                frame.collect()
            assert "cannot connect to nats://127.0.0.1:" in complaint(told.value)
