# SPDX-License-Identifier: Apache-2.0
"""What the options mean for a stream as it is, and its sequences in parts."""

import datetime
import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_mqtt_nats import batch
from pyspark_mqtt_nats.errors import ApiError, DataLossError, OptionError
from pyspark_mqtt_nats.nats.jetstream import get_message
from pyspark_mqtt_nats.reading.ranges import Range, Snapshot, reads_directly, snapshot, split
from tests.harness.nats import NatsServer
from tests.spark.storing import Store


@pytest.fixture(scope="module")
def store(nats_server: NatsServer) -> Iterator[Store]:
    """Sequences 11 to 100, without 41 to 60 and 96 to 100."""
    with Store(nats_server.url) as made:
        made.put(range(100))
        made.purge_before(11)
        made.delete([*range(41, 61), *range(96, 101)])
        yield made


def plan(store: Store, **options: Any) -> Snapshot:
    return snapshot(store.options(**options), store.connection)


def times(store: Store) -> dict[int, int]:
    """Sequence -> time of each message."""
    found = {}
    start = 1
    while (message := get_message(store.connection, store.stream, seq=start, next_by_subj=">")) is not None:
        found[message.seq] = message.time_ns
        start = message.seq + 1
    return found


@pytest.mark.parametrize(
    ("options", "start", "end"),
    [
        ({}, 11, 101),
        ({"startingOffsets": "earliest"}, 11, 101),
        ({"startingOffsets": "latest"}, 101, 101),
        ({"endingOffsets": "latest"}, 11, 101),
        ({"startingSequence": 11}, 11, 101),
        ({"startingSequence": 50, "endingSequence": 50}, 50, 51),
        ({"startingSequence": 100}, 100, 101),
        ({"startingSequence": 101}, 101, 101),
        ({"startingSequence": 5000}, 5000, 5000),
        ({"endingSequence": 20}, 11, 21),
        ({"endingSequence": 100}, 11, 101),
        ({"endingSequence": 5}, 11, 11),
        ({"startingTimestamp": "2000-01-01"}, 11, 101),
        ({"startingTimestamp": "2100-01-01"}, 101, 101),
        ({"endingTimestamp": "2100-01-01"}, 11, 101),
        ({"endingTimestamp": "2000-01-01"}, 11, 11),
    ],
)
def test_starts_and_ends(store: Store, options: dict[str, Any], start: int, end: int) -> None:
    found = plan(store, **options)
    assert (found.start, found.end) == (start, end)
    assert (found.first, found.last, found.retention, found.direct) == (11, 100, "limits", True)
    assert found.subjects == (f"{store.prefix}>",)
    assert found.floating == ("startingSequence" not in options)


def test_times_are_found_between_any_two_messages(store: Store) -> None:
    """A start is the first message of that time or later, an end leaves it out."""
    known = times(store)
    for sequence in (11, 12, 40, 61, 62, 95):
        at = plan(store, startingTimestamp=_text(known[sequence]))
        assert [one for one in known if at.start <= one < at.end] == [one for one in known if one >= sequence]
        before = plan(store, endingTimestamp=_text(known[sequence]))
        assert [one for one in known if before.start <= one < before.end] == [one for one in known if one < sequence]
        after = plan(store, startingTimestamp=_text(known[sequence] + 1))
        assert [one for one in known if one >= after.start] == [one for one in known if one > sequence]


