# SPDX-License-Identifier: Apache-2.0
"""Filters of a query that NATS evaluates: never fewer rows than the filter leaves, and no more than can be helped."""

import itertools
import pickle
import random
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)
from pyspark.sql.types import StructType

from pyspark_mqtt_nats.batch import FilteringReader
from pyspark_mqtt_nats.source import MqttNatsSource
from pyspark_mqtt_nats.topics import intersection, intersections, matches, pattern
from tests.harness.nats import NatsServer
from tests.spark.storing import Store, sequences

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC, SEQUENCE, TIME = ("topic",), ("sequence",), ("timestamp",)
SCHEMA = StructType().add("sequence", "long").add("topic", "string")
SUBJECTS = ("site1.a.temp", "site1.b.temp", "site2.a.temp", "site1", "$dev.a.temp", "site1././~s", "x")
TOTAL = 7 * 30


def test_matching_patterns_and_intersections_agree() -> None:
    """On all filters and topics of a few levels, ``$`` and empty ones among them."""
    levels = ("a", "b.*", "$d", "")
    bodies = ["/".join(body) for size in (1, 2, 3) for body in itertools.product((*levels, "+"), repeat=size)]
    filters = ["#", *filter(None, bodies), *(f"{body}/#" for body in bodies if body)]
    topics = ["/".join(body) for size in (1, 2, 3, 4) for body in itertools.product((*levels, "x\n"), repeat=size)]
    topics = [topic for topic in topics if topic]
    matched = {item: {topic for topic in topics if matches(item, topic)} for item in filters}
    assert matched["#"] == set(topics)
    assert "$d/a" not in matched["+/a"]
    assert "a" in matched["a/#"]
    for item in random.Random(1).sample(filters, 60):
        assert matched[item] == {topic for topic in topics if re.search(pattern(item), topic)}, item
        for other in filters:
            both = intersection(item, other)
            found = set() if both is None else {topic for topic in topics if matches(both, topic)}
            assert found == matched[item] & matched[other], (item, other, both)
    assert intersections(("a/#", "b"), ("+/b", "b")) == ("a/b", "b")


def read(store: Store, *filters: Filter, **options: Any) -> tuple[list[int], Sequence[Filter]]:
    """What is read when Spark pushes these filters, and which it has to evaluate itself."""
    source = pickle.loads(pickle.dumps(MqttNatsSource(store.given(pushdown=True, numPartitions=2, **options))))
    reader = source.reader(SCHEMA)
    assert isinstance(reader, FilteringReader)
    left = reader.pushFilters(list(filters))
    tasks = pickle.loads(pickle.dumps(reader))
    return [one for partition in reader.partitions() for one in sequences(tasks.read(partition))], left


