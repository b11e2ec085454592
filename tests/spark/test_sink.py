# SPDX-License-Identifier: Apache-2.0
"""The sink against a nats-server, a gateway and MQTT clients; no Spark session is needed."""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import nats
import paho.mqtt.client as paho
import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as Subscribed
from nats.js.client import JetStreamContext
from paho.mqtt.enums import CallbackAPIVersion
from pyspark import TaskContext

from mqtt_nats.codec import Publish, Subscription
from pyspark_mqtt_nats.errors import ApiError, OptionError, SourceError
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.sink import BatchWriter, Published, StreamWriter
from tests.conftest import NatsFactory
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.paho import stop
from tests.harness.rawclient import RawClient, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.spark.sinking import Row, Sinker, batch_of, run, schema_of, stored, users

_COUNT = itertools.count()

RICH: Final[Row] = {
    "content_type": "text/plain",
    "payload_format": 1,
    "response_topic": "answers/here",
    "correlation_data": b"\0\xff",
    "message_expiry": 600,
    "user_properties": users(("unit", "\u00b0C"), ("unit", "K"), ("n", "1")),
}
PROPERTIES: Final[dict[str, Any]] = {
    "content_type": "text/plain",
    "payload_format_indicator": 1,
    "response_topic": "answers/here",
    "correlation_data": b"\0\xff",
    "user_property": [("unit", "\u00b0C"), ("unit", "K"), ("n", "1")],
}
"""What a 5.0 client sees of RICH, beside the expiry."""


@pytest.fixture
def name() -> str:
    """A first level for topics, and a client id, that no other test of this module uses."""
    return f"t{next(_COUNT)}"