def _text(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


@pytest.mark.parametrize(
    ("options", "count", "start", "end", "text"),
    [
        ({"startingSequence": 4}, 7, 11, 101, "startingSequence 4 is gone .* begins with 11"),
        ({"endingSequence": 103}, 3, 11, 101, "endingSequence 103 is not in .* ends with 100"),
    ],
)
def test_what_is_not_there_is_a_loss(
    store: Store,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    count: int,
    start: int,
    end: int,
    text: str,
) -> None:
    with pytest.raises(DataLossError, match=text + ".*failOnDataLoss") as caught:
        plan(store, **options)
    assert caught.value.option == "failOnDataLoss"
    with caplog.at_level(logging.WARNING, "pyspark_mqtt_nats"):
        found = plan(store, **options, failOnDataLoss=False)
    assert (found.start, found.end) == (start, end)
    (record,) = caplog.records
    assert f"{count} messages" in record.getMessage()


def test_empty_streams(nats_server: NatsServer) -> None:
    with Store(nats_server.url) as store:
        found = plan(store)
        assert (found.first, found.last, found.start, found.end) == (1, 0, 1, 1)
        assert plan(store, startingSequence=1).start == 1
        assert plan(store, startingTimestamp="2000-01-01").end == 1
        assert split(found, 8) == []
        store.put(range(10))
        store.purge_before(11)
        found = plan(store)
        assert (found.first, found.last, found.start, found.end) == (11, 10, 11, 11)
        with pytest.raises(DataLossError):
            plan(store, startingSequence=10)


def test_no_such_stream(nats_server: NatsServer) -> None:
    with Store(nats_server.url) as store:
        store.api("STREAM.DELETE")
        with pytest.raises(ApiError, match=r"no stream .* stream"):
            plan(store)


@pytest.mark.parametrize(
    ("retention", "direct", "mode", "expected"),
    [
        ("limits", True, "auto", False),
        ("limits", False, "auto", False),
        ("limits", False, "pull", False),
        ("limits", True, "direct", True),
        ("interest", True, "auto", True),
        ("interest", True, "direct", True),
        ("workqueue", True, "auto", True),
        ("limits", False, "direct", "does not allow direct get: .*--allow-direct`, or set readMode to pull"),
        ("interest", False, "auto", "with interest retention readMode has no other way"),
        ("interest", True, "pull", "readMode = 'pull' needs a stream with limits retention"),
        ("workqueue", True, "pull", "has workqueue: set readMode to auto or direct"),
    ],
)
def test_how_a_stream_is_read(
    nats_server: NatsServer, retention: str, direct: bool, mode: str, expected: bool | str
) -> None:
    with Store(nats_server.url, retention=retention, allow_direct=direct) as store:
        options = store.options(readMode=mode)
        if isinstance(expected, str):
            with pytest.raises(OptionError, match=expected) as caught:
                snapshot(options, store.connection)
            assert caught.value.option == "readMode"
        else:
            assert reads_directly(options, snapshot(options, store.connection)) is expected


def test_what_was_started_by_sequence_is_expected_to_be_there(store: Store) -> None:
    found = plan(store)
    part = found.between(20, 30)
    assert (part.start, part.end, part.floating) == (20, 30, False)
    assert found.between(30, 20).end == 30
    with Store(store.url, max_msgs_per_subject=1) as other:
        assert plan(other).replacing
    assert not found.replacing


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(1, 100))
def test_parts_are_the_whole_and_of_one_size(start: int, size: int, parts: int) -> None:
    found = split(Snapshot("S", "", start, start + size, start, start + size, "limits", ()), parts)
    assert len(found) == min(size, parts)
    if found:
        assert (found[0].start, found[-1].end) == (start, start + size)
        sizes = [end - begin for begin, end in found]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
    assert all(one.end == other.start for one, other in pairwise(found))
    assert all(isinstance(one, Range) for one in found)


@pytest.mark.parametrize(
    ("length", "size", "numbers", "expected"),
    [
        (0, 350, {}, 0),
        (1, 350, {}, 1),
        (9_999, 350, {}, 1),
        (25_000, 350, {}, 2),
        (1_000_000, 350, {}, 8),
        (12, 1 << 20, {}, 3),
        (100, 1 << 20, {}, 8),
        (100, 350, {"numPartitions": 3}, 3),
    ],
)
def test_parts_are_not_smaller_than_a_batch(
    store: Store,
    length: int,
    size: int,
    numbers: dict[str, int],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of rows or of bytes, unless a number of parts is asked for."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    found = Snapshot("S", "", 1, length, 1, length + 1, "limits", (), size=size)
    number = batch.number_of_parts(store.options(**numbers), length, size)
    assert len(batch.parts(found, number)) == expected


def test_the_size_of_messages_is_an_average(store: Store) -> None:
    state = store.state
    assert plan(store).size == state["bytes"] // state["messages"] > 0
    with Store(store.url) as empty:
        assert plan(empty).size == 0
