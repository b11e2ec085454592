# SPDX-License-Identifier: Apache-2.0
"""How micro-batches are planned: limits, streams that are not what they were, release. No Spark session."""

import gc
import logging
import shutil
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from pyspark_mqtt_nats import admission
from pyspark_mqtt_nats.errors import ConnectError, DataLossError, OptionError, SourceError
from pyspark_mqtt_nats.reading import pull
from pyspark_mqtt_nats.reading.rows import Bounds, Rows
from pyspark_mqtt_nats.release import CONSUMER
from pyspark_mqtt_nats.stream_reader import NOTHING
from tests.conftest import NatsFactory
from tests.harness.nats import NatsServer
from tests.spark.planning import Query
from tests.spark.reading import consumers
from tests.spark.storing import Store

ALL = ReadAllAvailable()


@pytest.fixture
def store(nats_server: NatsServer) -> Iterator[Store]:
    with Store(nats_server.url) as found:
        yield found


@pytest.fixture
def interest(nats_server: NatsServer) -> Iterator[Store]:
    """A stream that keeps messages for the consumer of Spark."""
    with Store(nats_server.url, retention="interest") as found:
        found.api(f"CONSUMER.CREATE .{CONSUMER}", stream_name=found.stream, config=HOLD)
        yield found


HOLD = {"durable_name": CONSUMER, "ack_policy": "explicit"}


