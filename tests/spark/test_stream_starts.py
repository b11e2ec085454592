# SPDX-License-Identifier: Apache-2.0
"""Where a query begins: by its options, by its checkpoint, and where that is still to come. No Spark session."""

from collections.abc import Iterator

import pytest

from mqtt_streams.stored import rfc3339
from pyspark_mqtt_nats.errors import DataLossError
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually
from tests.spark.planning import Query
from tests.spark.storing import Store


@pytest.fixture
def store(nats_server: NatsServer) -> Iterator[Store]:
    with Store(nats_server.url) as found:
        yield found


def test_a_query_begins_where_it_was_told_and_goes_on_from_its_checkpoint(store: Store) -> None:
    store.put(range(10))
    late, early = Query(store), Query(store, startingOffsets="earliest")
    given = Query(store, startingSequence=4)
    assert late.batch() == []
    assert sorted(early.batch()) == list(range(1, 11))
    assert given.batch() == list(range(4, 11))
    store.put(range(5))
    for query in (late, early, given):
        query.start()
        assert query.batch() == list(range(11, 16))
        assert query.plan() == query.checkpoint
        assert query.reader.reportLatestOffset() == query.checkpoint


def test_a_first_batch_that_was_planned_and_not_completed_is_the_same_after_a_restart(store: Store) -> None:
    store.put(range(10))
    late, early = Query(store), Query(store, startingOffsets="earliest")
    planned = late.plan(), early.plan()
    store.put(range(5))
    for query, end, expected in ((late, planned[0], []), (early, planned[1], list(range(1, 11)))):
        query.start()
        assert query.read(end) == expected
        query.checkpoint = end
        assert query.batch() == list(range(11, 16))


def test_a_first_batch_begins_with_what_is_left_when_it_is_read_again(store: Store) -> None:
    """The first batch that was planned is in the checkpoint for good, and what it began with may be too old by now."""
    store.put(range(10))
    early, named = Query(store, startingOffsets="earliest"), Query(store, startingSequence=1)
    planned = early.plan(), named.plan()
    store.purge_before(4)
    early.start()
    assert early.read(planned[0]) == list(range(4, 11))
    with pytest.raises(DataLossError):
        named.read(planned[1])
    store.purge_before(11)
    store.put(range(5))
    assert early.read(planned[0]) == []
    early.checkpoint = planned[0]
    assert early.batch() == list(range(11, 16))


def test_a_start_that_is_still_to_come_is_waited_for(store: Store) -> None:
    """Also by a query that is started again, whatever its options are then."""
    store.put(range(10))
    query, other = Query(store, startingTimestamp="2100-01-01"), Query(store, startingSequence=2)
    planned = query.plan()
    query.start()
    assert query.read(planned) == []
    query.checkpoint = planned
    store.put(range(10))
    query.start(available_now=True)
    assert query.batches() == []
    other.checkpoint = planned
    assert other.plan() == planned
    assert planned["since"] == 4_102_444_800_000_000_000
    # The time comes: here it is moved instead.
    other.checkpoint = planned | {"since": store.time_of(14)}
    end = other.plan()
    assert end["since"] == 0
    assert other.read(end) == list(range(14, 21))
    store.purge_before(16)  # a batch that is read again begins with what is left
    assert other.read(end) == list(range(16, 21))
    other.checkpoint = end
    store.put(range(2))
    assert other.batch() == [21, 22]


def test_nothing_before_the_start_is_read_however_soon_it_comes(store: Store) -> None:
    store.put(range(3))
    since = store.time_of(3) + 500_000_000
    query = Query(store, startingTimestamp=rfc3339(since))
    found = eventually(lambda: (query.batch(), store.put([0]))[0])
    later = eventually(lambda: (store.put([0]), query.batch())[1])
    wanted = [one for one in range(1, store.state["last_seq"] + 1) if store.time_of(one) >= since]
    assert found + later == wanted


@pytest.mark.parametrize("fail", [True, False])
def test_a_sequence_that_is_still_to_come_is_waited_for(store: Store, fail: bool) -> None:
    """The stream has not lost what is before it, and nobody has asked for that."""
    store.put(range(10))
    query = Query(store, startingSequence=15, failOnDataLoss=fail, maxMessagesPerTrigger=2)
    assert query.batch() == []
    assert query.plan() == query.checkpoint
    query.start(available_now=True)
    assert query.batches() == []
    store.put(range(4))
    assert query.batches() == []
    query.start()
    store.put(range(3))
    assert query.batches() == [[15, 16], [17]]
    assert query.checkpoint is not None
    query.checkpoint |= {"next": 500}
    if fail:  # from here on it has lost something
        with pytest.raises(DataLossError, match="ends with 17, the checkpoint is at 500"):
            query.plan()


def test_a_start_at_which_nothing_has_come_yet_is_a_place(store: Store) -> None:
    """So that what comes, and goes before it is read, is missed."""
    store.put(range(3))
    query = Query(store, startingTimestamp=rfc3339(store.time_of(3) + 1))
    assert query.batch() == []
    assert query.checkpoint is not None
    assert query.checkpoint["next"] == 4
    store.put(range(3))
    store.purge_before(6)
    with pytest.raises(DataLossError):
        query.batch()
