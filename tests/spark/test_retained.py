# SPDX-License-Identifier: Apache-2.0
"""`mode` retained: the retained message of each topic as a table."""

import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import EqualTo, Filter, IsNotNull
from pyspark.sql.types import StructType

from mqtt_streams.headers import REPLACES
from mqtt_streams.retained import set_block, tombstone_block
from pyspark_mqtt_nats import retained
from pyspark_mqtt_nats.nats.jetstream import Publish
from pyspark_mqtt_nats.source import MqttNatsSource
from tests.conftest import NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import PUBACK, Raw, publish
from tests.harness.raw5 import CONTENT_TYPE, USER, Raw5, prop
from tests.spark.storing import SOURCE, Store

SCHEMA = StructType().add("topic", "string").add("payload", "binary")


@pytest.fixture
def store(nats_server: NatsServer) -> Iterator[Store]:
    """A stream of retained messages."""
    with Store(nats_server.url, max_msgs_per_subject=16, allow_rollup_hdrs=True) as found:
        yield found


def retain(store: Store, topics: dict[str, bytes]) -> None:
    """Retain these payloads as gateways do; an empty one takes a retained message away."""
    for topic, payload in topics.items():
        block = set_block(topic, 3, "gateway1") if payload else tombstone_block(topic, "gateway1")
        store.publish(Publish((store.prefix + topic.replace("/", ".")).encode(), block, payload))


def plan(store: Store, *filters: Filter, **options: Any) -> Iterator[pa.RecordBatch]:
    """What a task yields."""
    source = pickle.loads(pickle.dumps(MqttNatsSource(store.given(mode="retained", **options))))
    reader = source.reader(SCHEMA)
    if filters:
        assert isinstance(reader, retained.FilteringReader)
        assert reader.pushFilters(list(filters)) == [one for one in filters if not isinstance(one, IsNotNull)]
    (partition,) = reader.partitions()
    tasks: retained.Reader = pickle.loads(pickle.dumps(reader))
    return tasks.read(pickle.loads(pickle.dumps(partition)))


def table(batches: Iterator[pa.RecordBatch]) -> dict[str, bytes]:
    """The rows; a topic that comes twice is a failure."""
    rows = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
    found = dict(rows)
    assert len(found) == len(rows)
    return found


def test_a_topic_with_former_messages(store: Store) -> None:
    """nats-server was killed when it had stored a message, and before it removed the former one."""
    retain(store, {f"a/{number}": b"%d" % number for number in range(20)})
    for topic, payload in (("a.3", b"x"), ("a.5", b"y"), ("a.3", b"z"), ("b", b"1"), ("b", b"2")):
        block = set_block(topic.replace(".", "/"), 3, "gateway1").replace(REPLACES, b"")
        store.publish(Publish(f"{store.prefix}{topic}".encode(), block, payload))
    everything = {f"a/{number}": b"%d" % number for number in range(20)} | {"a/3": b"z", "a/5": b"y", "b": b"2"}
    assert table(plan(store)) == everything
    assert table(plan(store, topics="a/3, b")) == {"a/3": b"z", "b": b"2"}
    retain(store, {"a/3": b"w", "b": b""})
    everything = {topic: payload for topic, payload in everything.items() if topic != "b"} | {"a/3": b"w"}
    assert table(plan(store)) == everything


def test_topics_and_filters(store: Store) -> None:
    values = {f"site/{number}/temp": b"%d" % number for number in range(30)}
    retain(store, values | {"$dev/1/temp": b"d", "site": b"s", "gone": b"x"})
    retain(store, {"site/3/temp": b"new", "gone": b""})
    values["site/3/temp"] = b"new"
    everything = values | {"$dev/1/temp": b"d", "site": b"s"}
    assert table(plan(store)) == everything
    assert table(plan(store, topics="site/#")) == values | {"site": b"s"}
    assert table(plan(store, topics="+/+/temp")) == values
    assert table(plan(store, topics="site/5/temp, $dev/#")) == {"site/5/temp": b"5", "$dev/1/temp": b"d"}
    assert table(plan(store, EqualTo(("topic",), "site/7/temp"), pushdown=True)) == {"site/7/temp": b"7"}
    assert table(plan(store, IsNotNull(("topic",)), pushdown=True)) == everything
    store.api("STREAM.PURGE")
    assert table(plan(store)) == {}


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("rounds", [0, 1, retained.ROUNDS, 50])
def test_topics_that_are_retained_anew_while_they_are_read(
    store: Store, rounds: int, filtered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often that happens, each topic is there once, and so is one that moves on before each look at it."""
    topics = [f"site/{number}" for number in range(20)]
    retain(store, dict.fromkeys([*topics, "site/moving", "$hidden/1"], b"first"))
    left = rounds

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            nonlocal left
            found = step(*arguments)
            if left:
                left -= 1
                retain(store, {"site/moving": b"later", topics[left % 20]: b"later"})
            return found

        return wrapped

    monkeypatch.setattr(retained, "_end", counted(retained._end))
    options = {"topics": "+/+"} if filtered else {}
    found = table(plan(store, batchSize=3, **options))
    expected = {*topics, "site/moving"} | (set() if filtered else {"$hidden/1"})
    assert set(found) == expected
    assert found["site/moving"] == (b"later" if rounds else b"first")
    assert set(found.values()) <= {b"first", b"later"}


@pytest.mark.parametrize("rounds", [retained.ROUNDS, 0])
def test_a_server_that_ends_connections_while_rows_are_handed_over(
    nats_factory: NatsFactory, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does with those that do not answer it for minutes; no way of reading relies on one from before."""
    monkeypatch.setattr(retained, "ROUNDS", rounds)
    server = nats_factory()
    with Store(server.url, max_msgs_per_subject=16, allow_rollup_hdrs=True) as store:
        values = {f"site/{number}": b"%d" % number for number in range(20)}
        retain(store, values)
        batches = plan(store, batchSize=10)
        first = next(batches)
        server.restart()
        assert table(itertools.chain([first], batches)) == values


@pytest.mark.timeout(360)
def test_what_gateways_retain(spark: SparkSession, nats_server: NatsServer, gateway: Gateway) -> None:
    with Raw.connected(gateway.port, "old") as old, Raw5.open(gateway.port, "new") as new:
        for topic, payload in (("home/a", b"1"), ("home/b", b"2"), ("home/a", b"3"), ("home/c", b"4"), ("home/c", b"")):
            old.send(publish(topic, payload, qos=1, flags=1))
            old.expect(PUBACK)
        new.deliver("home/v1.2/x", b"5", prop(CONTENT_TYPE, "text/plain"), prop(USER, ("a", "b")), qos=2, flags=1)
        new.deliver("home/zero", b"6", qos=0, flags=1)
        new.deliver("other", b"7", flags=1)
    read = spark.read.format(SOURCE).option("servers", nats_server.url).option("mode", "retained")
    frame = read.option("topics", "home/#").option("decoders", '{"#": "number"}').load()
    columns = ("topic", "payload", "qos", "retain", "publisher", "content_type", "user_properties", "number")
    rows = {row.topic: tuple(row)[1:] for row in frame.select(*columns).collect()}
    assert rows == {
        "home/a": (b"3", 1, True, "old", None, [], 3.0),
        "home/b": (b"2", 1, True, "old", None, [], 2.0),
        "home/v1.2/x": (b"5", 2, True, "new", "text/plain", [("a", "b")], 5.0),
        "home/zero": (b"6", 0, True, "new", None, [], 6.0),
    }