def test_available_now_ends_at_what_was_there_when_it_began(store: Store) -> None:
    store.put(range(10))
    query = Query(store, startingOffsets="earliest", maxMessagesPerTrigger=4)
    query.start(available_now=True)
    store.put(range(10))
    assert query.batches() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    query.start(available_now=True)
    assert query.batches() == [[11, 12, 13, 14], [15, 16, 17, 18], [19, 20]]
    query.start(available_now=True)
    assert query.batches() == []


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(("mode", "few"), [("pull", 0), ("pull", 60), ("direct", 0)])
def test_messages_of_a_batch_are_counted_past_gaps_and_other_topics(
    store: Store, mode: str, few: int, filtered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 messages of 20,000 sequences, in a hole of which are most; a few are read, for more the end is searched."""
    monkeypatch.setattr(admission, "_FEW", few)
    wanted = [1, *range(15_001, 20_000, 25)] if filtered else [1, *range(15_001, 15_200)]
    store.put(range(1, 20_001), lambda one: "w.x" if one in wanted else "o.x")
    if not filtered:
        store.api("STREAM.PURGE", filter=f"{store.prefix}o.x")
    options = {"topics": "w/+"} if filtered else {}
    query = Query(store, startingOffsets="earliest", maxMessagesPerTrigger=60, readMode=mode, **options)
    found = query.batches(most=200)
    assert [one for batch in found for one in batch] == wanted
    assert all(len(batch) <= 60 for batch in found)
    assert all(found[:-1])  # behind the last message there may be a hole
    if mode == "pull":
        assert all(len(batch) >= (60 if few else 54) for batch in found[:-1])
    assert query.batch(ALL) == []


@pytest.mark.parametrize("mode", ["pull", "direct"])
def test_bytes_of_a_batch(store: Store, mode: str) -> None:
    """Messages of about 1000 bytes; one is larger than a batch may be."""
    sizes = [1000] * 50 + [100_000] + [1000] * 50
    store.put_payloads(("a", b"x" * size) for size in sizes)
    query = Query(store, startingOffsets="earliest", maxBytesPerTrigger="21k", readMode=mode)
    assert isinstance(query.reader.getDefaultReadLimit(), ReadMaxBytes)
    found = query.batches()
    assert [one for batch in found for one in batch] == list(range(1, 102))
    if mode == "pull":
        assert [len(batch) for batch in found] == [20, 20, 10, 1, 20, 20, 10]
    both = Query(store, startingOffsets="earliest", maxBytesPerTrigger="21k", maxMessagesPerTrigger=15, readMode=mode)
    assert both.reader.getDefaultReadLimit() == ReadMaxRows(15)
    assert max(map(len, both.batches())) <= 15
    everything = Query(store, startingOffsets="earliest", maxBytesPerTrigger="21k", readMode=mode)
    assert len(everything.batch(ALL)) == 101


def test_a_consumer_that_is_lost_while_sizes_are_looked_at(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the server that has it goes away: already with the first batch."""
    lost = 0
    whole = pull.read

    def read(*given: Any) -> Iterator[Rows]:
        nonlocal lost
        for rows in whole(*given):
            yield rows
            if lost < 2:
                lost += 1
                for name in store.api("CONSUMER.NAMES")["consumers"]:
                    store.api(f"CONSUMER.DELETE .{name}")

    monkeypatch.setattr(pull, "read", read)
    monkeypatch.setattr(admission, "Bounds", lambda: Bounds(100, 1 << 20))
    store.put_payloads([("a", b"x" * 100)] * 1000)
    disturbed, quiet = (Query(store, startingOffsets="earliest", maxBytesPerTrigger="100k") for _ in range(2))
    assert 100 < disturbed.plan()["next"] < 1000
    assert lost == 2
    assert disturbed.plan() == quiet.plan()


def test_a_start_that_is_gone_matters_only_to_a_new_query(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.put(range(10))
    query = Query(store, startingSequence=2)
    assert query.batch() == list(range(2, 11))
    store.purge_before(8)
    store.put(range(2))
    query.start()
    assert query.batch() == [11, 12]
    with pytest.raises(DataLossError, match=r"startingSequence 2 is gone.*failOnDataLoss"):
        Query(store, startingSequence=2).plan()
    assert Query(store, startingSequence=2, failOnDataLoss=False).batch() == list(range(8, 13))
    assert "up to 6 messages are missing" in caplog.text


def test_messages_removed_between_two_batches(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.put(range(10))
    strict, lenient = (
        Query(store, startingOffsets="earliest", maxMessagesPerTrigger=5, failOnDataLoss=flag) for flag in (True, False)
    )
    for query in (strict, lenient):
        assert query.batch() == [1, 2, 3, 4, 5]
    store.purge_before(9)
    with pytest.raises(DataLossError, match="failOnDataLoss"):
        strict.batch()
    caplog.set_level(logging.WARNING)
    assert [one for batch in lenient.batches() for one in batch] == [9, 10]
    assert "missing" in caplog.text


@pytest.mark.parametrize("messages", [3, 30])
def test_a_stream_that_was_made_anew(store: Store, messages: int, caplog: pytest.LogCaptureFixture) -> None:
    store.put(range(10))
    strict = Query(store, startingOffsets="earliest")
    lenient = Query(store, startingOffsets="earliest", failOnDataLoss=False)
    assert strict.batch() == lenient.batch() == list(range(1, 11))
    store.recreate()
    store.put(range(messages))
    advice = r"; give a new checkpoint \(option checkpointLocation\), or set failOnDataLoss to false"
    with pytest.raises(DataLossError, match=rf"checkpoint is of a stream made at .*{advice}"):
        strict.plan()
    lenient.start()
    end = lenient.plan()
    assert lenient.read(end) == list(range(1, messages + 1))
    assert "checkpoint is of a stream" in caplog.text
    store.recreate()
    store.put(range(5))
    with pytest.raises(DataLossError, match="the batch was planned of a stream"):
        strict.read(end)
    assert lenient.read(end) == []
    lenient.checkpoint = end
    assert lenient.batch() == [1, 2, 3, 4, 5]


def test_a_stream_that_ends_before_the_checkpoint(store: Store) -> None:
    """As after a restore from a backup; here the checkpoint is moved instead."""
    store.put(range(10))
    strict = Query(store, startingOffsets="earliest")
    lenient = Query(store, startingOffsets="earliest", failOnDataLoss=False)
    for query in (strict, lenient):
        query.batch()
        assert query.checkpoint is not None
        query.checkpoint = query.checkpoint | {"next": 500}
    with pytest.raises(DataLossError, match=r"ends with 10, the checkpoint is at 500.*failOnDataLoss"):
        strict.plan()
    assert lenient.batch() == list(range(1, 11))


def test_a_stream_that_has_gone_back_and_grown_again(nats_factory: NatsFactory, tmp_path: Path) -> None:
    """As after a snapshot of its disk was restored: the sequences of what was lost are given again."""
    server = nats_factory()
    kept, data = tmp_path / "kept", server.directory / "store"
    with Store(server.url) as before:
        before.put(range(10))
        server.stop()
        shutil.copytree(data, kept)
        server.start()
    with Store(server.url) as store:
        store.stream, store.prefix = before.stream, before.prefix
        store.put(range(10))
        lenient, behind, strict, planned = (
            Query(store, startingOffsets="earliest", failOnDataLoss=flag) for flag in (False, True, True, True)
        )
        assert behind.batch(ReadAllAvailable()) == list(range(1, 21))
        assert behind.checkpoint is not None
        for query in (lenient, strict, planned):
            query.checkpoint = behind.checkpoint
        store.put(range(5))
        end = planned.plan()
        server.stop()
        shutil.rmtree(data)
        shutil.copytree(kept, data)
        server.start()
    with Store(server.url) as store:
        store.stream, store.prefix = before.stream, before.prefix
        store.put(range(100, 120))
        for query in (lenient, strict, planned):
            query.start()
            store.closing.callback(query.reader.stop)
        with pytest.raises(DataLossError, match=r"another message at 20 than the checkpoint.*failOnDataLoss"):
            strict.plan()
        with pytest.raises(DataLossError, match=r"another message at 25 than when the batch was planned"):
            planned.read(end)
        assert lenient.batch() == list(range(1, 31))
        store.put(range(2))
        assert lenient.batch() == [31, 32]


def test_a_message_where_there_was_none(store: Store) -> None:
    """A query that has stopped at a gap, and one whose last message is deleted."""
    store.put(range(10))
    store.delete([10])
    query = Query(store, startingOffsets="earliest")
    assert query.batch() == list(range(1, 10))
    assert query.checkpoint is not None
    assert query.checkpoint["time"] == NOTHING
    store.put(range(2))
    assert query.batch() == [11, 12]
    assert query.checkpoint["time"] > 0
    store.delete([12])
    assert query.plan() == query.checkpoint
    store.put(range(2))
    assert query.batch() == [13, 14]
    query.checkpoint = query.checkpoint | {"next": 12, "time": NOTHING}
    with pytest.raises(DataLossError, match="another message at 11"):
        query.plan()


@pytest.mark.parametrize("bad", [{}, {"created": "x"}, {"created": "x", "first": None, "next": 1}, [1]])
def test_a_checkpoint_of_another_source(store: Store, bad: Any) -> None:
    query = Query(store)
    query.checkpoint = bad
    with pytest.raises(SourceError, match="checkpointLocation"):
        query.plan()


def test_the_stream_is_told_what_is_complete_and_nothing_else(interest: Store) -> None:
    interest.put(range(10))
    query = Query(interest, startingOffsets="earliest", maxMessagesPerTrigger=4)
    end = query.plan()
    assert query.read(end) == [1, 2, 3, 4]
    query.start()  # before the batch was complete
    assert interest.state["first_seq"] == 1
    assert query.read(end) == [1, 2, 3, 4]
    query.checkpoint = end
    assert query.plan()["next"] == 9
    assert interest.state["first_seq"] == 5
    assert query.batches() == [[5, 6, 7, 8], [9, 10]]
    query.plan()
    assert interest.state["messages"] == 0
    # A query that is behind claims nothing again, and what comes next is held for both.
    behind = Query(interest, failOnDataLoss=False)
    behind.checkpoint = end
    behind.plan()
    floor = interest.api(f"CONSUMER.INFO .{CONSUMER}")["ack_floor"]["stream_seq"]
    assert floor == 10
    interest.put(range(5))
    assert query.batches() == [[11, 12, 13, 14], [15]]


def test_without_a_consumer_nothing_is_released(interest: Store) -> None:
    interest.api("CONSUMER.CREATE .other", stream_name=interest.stream, config=HOLD | {"durable_name": "other"})
    interest.put(range(10))
    interest.api(f"CONSUMER.DELETE .{CONSUMER}")
    query = Query(interest, startingOffsets="earliest")
    assert query.batches() == [list(range(1, 11))]
    assert interest.state["messages"] == 10


def test_a_consumer_that_may_not_be_moved_is_mentioned_once(
    nats_factory: NatsFactory, caplog: pytest.LogCaptureFixture
) -> None:
    users = "{user: reader, password: secret, permissions: {publish: {deny: '$JS.API.CONSUMER.RESET.>'}}}"
    server = nats_factory(config="accounts {A {jetstream: enabled, users: [{user: all, password: x}, " + users + "]}}")
    with Store(server.url.replace("//", "//all:x@"), retention="interest") as store:
        store.api(f"CONSUMER.CREATE .{CONSUMER}", stream_name=store.stream, config=HOLD)
        store.put(range(10))
        query = Query(store, servers=server.url, user="reader", password="secret", startingOffsets="earliest")
        assert query.batch() == list(range(1, 11))
        store.put(range(3))
        assert query.batch() == [11, 12, 13]
        assert query.batches() == []
        assert caplog.text.count("consumer spark of stream") == 1


def test_a_query_outlasts_a_restart_of_nats(nats_factory: NatsFactory) -> None:
    server = nats_factory()
    with Store(server.url) as store:
        store.put(range(10))
        query = Query(store, startingOffsets="earliest")
        assert query.batch() == list(range(1, 11))
        server.kill()
        threading.Timer(1.0, server.start).start()
        assert query.plan() == query.checkpoint
        server.pause()
        threading.Timer(1.0, server.resume).start()
        assert query.batch() == []


def test_a_query_that_never_reached_nats_does_not_wait_for_it(nats_factory: NatsFactory) -> None:
    server = nats_factory()
    with Store(server.url) as store:
        query = Query(store, connectTimeout=0.2)
        server.kill()
        with pytest.raises(ConnectError, match="servers"):
            query.plan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endingSequence": "5"}, "endingSequence has no effect for a streaming read"),
        ({"mode": "retained"}, "mode has no effect for a streaming read"),
        ({"topic": "a"}, "topic has no effect for a streaming read"),
    ],
)
def test_options_that_a_stream_does_not_take(store: Store, options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Query(store, **options)


def test_a_query_of_many_small_batches_keeps_nothing(store: Store) -> None:
    """One message a batch, as a query of ten minutes at a message a second has them; Spark's own part is left out."""
    query = Query(store, startingOffsets="earliest", maxMessagesPerTrigger=1, numPartitions=1)
    process = psutil.Process()
    held: list[tuple[int, int, int]] = []

    def batches(number: int) -> None:
        for one in store.put(range(number)):
            assert query.batch() == [one]
        gc.collect()
        held.append((tracemalloc.get_traced_memory()[0], pa.total_allocated_bytes(), process.num_fds()))

    tracemalloc.start()
    try:
        for number in (100, 250, 250):
            batches(number)
    finally:
        tracemalloc.stop()
    (_, arrow, files), (python, _, _), (python_at_end, arrow_at_end, files_at_end) = held
    assert python_at_end - python < 250 * 100  # less than 100 bytes for each batch
    assert (arrow_at_end, files_at_end) == (arrow, files)
    assert consumers(store) == []
