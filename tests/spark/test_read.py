# SPDX-License-Identifier: Apache-2.0
"""Ranges of streams as record batches, both ways: every message once, in order, whatever happens meanwhile."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyspark_mqtt_nats.errors import AccessError, ConnectError, SourceError
from pyspark_mqtt_nats.nats.bulk import Block
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.frames import Frames
from pyspark_mqtt_nats.nats.jetstream import PubAck, Publish, create_consumer, publish_all
from pyspark_mqtt_nats.reading import direct, pull, read, rows
from pyspark_mqtt_nats.reading.ranges import Range
from tests.conftest import NatsFactory
from tests.harness.nats import NatsServer
from tests.harness.proxy import Proxy
from tests.spark.reading import MANY, WAYS, Reading, consumers, half
from tests.spark.storing import QOS1, Store, sequences


@pytest.fixture
def store(nats_server: NatsServer) -> Iterator[Store]:
    """An empty stream."""
    with Store(nats_server.url) as made:
        yield made


@WAYS
@pytest.mark.parametrize("parts", [1, 3])
def test_all_messages_once_and_in_order(store: Store, way: str, parts: int) -> None:
    numbers = store.put(range(MANY))
    reading = Reading(store, parts, readMode=way, batchSize=500)
    found = list(reading.batches())
    assert sequences(iter(found)) == numbers
    assert [int(value) for batch in found for value in batch.column("payload").to_pylist()] == list(range(MANY))
    assert max(batch.num_rows for batch in found) <= 500
    assert (reading.total("rows"), reading.total("gaps"), reading.total("lost")) == (MANY, 0, 0)
    assert reading.total("interruptions") == 0
    assert reading.total("bytes") == sum(len(QOS1) + len(b"%d" % number) for number in range(MANY))
    assert consumers(store) == []


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 120), st.integers(1, 40)), max_size=5),
    st.integers(0, 30),
    st.sampled_from([1, 2, 3, 7, 16]),
    st.sampled_from(["", "a/+", "a/0,a/2", "a/#", "b/#,a/1,a/+", "none/#"]),
    st.integers(1, 50),
)
def test_gaps_parts_and_filters(
    nats_server: NatsServer, holes: list[tuple[int, int]], first: int, parts: int, topics: str, size: int
) -> None:
    """Both ways give exactly what is there and matches."""
    subjects = ["a.0", "b.0", "a.1", "a.2.x", "a.2", "c"]
    with Store(nats_server.url) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "_LEAST_ROWS", 1)  # pages of several filters end at different places
        numbers = store.put(range(120), lambda number: subjects[number % len(subjects)])
        store.purge_before(first + 1)
        gone = {number for start, length in holes for number in range(start, start + length)} | set(range(first + 1))
        left = [number for number in numbers if number not in gone]
        store.delete(number for number in numbers if number in gone and number > first)
        wanted = {
            "": subjects,
            "a/+": ["a.0", "a.1", "a.2"],
            "a/0,a/2": ["a.0", "a.2"],
            "a/#": ["a.0", "a.1", "a.2", "a.2.x"],
            "b/#,a/1,a/+": ["b.0", "a.0", "a.1", "a.2"],
            "none/#": [],
        }[topics]
        expected = [number for number in left if subjects[(number - 1) % len(subjects)] in wanted]
        for way in ("pull", "direct"):
            given_topics = {"topics": topics} if topics else {}
            reading = Reading(store, parts, readMode=way, batchSize=size, **given_topics)
            found = list(reading.batches())
            assert sequences(iter(found)) == expected, way
            assert all(0 < batch.num_rows <= size for batch in found)
            assert reading.total("interruptions") == 0
            if not topics:
                assert reading.total("gaps") == reading.snapshot.end - reading.snapshot.start - len(left)
                assert reading.total("rows") == len(left)
            else:
                assert all(report.gaps is None for report in reading.reports)
        assert consumers(store) == []


@pytest.mark.parametrize(
    ("topics", "asked", "matching"),
    [
        ("a/#", [], ["a.0", "a.1"]),
        ("+/0", [], ["a.0", "b.0"]),
        ("a/0", ["a.0"], ["a.0"]),
        ("a/0/#", ["a.0"], ["a.0"]),
        ("a/0,a/1/x", ["a.0"], ["a.0"]),
        ("c/#,d/x", None, []),
    ],
)
def test_filters_that_nats_evaluates(
    store: Store, topics: str, asked: list[str] | None, matching: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that match most messages, nor those that match none; None: no consumer is needed."""
    subjects = ["a.0", "a.1", "b.0"]
    numbers = store.put(range(MANY), lambda number: subjects[number % 3])
    made: list[list[str]] = []

    def watched(connection: Connection, stream: str, config: dict[str, Any]) -> dict[str, Any]:
        filters = config.get("filter_subjects", [config.get("filter_subject", "")])
        made.append([one.removeprefix(store.prefix) for one in filters if one])
        return create_consumer(connection, stream, config)

    monkeypatch.setattr(pull, "create_consumer", watched)
    reading = Reading(store, readMode="pull", topics=topics)
    assert reading.sequences() == [number for number in numbers if subjects[(number - 1) % 3] in matching]
    assert (made[-1] if made else None) == asked