def test_what_is_read(nats_server: NatsServer) -> None:
    with Store(nats_server.url) as store:
        store.put(range(TOTAL), lambda one: SUBJECTS[one % len(SUBJECTS)])
        everything = list(range(1, TOTAL + 1))

        def on(*subjects: str) -> list[int]:
            return [one for one in everything if SUBJECTS[(one - 1) % len(SUBJECTS)] in subjects]

        temps = on("site1.a.temp", "site1.b.temp", "site2.a.temp")
        cases: list[tuple[list[Filter], dict[str, str], list[int]]] = [
            ([], {}, everything),
            ([EqualTo(TOPIC, "site1/a/temp")], {}, on("site1.a.temp")),
            ([EqualNullSafe(TOPIC, "$dev/a/temp")], {}, on("$dev.a.temp")),
            ([EqualTo(TOPIC, "site1//*")], {}, on("site1././~s")),
            ([EqualTo(TOPIC, "nowhere")], {}, []),
            ([In(TOPIC, ("x", "site2/a/temp", "y"))], {}, on("x", "site2.a.temp")),
            ([StringStartsWith(TOPIC, "site1/")], {}, on("site1.a.temp", "site1.b.temp", "site1", "site1././~s")),
            ([StringStartsWith(TOPIC, "site1/a/t")], {}, on("site1.a.temp")),
            ([EqualTo(TOPIC, "site1/a/temp")], {"topics": "+/+/temp"}, on("site1.a.temp")),
            ([EqualTo(TOPIC, "$dev/a/temp")], {"topics": "+/+/temp"}, []),
            ([StringStartsWith(TOPIC, "$dev/")], {"topics": "+/+/temp"}, []),
            ([StringStartsWith(TOPIC, "site1/")], {"topics": "+/+/temp, x"}, on("site1.a.temp", "site1.b.temp")),
            ([EqualTo(TOPIC, "x"), EqualTo(TOPIC, "site1")], {}, []),
            ([GreaterThan(SEQUENCE, 100)], {}, everything[99:]),
            ([GreaterThanOrEqual(SEQUENCE, 100), LessThan(SEQUENCE, 110)], {}, everything[99:110]),
            ([LessThanOrEqual(SEQUENCE, 5)], {}, everything[:5]),
            ([EqualTo(SEQUENCE, 17)], {}, [17]),
            ([In(SEQUENCE, (5, 9, 7))], {}, [5, 6, 7, 8, 9]),
            ([GreaterThan(SEQUENCE, 1_000_000)], {}, []),
            ([LessThan(SEQUENCE, -5)], {}, []),
            ([EqualTo(SEQUENCE, 300)], {}, []),
            ([GreaterThan(SEQUENCE, 5)], {"startingSequence": "50", "endingSequence": "60"}, everything[49:60]),
            ([EqualTo(TOPIC, "x"), LessThan(SEQUENCE, 20)], {"topics": "#"}, [7, 14]),
            # What is left to Spark: all topics, here three of them.
            ([StringStartsWith(TOPIC, "site")], {"topics": "+/+/temp"}, temps),
            ([StringContains(TOPIC, "a")], {"topics": "+/+/temp"}, temps),
            ([Not(EqualTo(TOPIC, "x"))], {"topics": "+/+/temp"}, temps),
            ([IsNull(TOPIC)], {"topics": "+/+/temp"}, temps),
            ([EqualTo(TOPIC, "a/+")], {"topics": "+/+/temp"}, temps),
            ([EqualTo(TOPIC, "$JS/a")], {"topics": "+/+/temp"}, temps),
            ([EqualTo(("user_properties", "key"), "a")], {"topics": "+/+/temp"}, temps),
            ([In(TOPIC, tuple(f"t{number}" for number in range(100)))], {"topics": "+/+/temp"}, temps),
        ]
        for filters, options, expected in cases:
            assert read(store, *filters, **options) == (expected, filters), filters
        # These always hold: Spark need not look.
        assert read(store, IsNotNull(TOPIC), IsNotNull(SEQUENCE))[1] == []
        assert read(store, IsNotNull(("qos",)))[1] == [IsNotNull(("qos",))]


def test_times(nats_server: NatsServer) -> None:
    """More is read than asked for, since clocks of servers differ: ten seconds; nothing outside of that."""
    with Store(nats_server.url) as store:
        store.put(range(100))
        now = datetime.now(UTC)
        everything = list(range(1, 101))
        second, hour = timedelta(seconds=1), timedelta(hours=1)
        assert read(store, GreaterThan(TIME, now + second))[0] == everything
        assert read(store, GreaterThan(TIME, now + hour))[0] == []
        assert read(store, LessThan(TIME, now - second))[0] == everything
        assert read(store, LessThan(TIME, now - hour))[0] == []
        assert read(store, GreaterThan(TIME, now - hour), LessThanOrEqual(TIME, now + hour))[0] == everything
        assert read(store, EqualTo(TIME, now - hour))[0] == []
        assert read(store, EqualTo(TIME, None))[0] == everything


@pytest.mark.timeout(360)
def test_queries_have_the_same_rows_with_and_without(spark: "SparkSession", nats_server: NatsServer) -> None:
    with Store(nats_server.url) as store:
        store.put(range(TOTAL), lambda one: SUBJECTS[one % len(SUBJECTS)])
        plain = store.load(spark, numPartitions=2)
        loaded = [store.load(spark, pushdown=True, numPartitions=2) for _ in range(5)]
        store.put(range(50))
        assert plain.count() == loaded.pop().count() == TOTAL
        for condition, pushed in zip(
            (
                "topic in ('site1/a/temp', 'site1//*') and sequence between 20 and 100",
                "topic like 'site1/%' and timestamp > now() - interval 1 hour and qos = 1",
                "(topic = 'x' or sequence = 5) and timestamp < timestamp'2100-01-01 00:00:00' and topic is not null",
                "timestamp < timestamp'2001-01-01 00:00:00'",
            ),
            loaded,
            strict=True,
        ):
            expected = sorted(row.sequence for row in plain.where(condition).collect())
            assert sorted(row.sequence for row in pushed.where(condition).collect()) == expected, condition
            assert (condition.startswith("timestamp <")) == (not expected)
