# SPDX-License-Identifier: Apache-2.0
"""Ranges of which something is gone before it is read: a loss that is said, or a gap that is none."""

from collections.abc import Iterator
from typing import Any

import pytest

from pyspark_mqtt_nats.errors import ConnectError, DataLossError, SourceError
from pyspark_mqtt_nats.nats.jetstream import Publish
from pyspark_mqtt_nats.reading import pull, read
from pyspark_mqtt_nats.reading.ranges import Range, Snapshot, snapshot, split
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually, free_port
from tests.spark.reading import MANY, WAYS, Reading, consumers, half
from tests.spark.storing import Store, sequences


@pytest.fixture
def store(nats_server: NatsServer) -> Iterator[Store]:
    """An empty stream."""
    with Store(nats_server.url) as made:
        yield made


@WAYS
def test_a_purge_while_reading_is_a_loss(store: Store, way: str, caplog: pytest.LogCaptureFixture) -> None:
    """Never a short read: what was in the range is missed, and counted exactly."""
    store.put(range(MANY))
    batches, got = half(Reading(store, readMode=way, batchSize=100))
    store.purge_before(MANY + 1)
    with pytest.raises(DataLossError, match=r"messages \d+ to 3000 .* were removed .* failOnDataLoss to false"):
        got += sequences(batches)
    assert got == list(range(1, len(got) + 1))
    assert consumers(store) == []

    store.put(range(MANY))
    reading = Reading(store, readMode=way, batchSize=100, failOnDataLoss=False)
    batches, got = half(reading)
    store.purge_before(2 * MANY - 49)
    got += sequences(batches)
    assert got[-50:] == list(range(2 * MANY - 49, 2 * MANY + 1))
    assert reading.total("lost") == MANY - len(got)
    assert f"up to {MANY - len(got)} messages are missing" in caplog.text


@WAYS
@pytest.mark.parametrize("topics", ["#", "a/0,a/1"])
def test_a_start_that_goes_before_it_is_read_is_a_loss(store: Store, way: str, topics: str) -> None:
    store.put(range(100))
    starts: list[dict[str, Any]] = [{}, {"startingSequence": 1}]
    for given_start in starts:
        reading = Reading(store, 2, readMode=way, topics=topics, **given_start)
        store.purge_before(store.state["first_seq"] + 10)
        with pytest.raises(DataLossError, match="before they could be read"):
            reading.sequences()
        reading = Reading(store, 2, readMode=way, topics=topics)
        store.purge_before(store.state["first_seq"] + 1)
        reading.options = store.options(readMode=way, topics=topics, failOnDataLoss=False)
        assert len(reading.sequences()) >= 50
        assert reading.total("lost") == 1
        store.recreate()
        store.put(range(100))