def test_subjects_without_the_prefix_match_no_filter(nats_server: NatsServer) -> None:
    """Also where the filters are not evaluated by NATS."""
    with Store(nats_server.url, subjects=["bare.>", "dressed.>"]) as store:
        store.prefix = "dressed."
        numbers = store.put(range(MANY), lambda _: "bare.x")
        store.prefix = ""
        store.put(range(10), lambda _: "bare.x")
        store.prefix = "dressed."
        assert Reading(store, readMode="pull", topics="bare/#").sequences() == numbers


@WAYS
def test_ranges_with_nothing_in_them(store: Store, way: str) -> None:
    """A hole, beyond the end, an empty stream: no rows, no waiting, no error."""
    assert Reading(store, readMode=way).parts == []
    store.put(range(100))
    store.delete(range(30, 70))
    store.delete([100])
    reading = Reading(store, readMode=way)
    for part, expected in (
        (Range(30, 70), []),
        (Range(100, 101), []),
        (Range(31, 71), [70]),
        (Range(101, 500), []),
        (Range(98, 10**9), [98, 99]),
        (Range(5, 5), []),
        (Range(50, 40), []),
    ):
        reading.parts = [part]
        assert reading.sequences() == expected, part
    store.purge_before(101)
    assert Reading(store, readMode=way).sequences() == []


@WAYS
def test_what_comes_later_is_not_in_the_range(store: Store, way: str) -> None:
    numbers = store.put(range(100))
    reading = Reading(store, 3, readMode=way, batchSize=10)
    later = store.put(range(100))
    assert reading.sequences() == numbers
    reading.parts = [Range(90, later[-1] + 1000)]
    assert reading.sequences() == [*numbers[89:], *later]