@pytest.fixture
async def js(nats_server: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(nats_server.url)
    yield client.jetstream()
    await client.close()


async def received(client: RawClient, count: int) -> list[Publish]:
    """So many messages, each acknowledged."""
    found = []
    for _ in range(count):
        found.append(await client.expect(Publish))
        await client.complete(found[-1])
    return found


class Task(NamedTuple):
    """What a writer asks the context of a task."""

    query: str
    epoch: str
    partition: int

    def partitionId(self) -> int:
        return self.partition

    def getLocalProperty(self, key: str) -> str | None:
        return {"sql.streaming.queryId": self.query, "streaming.sql.batchId": self.epoch}.get(key)


def numbered(name: str, count: int, **more: Any) -> list[Row]:
    return [{"topic": f"{name}/{number % 3}", "payload": b"%d" % number, **more} for number in range(count)]


class TestDelivery:
    @pytest.mark.long
    @pytest.mark.parametrize("qos", [0, 1, 2])
    async def test_in_order_to_whoever_is_there_and_to_who_comes_back(
        self, nats_server: NatsServer, gateway: Gateway, name: str, qos: int
    ) -> None:
        away = await RawClient5.connect5(gateway.port, f"{name}-away", session_expiry_interval=600)
        await away.subscribe5(Subscription(f"{name}/#", 2))
        await away.disconnect5()
        rows = numbered(name, 2500)
        sinker = Sinker(nats_server.url, rows, qos=qos)
        async with (
            await RawClient.connect(gateway.port, f"{name}-regular") as regular,
            await RawClient.connect(gateway.port, f"{name}-durable", clean=False) as durable,
        ):
            for client in (regular, durable):
                await client.subscribe(f"{name}/#", qos=2)
            writing = asyncio.create_task(run(sinker))
            for client in (regular, durable):
                found = await received(client, len(rows))
                assert [(topic_of(one), one.payload) for one in found] == [tuple(row.values()) for row in rows]
                assert {one.qos for one in found} == {qos}
                await client.quiet()
            assert await writing == (2500, 0)
        async with await RawClient5.connect5(gateway.port, f"{name}-away", clean=False) as back:
            assert back.session_present
            late = await received(back, len(rows) if qos else 0)
            assert [one.payload for one in late] == [row["payload"] for row in rows][: len(late)]
            await back.quiet()

    async def test_properties_and_defaults_of_columns(
        self, nats_server: NatsServer, gateway: Gateway, name: str
    ) -> None:
        rows: list[Row] = [
            {"payload": b"rich", **RICH},
            {"payload": b"plain", "qos": 0, "topic": f"{name}/own"},
            {"payload": b"hostile", "qos": 2, "user_properties": users(("Nats-Rollup", "all"), ("a", "\r\n"))},
        ]
        async with await RawClient5.connect5(gateway.port, name) as client:
            await client.subscribe5(Subscription(f"{name}/+", 2))
            assert await run(Sinker(nats_server.url, rows, topic=f"{name}/option", qos=1)) == (3, 0)
            rich, plain, hostile = await received(client, 3)
        assert (topic_of(rich), rich.qos, rich.properties) == (
            f"{name}/option",
            1,
            PROPERTIES | {"message_expiry_interval": 600},
        )
        assert (topic_of(plain), plain.qos, plain.properties) == (f"{name}/own", 0, None)
        assert (hostile.qos, hostile.properties) == (2, {"user_property": [("Nats-Rollup", "all"), ("a", "\r\n")]})

    async def test_with_a_client_library(self, nats_server: NatsServer, gateway: Gateway, name: str) -> None:
        found: queue.Queue[paho.MQTTMessage] = queue.Queue()
        ready = threading.Event()
        client = paho.Client(CallbackAPIVersion.VERSION2, name, protocol=paho.MQTTv5)
        client.on_message = lambda _client, _data, message: found.put(message)
        client.on_subscribe = lambda *_: ready.set()
        client.connect("127.0.0.1", gateway.port)
        client.loop_start()
        try:
            client.subscribe(f"{name}/#", 2)
            assert ready.wait(10)
            await run(Sinker(nats_server.url, [{"topic": f"{name}/a", "payload": b"x", "qos": 2, **RICH}]))
            message = await asyncio.to_thread(found.get, timeout=10)
        finally:
            client.disconnect()
            stop(client)
        assert (message.topic, message.payload, message.qos) == (f"{name}/a", b"x", 2)
        assert message.properties.UserProperty == PROPERTIES["user_property"]  # type: ignore[attr-defined, union-attr, unused-ignore]


class TestRetained:
    async def test_is_kept_and_cleared(
        self, nats_server: NatsServer, gateway: Gateway, js: JetStreamContext, name: str
    ) -> None:
        rows: list[Row] = [
            {"topic": f"{name}/0", "payload": b"zero", "qos": 0, "retain": True},
            {"topic": f"{name}/1", "payload": b"old", "qos": 1, "retain": True},
            {"topic": f"{name}/1", "payload": b"one", "qos": 1, "retain": True},
            {"topic": f"{name}/2", "payload": b"two", "qos": 2, "retain": True, **RICH},
            {"topic": f"{name}/3", "payload": b"not", "qos": 2, "retain": False},
        ]
        sinker = Sinker(nats_server.url, rows)
        assert await run(sinker) == (5, 0)
        assert await run(sinker) == (5, 4)
        async with await RawClient5.connect5(gateway.port, name) as client:
            await client.subscribe5(Subscription(f"{name}/#", 2))
            found = {topic_of(one)[-1]: one for one in await received(client, 3)}
            await client.quiet()
            seen = {level: (one.payload, one.qos, one.retain) for level, one in found.items()}
            assert seen == {"0": (b"zero", 0, True), "1": (b"one", 1, True), "2": (b"two", 2, True)}
            properties: dict[str, Any] = {**(found["2"].properties or {})}
            assert 590 < properties.pop("message_expiry_interval") <= 600
            assert properties == PROPERTIES
            cleared = [{"topic": f"{name}/{level}", "payload": b"", "qos": level, "retain": True} for level in range(3)]
            assert await run(Sinker(nats_server.url, cleared)) == (3, 0)
            assert [(one.payload, one.retain) for one in await received(client, 3)] == [(b"", False)] * 3
        async with await RawClient.connect(gateway.port, name) as client:
            await client.subscribe(f"{name}/#", qos=2)
            await client.quiet()
        assert not await stored(js, name, "$MQTT_rmsgs", "$MQTT.rmsgs."), "tombstones are left"


def comparable(message: Msg, other: str) -> tuple[str, list[tuple[str, str]], bytes, str]:
    """A message without what is its publisher's own; `other` is the first level that differs."""
    own = ("Nmqtt-Id", "Nmqtt-Client", "Nats-Msg-Id", "Nmqtt-ROrigin")
    found = [(key, value.replace(other, "x")) for key, value in (message.headers or {}).items() if key not in own]
    return message.subject.replace(other, "x"), found, message.data, message.reply[:6]


def pending(subscription: Subscribed) -> bool:
    """Whether a copy of all of SAME has come."""
    return subscription.pending_msgs >= len(SAME)


COPIES: Final = ("", "$MQTT.msgs.", "$MQTT.rmsgs.")
HOSTILE: Final = [("Nats-TTL", "5"), ("a b", "c\r\nd")]
SAME: Final[tuple[tuple[bytes, Row, dict[str, Any]], ...]] = (
    (b"plain", {}, {}),
    (b"rich", RICH, PROPERTIES | {"message_expiry_interval": 600}),
    (b"hostile", {"user_properties": users(*HOSTILE)}, {"user_property": HOSTILE}),
    (b"", {"content_type": "a\tb"}, {"content_type": "a\tb"}),
)
"""Publishes: payload, columns, and the properties that they stand for."""


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_nats_gets_what_a_gateway_would_send(
    nats_server: NatsServer, gateway: Gateway, name: str, qos: int, retain: bool
) -> None:
    """All copies, header for header, of the same publishes of a client and of the sink."""
    copies: list[list[tuple[str, list[tuple[str, str]], bytes, str]]] = []
    client: NatsClient = await nats.connect(nats_server.url)
    try:
        for who in (f"{name}a", f"{name}b"):
            kept = [await client.subscribe(f"{prefix}{who}.>") for prefix in COPIES]
            await fence(client)
            if not copies:
                async with await RawClient5.connect5(gateway.port, who) as publisher:
                    for payload, _, properties in SAME:
                        packet_id = publisher.publish5(f"{who}/a b", payload, qos, retain=retain, **properties)
                        if qos:
                            await publisher.expect_ack(3 + qos, packet_id)
                        if qos == 2:
                            publisher.ack(6, packet_id)
                            await publisher.expect_ack(7, packet_id)
                    await publisher.quiet()
            else:
                rows = [{"topic": f"{who}/a b", "payload": payload, **row} for payload, row, _ in SAME]
                await run(Sinker(nats_server.url, rows, qos=qos, retain=retain))
            copies.append([])
            await aeventually(partial(pending, kept[0]))  # PINGRESP does not wait for NATS
            await fence(client)
            for one, expected in zip(kept, (True, bool(qos), retain), strict=True):
                assert one.pending_msgs == len(SAME) * expected
                copies[-1] += [comparable(await one.next_msg(1), who) for _ in range(one.pending_msgs)]
                await one.unsubscribe()
    finally:
        await client.close()
    for theirs, ours in zip(*copies, strict=True):
        if ("Nmqtt-RFlags", "-1") in theirs[1]:
            theirs[1].remove(("Nats-TTL", "60s"))  # the sink writes to streams too that know no TTL
        # Where there is correlation data, a gateway waits for answers itself.
        assert ours[:3] == theirs[:3]
        assert ours[3] == theirs[3] or (not ours[3] and ours[2] == b"rich")


class TestTasksThatAreRunAgain:
    @pytest.mark.parametrize("qos", [1, 2])
    async def test_store_nothing_twice_and_who_is_connected_gets_it_once(
        self, nats_server: NatsServer, gateway: Gateway, js: JetStreamContext, name: str, qos: int
    ) -> None:
        """The gateway knows the identifier of the bare copy, so it does not deliver a second one."""
        rows = numbered(name, 500, qos=qos)
        sinker = Sinker(nats_server.url, rows)
        async with (
            await RawClient.connect(gateway.port, f"{name}-regular") as regular,
            await RawClient.connect(gateway.port, f"{name}-durable", clean=False) as durable,
        ):
            for client in (regular, durable):
                await client.subscribe(f"{name}/#", qos=2)
            assert await run(sinker, rows[:200]) == (200, 0)
            assert await run(sinker) == (500, 200)
            assert await run(sinker) == (500, 500)
            await run(Sinker(nats_server.url, [{"topic": f"{name}/end", "payload": b"end"}]))
            for client in (regular, durable):
                found = await received(client, 501)
                assert [one.payload for one in found] == [*[row["payload"] for row in rows], b"end"]
        assert await stored(js, name) == 501

    async def test_with_their_rows_in_another_order(
        self, nats_server: NatsServer, gateway: Gateway, js: JetStreamContext, name: str
    ) -> None:
        rows = [*numbered(name, 50), *numbered(name, 50), *numbered(name, 10)]
        sinker = Sinker(nats_server.url, rows)
        assert await run(sinker, rows[:70]) == (70, 0)
        assert await run(sinker, rows[::-1]) == (110, 70)
        assert await stored(js, name) == 110

    async def test_another_write_of_the_same_rows_is_another(
        self, nats_server: NatsServer, gateway: Gateway, js: JetStreamContext, name: str
    ) -> None:
        rows = numbered(name, 20)
        for expected in ((20, 0), (20, 0)):
            assert await run(Sinker(nats_server.url, rows)) == expected
        for expected in ((20, 0), (20, 20)):
            assert await run(Sinker(nats_server.url, rows, queryId=name)) == expected
        assert await run(Sinker(nats_server.url, rows, queryId=f"{name}-2")) == (20, 0)
        assert await stored(js, name) == 80

    @pytest.mark.parametrize("streams", [False, True])
    @pytest.mark.parametrize("given", [False, True])
    async def test_are_known_by_query_epoch_and_partition(
        self,
        nats_server: NatsServer,
        gateway: Gateway,
        name: str,
        monkeypatch: pytest.MonkeyPatch,
        streams: bool,
        given: bool,
    ) -> None:
        """What a writer that was made anew, as after a restart, has in common with the first one."""
        rows = numbered(name, 10)
        options = Options.parse({"servers": nats_server.url, "queryId": name if given else None})
        schema = schema_of(["topic", "payload"])

        async def write(*task: Any) -> int:
            monkeypatch.setattr(TaskContext, "get", lambda: Task(*task))
            writer = StreamWriter(options, schema) if streams else BatchWriter(options, schema, False)
            found = await asyncio.to_thread(writer.write, iter([batch_of(rows, ["topic", "payload"])]))
            assert found.partition == task[2]
            return found.duplicates

        assert await write("query", "1", 1) == 0
        assert await write("query", "1", 1) == (10 if streams or given else 0)
        assert await write("query", "2", 1) == 0
        assert await write("query", "1", 2) == 0
        assert await write("other", "1", 1) == (10 if given else 0)

    async def test_after_they_failed_midway(
        self, nats_server: NatsServer, gateway: Gateway, js: JetStreamContext, name: str
    ) -> None:
        """What was published before the rows ended with an error is there, and is not stored again."""
        rows = numbered(name, 1000)
        sinker = Sinker(nats_server.url, rows)

        def failing() -> Iterator[Any]:
            yield batch_of(rows[:100], sinker.names)  # less than what is collected for one write
            asyncio.run_coroutine_threadsafe(aeventually(lambda: stored(js, name)), loop).result(10)
            raise RuntimeError("upstream")

        loop = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="upstream"):
            await asyncio.to_thread(sinker.writer.write, failing())
        assert await run(sinker) == (1000, 100)
        assert await stored(js, name) == 1000


