# SPDX-License-Identifier: Apache-2.0
"""Messages and bytes that nats-server sends for a query: only those that the query needs."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from pyspark.sql import SparkSession

from pyspark_mqtt_nats.queries.views import Views, make_views
from tests.conftest import NatsFactory
from tests.harness.waiting import free_port
from tests.spark.planning import Query
from tests.spark.reading import Reading
from tests.spark.storing import Store

pytestmark = pytest.mark.timeout(360)

COUNT = 20_000
SIZE = 1000
TOPICS = 100


@pytest.fixture
def sent(nats_factory: NatsFactory) -> Iterator[tuple[Store, Callable[[], tuple[int, int]]]]:
    """A stream of 20 MB of payloads on 100 topics; messages and bytes sent since the last call."""
    port = free_port()
    server = nats_factory(config=f'http: "127.0.0.1:{port}"')
    last = (0, 0)

    def since() -> tuple[int, int]:
        nonlocal last
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/varz", timeout=10) as answer:
            found = json.load(answer)
        before, last = last, (found["out_msgs"], found["out_bytes"])
        return last[0] - before[0], last[1] - before[1]

    with Store(server.url) as store:
        store.put_payloads((f"site.{number % TOPICS}", b"x" * SIZE) for number in range(COUNT))
        since()
        yield store, since


def test_a_read_without_payloads_is_sent_none(sent: tuple[Store, Callable[[], tuple[int, int]]]) -> None:
    """The rows are the same, and so are headers."""
    store, since = sent
    columns = ("sequence", "timestamp", "topic", "qos", "headers")
    whole = Reading(store, 2, (*columns, "payload"), includeHeaders="true").rows()
    messages, size = since()
    assert messages >= COUNT
    assert size > COUNT * SIZE
    bare = Reading(store, 2, columns, includeHeaders="true").rows()
    messages, size = since()
    assert messages >= COUNT
    assert size < COUNT * SIZE * 0.3
    assert bare == [{name: row[name] for name in columns} for row in whole]


def test_what_queries_are_sent(spark: SparkSession, sent: tuple[Store, Callable[[], tuple[int, int]]]) -> None:
    store, since = sent
    views = Views(spark, make_views({"servers": store.url}, {store.stream: store.prefix}).values())
    late = datetime.fromtimestamp(store.time_of(COUNT) / 1e9 + 20, UTC)  # ten seconds are for clocks of other servers

    def cost(text: str, expected: int) -> tuple[int, int]:
        since()
        found = views.query(text.replace("stored", store.stream)).collect()
        assert (found[0][0] if len(found) == 1 else len(found)) == expected
        return since()

    messages, size = cost("SELECT count(*) FROM stored", COUNT)
    assert messages >= COUNT
    assert size < COUNT * SIZE * 0.3  # no payloads
    messages, _ = cost("SELECT payload FROM stored WHERE topic = 'site/7'", COUNT // TOPICS)
    assert messages < COUNT / 20
    messages, _ = cost("SELECT payload FROM stored WHERE topic LIKE 'other/%'", 0)
    assert messages < 100
    messages, _ = cost(f"SELECT count(*) FROM stored WHERE timestamp > '{late:%Y-%m-%d %H:%M:%S}'", 0)
    assert messages < 100
    messages, _ = cost(f"SELECT sequence FROM stored WHERE sequence > {COUNT - 50} ORDER BY sequence", 50)
    assert messages < 200
    # The first task alone is run, and its reader stops: a batch has 10,000 rows.
    messages, _ = cost("SELECT payload FROM stored LIMIT 10", 10)
    assert messages <= COUNT / 2 + 100


def test_what_a_small_batch_of_a_rare_topic_is_sent(sent: tuple[Store, Callable[[], tuple[int, int]]]) -> None:
    """Each message of the topic is 100 sequences behind the one before; the server has 200 of them."""
    store, since = sent
    query = Query(store, startingOffsets="earliest", topics="site/7", maxMessagesPerTrigger=10, numPartitions=2)
    for _ in range(3):
        since()
        assert len(query.batch()) == 10
        messages, _ = since()
        assert messages < COUNT / TOPICS
