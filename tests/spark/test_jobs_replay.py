# SPDX-License-Identifier: Apache-2.0
"""Publishing an archive again: order, pace, topics. Without Spark; test_jobs_archive.py has the rest."""

import io
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_mqtt_nats.errors import SourceError
from pyspark_mqtt_nats.jobs.progress import Progress
from pyspark_mqtt_nats.jobs.replay import Pace, Replay, Replayed, _packed, publish
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.schema import arrow_schema
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw5 import AS_PUBLISHED, CONTENT_TYPE, USER, Raw5

COLUMNS = ["sequence", "timestamp", "topic", "payload", "qos", "retain", "content_type", "user_properties"]
BEGIN = 1_760_000_000_000_000  # microseconds


def archive(topic: str | list[str], offsets: Sequence[float], **columns: Any) -> pa.RecordBatch:
    """Messages that were stored these many seconds after BEGIN; their payloads are numbers from 0."""
    number = len(offsets)
    values: dict[str, Any] = {
        "sequence": list(range(10, 10 + number)),
        "timestamp": [BEGIN + int(offset * 1e6) for offset in offsets],
        "topic": [topic] * number if isinstance(topic, str) else topic,
        "payload": [b"%d" % index for index in range(number)],
        "qos": [1] * number,
        "retain": [False] * number,
        "content_type": [None] * number,
        "user_properties": [[]] * number,
        **columns,
    }
    return pa.record_batch(
        [pa.array(values[name], arrow_schema([name]).field(0).type) for name in COLUMNS], names=COLUMNS
    )


def run(server: NatsServer, batches: Sequence[pa.RecordBatch], query: str = "", **job: Any) -> Replayed:
    sink = {"servers": server.url, **({"queryId": query} if query else {})}
    total = sum(batch.num_rows for batch in batches)
    quiet = Progress("replay", io.StringIO())
    return publish(Replay("archive", sink, **job), Options.parse(sink), batches, total, quiet)


def received(client: Raw5, number: int) -> list[bytes]:
    return [client.receive_message().payload for _ in range(number)]


@pytest.fixture
def subscriber(gateway: Gateway) -> Iterator[Raw5]:
    with Raw5.open(gateway.port) as client:
        yield client


def test_messages_come_in_their_order_with_what_belongs_to_them(
    nats_server: NatsServer, gateway: Gateway, subscriber: Raw5
) -> None:
    subscriber.subscribed(("again/#", 2 | AS_PUBLISHED))
    users = [[{"key": "a", "value": "1"}, {"key": "a", "value": "2"}], []]
    first = archive(
        "home/a", [0, 1], qos=[2, 0], retain=[True, False], content_type=["text/plain", None], user_properties=users
    )
    more = (archive("home/b", [0.0] * 100, sequence=range(100 * at, 100 * at + 100)) for at in (1, 2, 3))
    batches = [first, *more]
    found = run(nats_server, batches, speed=0, prefix="again/")
    assert (found.messages, found.total, found.last) == (302, 302, 399)
    one, two = subscriber.receive_message(b"0"), subscriber.receive_message(b"1")
    assert (one.topic, one.qos, one.retain, one.get(CONTENT_TYPE)) == ("again/home/a", 2, True, "text/plain")
    assert one.all(USER) == [("a", "1"), ("a", "2")]
    assert (two.qos, two.retain, two.properties) == (0, False, [])
    assert received(subscriber, 300) == [b"%d" % number for _ in range(3) for number in range(100)]
    with Raw5.open(gateway.port) as later:
        later.subscribed(("again/home/+", 1))
        assert later.receive_message().payload == b"0"  # it was retained


def test_a_second_replay_publishes_everything_again(nats_server: NatsServer, subscriber: Raw5) -> None:
    subscriber.subscribed(("twice/#", 1))
    messages = [archive("twice/x", [0.0] * 3)]
    assert [run(nats_server, messages, speed=0).duplicates for _ in range(2)] == [0, 0]
    assert received(subscriber, 6) == [b"0", b"1", b"2"] * 2


def test_a_named_replay_that_goes_on_publishes_what_was_left(nats_server: NatsServer, subscriber: Raw5) -> None:
    """Rows that look like those of the first part are other messages; and those that were published are known."""
    subscriber.subscribed(("named/#", 1))
    whole = archive("named/x", [0.0] * 6, payload=[b"on", b"off"] * 3)
    found = [run(nats_server, [part], "q", speed=0) for part in (whole.slice(0, 4), whole.slice(4), whole, whole[3:])]
    assert [(one.messages, one.duplicates) for one in found] == [(4, 0), (2, 0), (6, 6), (3, 3)]
    assert run(nats_server, [whole], "r", speed=0).duplicates == 0
    assert received(subscriber, 12) == [b"on", b"off"] * 6