@WAYS
def test_what_was_read_before_it_went_is_no_loss(store: Store, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages go behind the reader all the time."""
    monkeypatch.setattr(read, "LOOK", 0.0)
    store.put(range(MANY))
    store.delete(range(5, 2000, 50))
    reading = Reading(store, readMode=way, batchSize=100)
    got: list[int] = []
    for batch in reading.batches():
        got += sequences(iter([batch]))
        store.purge_before(max(1, got[-1] - 150))
    assert got == [number for number in range(1, MANY + 1) if number not in range(5, 2000, 50)]
    assert (reading.total("lost"), reading.total("gaps")) == (0, 40)


@pytest.mark.parametrize(
    ("limits", "given_start", "ok"),
    [
        ({"max_msgs": 100}, {}, True),
        ({"max_msgs": 100}, {"startingSequence": 1}, False),
        ({"max_bytes": 8000}, {}, True),
        ({"max_msgs": 5000}, {}, False),
        ({"max_age": 3_600_000_000_000}, {}, False),
        ({"allow_msg_ttl": True}, {}, True),
        ({"allow_msg_ttl": True}, {"startingSequence": 1}, False),
        ({"retention": "workqueue"}, {}, True),
        ({"retention": "workqueue"}, {"startingSequence": 1}, False),
        ({}, {}, False),
    ],
)
def test_what_the_limits_of_the_stream_remove_first(
    nats_server: NatsServer, limits: dict[str, int], given_start: dict[str, Any], ok: bool
) -> None:
    """With `earliest` what has just been pushed out is not missed; a message that was named is."""
    with Store(nats_server.url, **limits) as store:
        store.put(range(100))
        first = store.state["first_seq"]
        reading = Reading(store, 2, **given_start)
        store.put(range(20))
        if store.state["first_seq"] == first:
            store.purge_before(first + 20)
        gone = store.state["first_seq"] - first
        assert gone > 0
        if ok:
            assert reading.sequences() == list(range(first + gone, 101))
            assert (reading.total("aged"), reading.total("lost"), reading.total("gaps")) == (gone, 0, 0)
        else:
            with pytest.raises(DataLossError):
                reading.sequences()


def test_what_is_too_old_goes_first(nats_server: NatsServer) -> None:
    with Store(nats_server.url, max_age=1_000_000_000) as store:
        store.put(range(50))
        old = snapshot(store.options(), store.connection)

        def gone() -> bool:
            store.put([0])
            return bool(store.state["first_seq"] > 50)

        eventually(gone)
        reading = Reading(store)
        reading.snapshot, reading.parts = old, split(old, 1)
        assert reading.sequences() == []
        assert (reading.total("aged"), reading.total("lost")) == (50, 0)
        reading.snapshot = old.between(old.start, old.end)
        with pytest.raises(DataLossError):
            reading.sequences()


def test_everything_is_too_old(nats_server: NatsServer) -> None:
    """The stream is empty then, and only knows when the last message came."""
    with Store(nats_server.url, max_age=1_000_000_000) as store:
        store.put(range(50))
        reading = Reading(store)
        eventually(lambda: not store.state["messages"])
        assert reading.sequences() == []
        assert (reading.total("aged"), reading.total("lost")) == (50, 0)


def test_messages_with_an_expiry_go_first(nats_server: NatsServer) -> None:
    """As gateways store them: each with a time of its own to go; not those that the user has named."""
    with Store(nats_server.url, allow_msg_ttl=True) as store:
        headers = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Expiry:1\r\nNats-TTL:1s\r\n\r\n"
        for number in range(5):
            store.publish(Publish(f"{store.prefix}a".encode(), headers, b"%d" % number))
        store.put(range(10))
        reading, named = Reading(store), Reading(store, startingSequence=1)
        eventually(lambda: store.state["first_seq"] == 6)
        assert reading.sequences() == list(range(6, 16))
        assert (reading.total("aged"), reading.total("lost"), reading.total("gaps")) == (5, 0, 0)
        with pytest.raises(DataLossError):
            named.sequences()


def test_a_stream_that_replaces_has_no_losses_in_front(nats_server: NatsServer) -> None:
    with Store(nats_server.url, max_msgs_per_subject=1) as store:
        store.put(range(30), lambda number: f"a.{number}")
        reading = Reading(store)
        store.put(range(10), lambda number: f"a.{number}")
        assert reading.sequences() == list(range(11, 31))
        assert (reading.total("lost"), reading.total("gaps")) == (0, 10)


@WAYS
def test_a_stream_made_anew(store: Store, way: str) -> None:
    store.put(range(100))
    reading = Reading(store, readMode=way)
    store.recreate()
    store.put(range(100))
    with pytest.raises(DataLossError, match=f"{store.stream} was deleted and made anew.*failOnDataLoss"):
        reading.sequences()
    reading.options = store.options(readMode=way, failOnDataLoss=False)
    assert reading.sequences() == []
    assert reading.reports[-1].lost == 100
    store.api("STREAM.DELETE")
    with pytest.raises(SourceError, match="no stream"):
        reading.sequences()
    assert reading.reports[-1].interruptions == 0
    reading.options = store.options(servers=f"nats://127.0.0.1:{free_port()}", connectTimeout=0.5)
    with pytest.raises(ConnectError, match="servers"):
        reading.sequences()
    assert reading.reports[-1].interruptions == 0


@WAYS
def test_a_stream_that_has_lost_its_end(store: Store, way: str, caplog: pytest.LogCaptureFixture) -> None:
    """As after a restore from a backup, or a power cut."""
    numbers = store.put(range(100))
    reading = Reading(store, readMode=way)
    reading.snapshot = Snapshot(
        store.stream, reading.snapshot.created, 1, 130, 1, 131, "limits", (), direct=True, floating=True
    )
    reading.parts = [Range(1, 131)]
    with pytest.raises(DataLossError, match=r"ends with 100 and had 130 before.*failOnDataLoss"):
        reading.sequences()
    reading.options = store.options(readMode=way, failOnDataLoss=False)
    assert reading.sequences() == numbers
    assert (reading.reports[-1].lost, reading.reports[-1].gaps) == (30, 0)
    assert caplog.text.count("ends with 100") == 1


@WAYS
def test_messages_that_are_deleted_while_reading_are_gaps(
    store: Store, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the server had said that there would be more, and then there is nothing."""
    monkeypatch.setattr(pull, "SILENCE", 600.0)
    numbers = store.put(range(1000), lambda number: "a" if number < 99 else "b")
    reading = Reading(store, readMode=way, batchSize=100)
    batches, got = half(reading)
    store.api("STREAM.PURGE", filter=f"{store.prefix}b")
    got += sequences(batches)
    assert got == numbers[: len(got)]
    assert 99 <= len(got) < 1000
    assert (reading.total("gaps"), reading.total("lost")) == (1000 - len(got), 0)


# -- interruptions --------------------------------------------------------------------------------------------