class TestRefused:
    @pytest.mark.parametrize(
        ("row", "text"),
        [
            ({"topic": "a/#"}, "column topic: 'a/#' has a wildcard"),
            ({"payload": None}, "column payload: it is null"),
            ({"qos": 3}, "column qos: 3 is not 0, 1 or 2"),
            ({"payload": b"x" * (8 << 20)}, "column payload: the message has 8388"),
        ],
    )
    async def test_row_is_named_and_nothing_of_it_is_published(
        self, nats_server: NatsServer, gateway: Gateway, js: JetStreamContext, name: str, row: Row, text: str
    ) -> None:
        rows = [*numbered(name, 1500), {"topic": f"{name}/bad", "payload": b"bad", "retain": True} | dict(row)]
        with pytest.raises(SourceError) as caught:
            await run(Sinker(nats_server.url, rows))
        assert str(caught.value).startswith(f"partition 0, row 1500: {text}")
        assert str(caught.value).endswith("; with a dead-letter topic the other rows are published")
        assert "\n" not in str(caught.value)
        assert caught.value.option == text.split()[1].rstrip(":")
        assert 500 <= await stored(js, name) <= 1500
        for stream, prefix in (("$MQTT_msgs", "$MQTT.msgs"), ("$MQTT_rmsgs", "$MQTT.rmsgs")):
            info = await js.stream_info(stream, subjects_filter=f"{prefix}.{name}.bad")
            assert not info.state.subjects

    def test_options(self, nats_server: NatsServer, gateway: Gateway) -> None:
        rows: list[Row] = [{"topic": "a", "payload": b""}]
        for options, text in (
            ({"topic": "$SYS/a"}, "topic: '$SYS/a': topics under '$SYS' are reserved"),
            ({"topics": "a/#"}, "topics has no effect for a write"),
            ({"stream": "nothing"}, "there is no stream nothing"),
            ({"servers": "nats://127.0.0.1:1", "connectTimeout": "0.1"}, "cannot connect to nats://127.0.0.1:1"),
            ({"duplicateWindow": "86400.5"}, "duplicateWindow = '86400.5': expected more than 0"),
        ):
            with pytest.raises((OptionError, SourceError)) as caught:
                Sinker(nats_server.url, rows, **options)
            assert str(caught.value).startswith(text)
            assert "\n" not in str(caught.value)
        with pytest.raises(
            OptionError, match=r'^messages cannot be overwritten: write with mode\("append"\), or INSERT INTO$'
        ):
            BatchWriter(Options.parse({}), schema_of(["topic", "payload"]), True)

    async def test_by_jetstream(self, nats_server: NatsServer, js: JetStreamContext, name: str) -> None:
        """A stream that takes less than the server names the row; nothing behind it counts as written."""
        await js.add_stream(name=name, subjects=[f"{name}.*.*"], max_msg_size=200)
        rows: list[Row] = [{"topic": f"{name}/a", "payload": b"x" * size} for size in (1, 500, 1)]
        with pytest.raises(ApiError) as caught:
            await run(Sinker(nats_server.url, rows, stream=name, subjectPrefix=name))
        assert str(caught.value) == (
            "partition 0, row 1: JetStream refuses it: message size exceeds maximum allowed (option stream)"
        )