@WAYS
def test_large_messages_keep_to_the_bound(store: Store, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are bounded in bytes too; no message is too large for one, nor is one cut by what is asked between."""
    monkeypatch.setattr(read, "LOOK", 0.0)
    sizes = [300_000, 10, 900_000, 0, 1_000_000] * 8
    store.put_payloads(("big", b"x" * size) for size in sizes)
    reading = Reading(store, readMode=way)
    found = [batch.column("payload").to_pylist() for batch in reading.batches()]
    assert [len(payload) for batch in found for payload in batch] == sizes
    most = max(sum(map(len, batch)) for batch in found)
    assert most <= max(rows.Bounds().bytes, store.connection.max_payload) + 2 * (1 << 20)


def test_a_message_larger_than_a_pull_is_asked_for_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server refuses a pull that is too small for the next message, for instance since max_payload was lowered."""
    store.put_payloads([("a", b"1"), ("a", b"x" * 100_000), ("a", b"x" * 20_000), ("a", b"4")])
    monkeypatch.setitem(store.connection.info, "max_payload", 1000)
    found = pull.read(store.connection, store.stream, (), 1, 5, rows.Bounds(10, 100))
    assert [len(payload) for part in found for payload in part.payloads.to_pylist()] == [1, 100_000, 20_000, 1]


def test_the_server_has_no_more_than_two_requests_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is owed is the bound of memory: never more than is left of the range, all with a bound in bytes."""
    asked: list[dict[str, Any]] = []
    send = Connection.send

    def spy(connection: Connection, data: bytes) -> None:
        if b".CONSUMER.MSG.NEXT." in data:
            asked.append(json.loads(data.split(b"\r\n")[1]))
        send(connection, data)

    monkeypatch.setattr(Connection, "send", spy)
    ask = pull._Pull._ask

    def bounded(one: pull._Pull) -> None:
        for _ in range(5):  # as if nothing had come meanwhile
            ask(one)
        assert one._owed <= 2 * 300

    monkeypatch.setattr(pull._Pull, "_ask", bounded)
    numbers = store.put(range(1000))
    reading = Reading(store, readMode="pull", batchSize=300)
    store.put(range(1000))
    assert reading.sequences() == numbers
    assert [body["batch"] for body in asked] == [300, 300, 300, 100]
    assert all(body["max_bytes"] > 0 and body["expires"] > 0 and not body.get("no_wait") for body in asked)


@WAYS
def test_wildcards_do_not_show_what_starts_with_a_dollar(store: Store, way: str) -> None:
    """[MQTT-4.7.2-1]"""
    names = ["$own.x", "home.x", "$other.x", "x", "_INBOX.x"]
    store.put(range(50), lambda number: names[number % len(names)])

    def topics(filters: str) -> set[str]:
        reading = Reading(store, 2, ["topic"], readMode=way, topics=filters, batchSize=7)
        return {row["topic"] for row in reading.rows()}

    assert topics("+/x") == {"home/x"}
    assert topics("+/x,$own/#") == {"home/x", "$own/x"}
    assert topics("#") == {"home/x", "$own/x", "$other/x", "x", "_INBOX/x"}
    assert topics("+") == {"x"}


def test_other_retentions_are_read_without_a_trace(nats_server: NatsServer) -> None:
    for retention in ("interest", "workqueue"):
        with Store(nats_server.url, retention=retention) as store:
            name = "hold"
            config = {"durable_name": name, "ack_policy": "explicit", "deliver_policy": "all"}
            store.api(f"CONSUMER.CREATE {'.' + name}", stream_name=store.stream, config=config)
            numbers = store.put(range(200))
            before = store.state
            assert Reading(store, 3, batchSize=20).sequences() == numbers
            assert store.state == before
            assert consumers(store) == [name]


@WAYS
def test_messages_of_anybody(store: Store, way: str) -> None:
    """Odd headers and none, whatever bytes: read, and the same both ways."""
    blocks = [
        b"",
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0\r\nNats-Stream: forged\r\nNats-Sequence: 99\r\nnote: y\r\n\r\n",
        b"NATS/1.0\r\nNmqtt-Pub:1\r\nnote:1\r\nnote: 2\r\n\r\n",
        b"NATS/1.0 503\r\n\r\n",
        b"garbage",
        b"\xff\xfe\r\n\r\n",
        b"NATS/1.0\r\nfoo:bar",
        b"NATS/1.0\r\nfoo:bar\r\n",
        b"NATS/1.0\r\nfoo:bar\r\nxy",
        b"NATS/1.0\r\n\xff:bar\r\n\r\n",
    ]
    messages = [
        Publish(f"{store.prefix}a.{index}".encode(), block, b"%d" % index) for index, block in enumerate(blocks)
    ]
    assert all(isinstance(outcome, PubAck) for outcome in publish_all(store.connection, messages))
    columns = ["topic", "payload", "qos", "retain", "user_properties", "headers"]
    found = Reading(store, 1, columns, readMode=way, includeHeaders=True).rows()
    users = [
        row["user_properties"]
        if row["user_properties"] is None
        else [tuple(pair.values()) for pair in row["user_properties"]]
        for row in found
    ]
    assert [row["payload"] for row in found] == [b"%d" % index for index in range(len(blocks))]
    assert [row["topic"] for row in found] == [f"a/{index}" for index in range(len(blocks))]
    assert users == [
        [], [], [("note", "y")], [("note", "1"), ("note", "2")], [], None, None, None, None, [("foo", "bar")], [],
    ]  # fmt: skip
    assert [row["qos"] for row in found] == [None, None, None, 1, *[None] * 7]
    assert [row["headers"] is None for row in found] == [row["retain"] is None for row in found]
    assert found[3]["headers"] == [
        {"key": "Nmqtt-Pub", "value": b"1"},
        {"key": "note", "value": b"1"},
        {"key": "note", "value": b"2"},
    ]
    assert found[10]["headers"] == [{"key": "\ufffd", "value": b"bar"}]


# -- losses ---------------------------------------------------------------------------------------------------


def test_a_consumer_that_is_deleted_while_it_is_read(store: Store) -> None:
    numbers = store.put(range(MANY))
    reading = Reading(store, readMode="pull", batchSize=100)
    batches, got = half(reading)
    for name in consumers(store):
        store.api(f"CONSUMER.DELETE .{name}")
    got += sequences(batches)
    assert got == numbers
    assert reading.total("interruptions") >= 1
    assert consumers(store) == []


@WAYS
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_server_that_comes_back(nats_factory: NatsFactory, way: str, end: str) -> None:
    server = nats_factory()
    with Store(server.url) as store:
        numbers = store.put(range(MANY))
        reading = Reading(store, readMode=way, batchSize=100)
        batches, got = half(reading)
        getattr(server, end)()
        server.start()
        got += sequences(batches)
        assert got == numbers
        assert reading.total("interruptions") >= 1
        with Store(server.url):
            pass


@WAYS
def test_a_server_that_stays_away(nats_factory: NatsFactory, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "OUTAGE", 1.0)
    server = nats_factory()
    with Store(server.url) as store:
        store.put(range(MANY))
        reading = Reading(store, readMode=way, batchSize=100, connectTimeout=1)
        batches, got = half(reading)
        server.kill()
        with pytest.raises(ConnectError, match=r"nothing came for 1 s: .*servers") as caught:
            got += sequences(batches)
    assert caught.value.option == "servers"
    assert len(got) < MANY
    assert "\n" not in str(caught.value)


@WAYS
def test_a_server_that_hangs(nats_factory: NatsFactory, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections stay open and nothing is answered: noticed, and gone on with when it is back."""
    monkeypatch.setattr(direct, "SILENCE", 0.5)
    monkeypatch.setattr(pull, "SILENCE", 0.5)
    monkeypatch.setattr(pull, "QUIET", 0.2)
    server = nats_factory()
    with Store(server.url) as store:
        numbers = store.put(range(MANY))
        reading = Reading(store, readMode=way, batchSize=100, connectTimeout=1, requestTimeout=1)
        batches, got = half(reading)
        server.pause()
        resumed: list[None] = []

        def notice(_: float) -> None:
            server.resume()
            resumed.append(None)

        monkeypatch.setattr("pyspark_mqtt_nats.reading.read.time.sleep", notice)
        got += sequences(batches)
        assert got == numbers
        assert resumed


@WAYS
def test_a_connection_that_ends_while_the_reader_rests(store: Store, way: str) -> None:
    """As nats-server ends that of a reader which takes nothing for long: what was on its way comes again."""
    store.put_payloads(("a", b"%0100000d" % number) for number in range(300))
    with Proxy(int(store.url.rpartition(":")[2])) as proxy:
        reading = Reading(store, readMode=way, batchSize=20)
        reading.options = store.options(servers=proxy.url, readMode=way, batchSize=20)
        got: list[int] = []
        for index, batch in enumerate(reading.batches()):
            got += sequences(iter([batch]))
            if index in (0, 5):
                proxy.cut()
                proxy.restore()
        assert got == list(range(1, 301))
        assert reading.total("interruptions") >= 1


def behind(monkeypatch: pytest.MonkeyPatch, module: Any, times: int) -> None:
    """The leader has what the server that answers does not have yet, this many times."""
    truth: Callable[..., bool] = module.anything_between
    left = [True] * times
    monkeypatch.setattr(module, "anything_between", lambda *which: left.pop() if left else truth(*which))


def test_a_replica_that_is_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """That nothing more comes is not believed before the leader says so."""
    numbers = store.put(range(100))
    store.delete(range(90, 101))
    for way, module in (("direct", direct), ("pull", pull)):
        behind(monkeypatch, module, 2)
        reading = Reading(store, readMode=way, batchSize=30)
        assert reading.sequences() == numbers[:89]
        assert 1 <= reading.total("interruptions") <= 2


def test_a_message_that_gets_lost_on_the_way(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the consumer tell, where a gap in the stream's sequences would be normal."""
    numbers = store.put(range(1000))
    lost: list[bytes] = []

    class Losing(Frames):
        def take(self, most: int) -> Block:
            block = super().take(most)
            if not lost and len(block.payloads) > 50:
                lost.append(block.payloads[50].as_py())
                block = Block(*(pa.concat_arrays([part[:50], part[51:]]) for part in block))
            return block

    monkeypatch.setattr(pull, "Frames", Losing)
    reading = Reading(store, readMode="pull", batchSize=100)
    assert reading.sequences() == numbers
    assert lost
    assert reading.total("interruptions") == 1


def test_a_read_that_is_not_finished_leaves_nothing(store: Store) -> None:
    store.put(range(MANY))
    batches, _ = half(Reading(store, readMode="pull", batchSize=100))
    assert len(consumers(store)) == 1
    batches.close()  # type: ignore[attr-defined]
    assert consumers(store) == []


@WAYS
def test_a_domain(nats_factory: NatsFactory, way: str) -> None:
    """Deliveries then have longer subjects."""
    server = nats_factory(config='jetstream { domain: "hub" }')
    with Store(server.url) as store:
        numbers = store.put(range(200))
        reading = Reading(store, 2, readMode=way, batchSize=50, jsDomain="hub")
        assert reading.sequences() == numbers


@pytest.mark.parametrize(
    ("way", "denied"),
    [
        ("pull", "$JS.API.CONSUMER.MSG.NEXT.>"),
        ("pull", "$JS.API.CONSUMER.CREATE.>"),
        ("pull", "$JS.API.STREAM.MSG.GET.>"),
        ("direct", "$JS.API.DIRECT.GET.>"),
    ],
)
def test_what_the_user_may_not_do(nats_factory: NatsFactory, way: str, denied: str) -> None:
    """One line at once, which says what to allow; not a read that comes back empty, or hangs."""
    server = nats_factory(
        config=f"""authorization {{ users: [
            {{user: "all", password: "x"}}
            {{user: "few", password: "x", permissions: {{publish: {{deny: ["{denied}"]}}}}}}
        ] }}"""
    )
    with Store(server.url.replace("//", "//all:x@")) as store:
        store.put(range(200))
        store.delete([200])
        reading = Reading(store, readMode=way)
        reading.options = store.options(servers=server.url, user="few", password="x", readMode=way)
        with pytest.raises(
            AccessError, match=r"(?i)permissions violation for publish to .*\.(NEXT|CREATE|GET)"
        ) as caught:
            reading.sequences()
        assert caught.value.option == "user"
        assert "\n" not in str(caught.value)


def test_no_consumer_may_be_made(nats_server: NatsServer) -> None:
    with Store(nats_server.url, max_consumers=1) as store:
        store.put(range(10))
        store.api("CONSUMER.CREATE .one", stream_name=store.stream, config={"durable_name": "one"})
        with pytest.raises(SourceError, match="as many consumers as it may: set readMode to direct") as caught:
            Reading(store).sequences()
        assert caught.value.option == "readMode"
        assert len(Reading(store, readMode="direct").sequences()) == 10