@pytest.mark.parametrize(
    ("job", "seconds"), [({"speed": 1.0}, 0.6), ({"speed": 2.0}, 0.3), ({"rate": 10.0}, 0.2), ({"speed": 0.0}, 0.0)]
)
def test_the_pace_is_kept(nats_server: NatsServer, subscriber: Raw5, job: dict[str, Any], seconds: float) -> None:
    subscriber.subscribed(("pace/#", 1))
    times: list[float] = []

    def batches() -> Iterator[pa.RecordBatch]:
        time.sleep(0.3)  # what Spark takes is no delay
        times.append(time.monotonic())
        yield archive("pace/x", [0.0, 0.1, 0.6])

    found = publish(
        Replay("archive", {}, **job),
        Options.parse({"servers": nats_server.url}),
        batches(),
        3,
        Progress("x", io.StringIO()),
    )
    took = time.monotonic() - times[0]
    assert seconds - 0.01 <= found.seconds <= took < seconds + 5
    assert found.late < 5
    assert received(subscriber, 3) == [b"0", b"1", b"2"]


def test_a_replay_that_is_stopped_says_where_to_go_on(nats_server: NatsServer) -> None:
    progress = Progress("replay", io.StringIO())

    def batches() -> Iterator[pa.RecordBatch]:
        yield archive("stop/x", [0.0, 0.0])
        progress.stopping = True
        yield archive("stop/x", [3600.0])

    found = publish(Replay("a", {}), Options.parse({"servers": nats_server.url}), batches(), 3, progress)
    assert (found.messages, found.last) == (2, 11)
    assert found.text().splitlines()[-1] == "  stopped, 1 are left; --starting-sequence 12 goes on"


def test_what_cannot_be_published_is_named_by_its_sequence(nats_server: NatsServer) -> None:
    bad = archive(["ok/1", "$MQTT/x", "ok/2"], [0.0] * 3)
    with pytest.raises(SourceError, match=re.escape("sequence 11: column topic: '$MQTT/x': ")):
        run(nats_server, [bad], speed=0)
    assert run(nats_server, [bad], speed=0, prefix="old/").messages == 3


def test_text_of_an_archive_that_is_not_utf8_is_named_by_its_sequence(nats_server: NatsServer) -> None:
    good = archive("ok", [0.0] * 3)
    kinds = pa.array([b"a", b"a", b"\xff"], pa.binary()).view(pa.string())
    bad = good.set_column(COLUMNS.index("content_type"), "content_type", kinds)
    with pytest.raises(SourceError, match=re.escape("sequence 12: column content_type: it is not UTF-8")):
        run(nats_server, [good, bad], speed=0)


def test_nothing_to_publish(nats_server: NatsServer) -> None:
    found = run(nats_server, [])
    assert (found.messages, found.last, found.seconds) == (0, 0, 0.0)
    assert found.text() == "0 messages of archive published in 0.0 s, 0/s"


@given(st.lists(st.integers(0, 10**9), min_size=1), st.floats(0.01, 1000))
def test_times_are_those_of_the_record_and_never_go_back(times: list[int], speed: float) -> None:
    pace = Pace(speed, None)
    due = [pace.due(number, stored) for number, stored in enumerate(times)]
    assert due[0] == 0
    assert due == sorted(due)
    for index, stored in enumerate(times):
        latest = max(times[: index + 1])
        assert due[index] == pytest.approx(max(0, latest - times[0]) / 1e6 / speed)
        assert due[index] >= (stored - times[0]) / 1e6 / speed


def test_a_rate_counts_messages() -> None:
    pace = Pace(1.0, 50)
    assert [pace.due(number, 10**9 * number) for number in (0, 1, 100)] == [0, 0.02, 2]


def test_batches_are_packed_and_unpacked() -> None:
    before = [archive("a", [0.0, 1.0]), archive("b", [5.0])]
    packed = list(_packed(before))
    assert [batch.num_rows for batch in packed] == [1, 1]
    assert packed[0].schema == pa.schema([("batch", pa.binary())])
    after = [pa.ipc.open_stream(batch.column(0)[0].as_py()).read_all() for batch in packed]
    assert after == [pa.Table.from_batches([batch]) for batch in before]