class TestDuplicateWindow:
    async def test_is_raised_where_the_option_says_so(
        self, nats_server: NatsServer, gateway: Gateway, js: JetStreamContext, name: str
    ) -> None:
        await js.add_stream(name=name, subjects=[f"{name}.>"], duplicate_window=1, max_age=300)
        rows: list[Row] = [{"topic": "a", "payload": b""}]

        async def window(**options: str) -> tuple[float, float]:
            sinker = await asyncio.to_thread(Sinker, nats_server.url, rows, stream=name, subjectPrefix=name, **options)
            return sinker.writer.window, (await js.stream_info(name)).config.duplicate_window or 0

        assert await window() == (1, 1)
        assert await window(duplicateWindow="0.5") == (1, 1)
        assert await window(duplicateWindow="120s") == (120, 120)
        with pytest.raises(OptionError, match=r"^duplicateWindow = 600: stream \S+ keeps 120 s: duplicates window can"):
            await window(duplicateWindow="600")

    async def test_warning_of_a_task_that_takes_longer(
        self, nats_server: NatsServer, gateway: Gateway, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        sinker = Sinker(nats_server.url, numbered(name, 10))
        with caplog.at_level(logging.WARNING, "pyspark_mqtt_nats"):
            await run(sinker)
            assert not caplog.messages
            sinker.writer.window = 1e-9
            await run(sinker)
        (text,) = caplog.messages
        assert text.startswith("partition 0 takes longer than 1e-09 s, the duplicate window of stream $MQTT_msgs")
        assert text.endswith("set duplicateWindow")

    def test_no_stream_is_needed_at_qos_0(self, nats_factory: NatsFactory) -> None:
        assert Sinker(nats_factory().url, [{"topic": "a", "payload": b"x"}], qos=0).write() == (1, 0)


def test_stream_writer_is_the_same_task(nats_server: NatsServer, gateway: Gateway, name: str) -> None:
    """In complete mode, too; its commit message can be sent to the driver."""
    rows = numbered(name, 3)
    writer = StreamWriter(Options.parse({"servers": nats_server.url}), schema_of(["topic", "payload"]))
    empty = batch_of([], ["topic", "payload"])
    assert writer.write(iter([empty, batch_of(rows, ["topic", "payload"]), empty])) == Published(0, 3, 0)
    writer.options = Options.parse({"servers": "nats://127.0.0.1:1"})
    assert writer.write(iter([empty])) == Published(0, 0, 0)  # without a connection
