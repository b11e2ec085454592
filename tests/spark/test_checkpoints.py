# SPDX-License-Identifier: Apache-2.0
"""Queries that live long: checkpoints of another query, credentials that are renewed, 10,000 topics. Without Spark."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyspark_mqtt_nats.batch import Part
from pyspark_mqtt_nats.errors import ConnectError, DataLossError, OptionError
from pyspark_mqtt_nats.nats.jetstream import api
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading.ranges import Range
from pyspark_mqtt_nats.reading.selection import FILTERS_MOST
from pyspark_mqtt_nats.source import MqttNatsSource
from tests.backbone.certificates import USER, Authority, nkey
from tests.conftest import NatsFactory
from tests.harness.nats import NatsServer
from tests.spark.planning import Query
from tests.spark.reading import WAYS, Reading
from tests.spark.storing import Store


@pytest.fixture
def store(nats_server: NatsServer) -> Iterator[Store]:
    with Store(nats_server.url) as found:
        found.put(range(10))
        yield found


def continued(query: Query, options: dict[str, str]) -> Query:
    """The query with its checkpoint and other options."""
    query.source = MqttNatsSource(options)
    query.start()
    return query


def test_other_topics_are_an_error(store: Store) -> None:
    query = Query(store, startingOffsets="earliest", topics="a/0, a/1")
    assert query.batch() == [1, 2, 4, 5, 7, 8, 10]
    continued(query, store.given(topics='["a/1", "a/0"]'))
    store.put(range(3))
    assert query.batch() == [11, 12]
    planned = query.plan()
    for topics in ("a/0", "#"):
        continued(query, store.given(topics=topics))
        with pytest.raises(OptionError, match="the checkpoint is of a query with other topics") as refused:
            query.batch()
        assert refused.value.option == "topics"
        assert "give a new checkpoint (option checkpointLocation)" in str(refused.value)
        with pytest.raises(OptionError, match="other topics"):  # also for a batch that was planned before
            query.read(planned)


def test_another_stream_is_an_error(store: Store, nats_server: NatsServer) -> None:
    query = Query(store, startingOffsets="earliest")
    query.batch()
    with Store(nats_server.url) as other:
        other.put(range(5))
        continued(query, other.given())
        message = f"stream = '{other.stream}': the checkpoint is of stream {store.stream}; give a new checkpoint "
        with pytest.raises(OptionError, match=message):
            query.batch()


def test_another_server_is_an_error(store: Store, nats_factory: NatsFactory) -> None:
    query = Query(store, startingOffsets="earliest")
    query.batch()
    with Store(nats_factory().url) as other:
        config = {"name": store.stream, "subjects": [f"{store.prefix}>"]}
        api(other.connection, f"STREAM.CREATE.{store.stream}", config)
        continued(query, store.given(servers=other.url))
        with pytest.raises(DataLossError, match="anew or at other servers; give a new checkpoint "):
            query.batch()


def test_a_query_that_waits_for_its_beginning_has_its_topics_too(store: Store) -> None:
    query = Query(store, startingTimestamp="2100-01-01", topics="a/0")
    assert query.batch() == []
    continued(query, store.given(topics="a/1"))
    with pytest.raises(OptionError, match="other topics"):
        query.batch()


# -- credentials ------------------------------------------------------------------------------


def test_credentials_are_read_again_when_they_are_renewed(nats_factory: NatsFactory, tmp_path: Path) -> None:
    """By the driver, for itself and for tasks that were sent the old ones."""
    first, second = nkey(USER), nkey(USER)
    users = f'users: [{{nkey: {first.public}}}, {{user: admin, password: "p"}}]'
    server = nats_factory(config=f"authorization {{ {users} }}")
    file = tmp_path / "user.nk"
    file.write_bytes(first.seed)
    with Store(server.url.replace("//", "//admin:p@")) as store:
        store.put(range(10))
        query = Query(store, startingOffsets="earliest", nkey=file, servers=server.url, connectTimeout=2)
        assert query.batch() == list(range(1, 11))
        configuration = server.directory / "nats.conf"
        text = configuration.read_text(encoding="utf-8")
        configuration.write_text(text.replace(first.public, second.public), encoding="utf-8")
        server.restart()
    with Store(server.url.replace("//", "//admin:p@")) as again:
        again.closing.callback(query.reader.stop)
        again.stream, again.prefix = store.stream, store.prefix
        again.put(range(5))
        file.write_bytes(second.seed)
        assert query.batch() == list(range(11, 16))
        # A task of the batch that has only the old ones is refused.
        partition = query.reader.partitions(query.reader.initialOffset(), query.checkpoint or {})[0]
        assert vars(partition).pop("renewed")
        partition.renewed = None  # type: ignore[attr-defined]
        with pytest.raises(ConnectError, match="refused the login by nkey"):
            list(query.reader.__class__(query.source._options, query.reader.projection).read(partition))


def test_a_file_that_is_being_replaced_keeps_what_was_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    pair, renewed = authority.issue("client"), authority.issue("client2")
    seed = tmp_path / "seed"
    seed.write_bytes(nkey(USER).seed)
    given = {"tlsCert": str(pair.certificate), "tlsKey": str(pair.key), "nkey": str(seed), "servers": "tls://a"}
    options = Options.parse(given)
    assert options.renewed() is options
    pair.certificate.write_bytes(renewed.certificate.read_bytes())
    assert options.renewed() is options  # the key is still the old one
    assert "tlsKey: it is not the key of tlsCert" in caplog.text
    pair.key.write_bytes(renewed.key.read_bytes())
    seed.write_text("half a se", encoding="utf-8")
    found = options.renewed()
    assert (found.tls_cert, found.nkey) == (renewed.certificate.read_text(encoding="utf-8"), options.nkey)
    assert "nkey: the file has no seed of an nkey; what was read before is used" in caplog.text
    seed.unlink()
    assert options.renewed().nkey == options.nkey
    text = Options.parse({"nkey": options.nkey})
    assert (text.files, text.renewed() is text) == ((), True)


# -- many topics ------------------------------------------------------------------------------

TOPICS = 10_000


def topics(number: int = TOPICS) -> str:
    return json.dumps([f"site/{one}/temp" for one in range(number)])


@WAYS
def test_ten_thousand_topics(store: Store, way: str) -> None:
    """In batch and in streaming, with a limit on a batch."""
    store.put(range(TOPICS), lambda one: f"site.{one}.temp")
    store.put(range(TOPICS), lambda one: f"other.{one}.temp")
    given: dict[str, Any] = {"topics": topics(), "readMode": way}
    reading = Reading(store, 2, **given)
    assert len(reading.options.subjects) == TOPICS
    assert reading.sequences() == list(range(11, 11 + TOPICS))
    query = Query(store, startingOffsets="earliest", maxMessagesPerTrigger=4000, **given)
    batches = query.batches()
    assert [one for batch in batches for one in batch] == list(range(11, 11 + TOPICS))
    assert max(map(len, batches)) <= 4000
    assert len(json.dumps(query.checkpoint)) < 300


def test_as_many_topics_as_nats_evaluates(store: Store) -> None:
    store.put(range(20), lambda one: f"site.{one}.temp")
    store.put(range(20), lambda one: f"other.{one}.temp")
    reading = Reading(store, topics=topics(FILTERS_MOST))
    assert reading.sequences() == list(range(11, 31))
    (report,) = reading.reports
    assert report.rows == 20


def test_a_batch_that_is_run_again_has_the_parts_of_the_first_attempt(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink tells messages by their partition: in other parts they would be published twice."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    large = [("large", b"x" * 900_000)] * 20
    store.put_payloads(large)
    query = Query(store, startingOffsets="earliest")
    end = query.plan()

    def ranges() -> list[Range]:
        return [one.part for one in query.reader.partitions(query.begin, end) if isinstance(one, Part)]

    before = ranges()
    assert len(before) == 4
    store.put(range(1000))  # the average is smaller now
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    query.start()
    assert ranges() == before
