# SPDX-License-Identifier: Apache-2.0
"""Rules that are asked about each message, not about the filter: ``acl_subscribe = "deliver"``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import nats
import pytest
from pydantic import ByteSize

from mqtt_nats.codec import PINGREQ, Ack, PingResp, Publish, Subscription
from mqtt_nats.config.settings import Settings
from mqtt_nats.hooks.chain import Continue
from mqtt_nats.hooks.events import Authorizing
from mqtt_nats.hooks.points import CLIENT_AUTHORIZE
from mqtt_streams.consumers import consumer_info
from mqtt_streams.messages import STREAM as MESSAGES
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBCOMP, PUBREL, RawClient, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio

RULES: Final = """
[[rules]]
effect = "allow"
access = "publish"
topics = "#"

[[rules]]
effect = "deny"
topics = ["a/secret/#", "$SYS/brokers/+/uptime"]

[[rules]]
effect = "allow"
topics = ["a/#", "own/%c/#", "$SYS/#"]
"""

NOT_AUTHORIZED: Final = 0x87

TOPICS: Final = ("a/1", "a/secret/x", "b/1", "own/other/x", "a/2")
"""What is published: a client that has `#` may have the first and the last."""

DENIED: Final = len(TOPICS) - 2


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    acl = tmp_path_factory.mktemp("acl") / "acl.toml"
    acl.write_text(RULES, encoding="utf-8")
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), acl_file=acl, acl_subscribe="deliver")
    with running(settings) as found:
        yield found


async def connect(gateway: InProcess, version: int, name: str, durable: bool) -> RawClient:
    if version == 4:
        return await RawClient.connect(gateway.port, name, clean=not durable)
    return await RawClient5.connect5(
        gateway.port, name, clean=not durable, session_expiry_interval=600 if durable else 0
    )


async def end(gateway: InProcess, name: str) -> None:
    """Have a session end that outlives its connections."""
    async with await RawClient.connect(gateway.port, name) as client:
        await client.disconnect()


def withheld(gateway: InProcess) -> int:
    return gateway.account.services.counters.drops(0)["not permitted"]


def has_withheld(gateway: InProcess, count: int) -> Callable[[], bool]:
    return lambda: withheld(gateway) == count


async def received(client: RawClient, count: int) -> list[Publish]:
    """So many messages, each acknowledged, and nothing behind them."""
    found = []
    for _ in range(count):
        message = await client.expect(Publish)
        await client.complete(message)
        found.append(message)
    await client.quiet()
    return found


async def publish_all(gateway: InProcess, qos: int, *, retain: bool = False) -> None:
    async with await RawClient.connect(gateway.port, "publisher") as publisher:
        for topic in TOPICS:
            await publisher.deliver(topic, topic.encode(), qos, retain=retain)


@pytest.mark.parametrize("version", [4, 5])
async def test_filters_that_are_granted(gateway: InProcess, version: int) -> None:
    """Those that have a topic in common with what is allowed; shared ones too."""
    wanted = ("#", "+/1", "a/#", "own/+/x", "own/c/x", "a/secret/#", "b/#", "own/other/x", "a/secret/+")
    denied = {"a/secret/#", "a/secret/+", "b/#", "own/other/x"}
    async with await connect(gateway, version, "c", False) as client:
        codes = await client.subscribe(*wanted)
        refusal = 0x80 if version == 4 else NOT_AUTHORIZED
        assert codes == tuple(refusal if one in denied else 0 for one in wanted)
        codes = await client.subscribe(*(f"$share/g/{one}" for one in wanted))
        assert codes == tuple(refusal if one in denied else 0 for one in wanted)


@pytest.mark.parametrize("topic_filter", ["#", "a/#"])
@pytest.mark.parametrize("durable", [False, True], ids=["clean", "durable"])
@pytest.mark.parametrize("version", [4, 5])
async def test_messages_that_are_delivered(gateway: InProcess, version: int, durable: bool, topic_filter: str) -> None:
    """At each QoS, from this gateway and through NATS; the others are counted."""
    name = f"reader{version}{durable}"
    async with await connect(gateway, version, name, durable) as client:
        for granted in (0, 1, 2):
            assert await client.subscribe(topic_filter, qos=granted) == (granted,)
            for qos in (0, 1, 2):
                before = withheld(gateway)
                await publish_all(gateway, qos)
                found = await received(client, 2)
                assert [topic_of(one) for one in found] == ["a/1", "a/2"]
                assert [one.qos for one in found] == [min(qos, granted)] * 2
                expected = DENIED if topic_filter == "#" else 1
                await aeventually(has_withheld(gateway, before + expected))
    await end(gateway, name)


@pytest.mark.parametrize("durable", [False, True], ids=["clean", "durable"])
async def test_messages_of_nats_clients(gateway: InProcess, nats_server: NatsServer, durable: bool) -> None:
    """Without headers, and those at QoS 1, which are on the subject and in the stream."""
    one = await nats.connect(nats_server.url)
    headers = {"Nmqtt-Pub": "1", "Nmqtt-Id": "0" * 31}
    try:
        async with await connect(gateway, 5, "of-nats", durable) as client:
            assert await client.subscribe("+/+", "a/secret/x/+/#", "a/+/#", qos=1) == (1, NOT_AUTHORIZED, 1)
            for subject in ("a.secret", "a.secret.x", "b.1", "a.1"):
                await one.publish(subject, b"plain")
            found = await received(client, 1)
            assert [(topic_of(each), each.qos) for each in found] == [("a/1", 0)]
            for at, subject in enumerate(("a.secret.x", "b.1", "a.2")):
                headers["Nmqtt-Id"] = f"{at:032x}"
                await one.publish(subject, b"stored", headers=headers)
                await one.jetstream().publish(f"$MQTT.msgs.{subject}", b"stored", headers=headers)
            found = await received(client, 1)
            assert [(topic_of(each), each.qos) for each in found] == [("a/2", 1)]
    finally:
        await one.close()
        await end(gateway, "of-nats")


@pytest.mark.parametrize("version", [4, 5])
async def test_what_was_stored_for_an_absent_client(gateway: InProcess, version: int) -> None:
    """What it may not have is acknowledged to JetStream: nothing is left of it."""
    async with await connect(gateway, version, "away", True) as client:
        assert await client.subscribe("#", qos=2) == (2,)
        await client.disconnect()
    for qos in (1, 2):
        await publish_all(gateway, qos)
    before = withheld(gateway)
    async with await connect(gateway, version, "away", True) as client:
        assert client.session_present
        assert [topic_of(one) for one in await received(client, 4)] == ["a/1", "a/2"] * 2
        assert withheld(gateway) == before + 2 * DENIED
        await client.disconnect()
    async with await connect(gateway, version, "away", True) as client:
        client.write(PINGREQ)
        while isinstance(packet := await client.packet(), Ack):  # a PUBREL may come once more, a message may not
            client.ack(PUBCOMP, packet.packet_id)
        assert isinstance(packet, PingResp)
        record = gateway.account.registry.clients["away"].record
        assert record is not None
        (name,) = {consumer.durable_name for consumer in record.cons.values()}

        def nothing_pending() -> bool:
            info = gateway.run(consumer_info(gateway.account.services.nats.inbox, MESSAGES, name))
            return info is not None and not info.num_ack_pending

        await aeventually(nothing_pending)
    await end(gateway, "away")


@pytest.mark.parametrize("durable", [False, True], ids=["clean", "durable"])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_retained_messages(gateway: InProcess, durable: bool, qos: int) -> None:
    await publish_all(gateway, qos, retain=True)
    try:
        async with await connect(gateway, 5, "late", durable) as client:
            assert await client.subscribe("#", qos=1) == (1,)
            found = await received(client, 2)
            assert [(topic_of(one), one.retain) for one in found] == [("a/1", True), ("a/2", True)]
        await end(gateway, "late")
    finally:
        async with await RawClient.connect(gateway.port, "publisher") as publisher:
            for topic in TOPICS:
                await publisher.deliver(topic, b"", 1, retain=True)


@pytest.mark.parametrize("durable", [False, True], ids=["clean", "durable"])
@pytest.mark.parametrize("version", [4, 5])
async def test_shared_subscriptions(gateway: InProcess, version: int, durable: bool) -> None:
    """What the member may not have to which a message goes, none has."""
    async with await connect(gateway, version, "member", durable) as client:
        assert await client.subscribe("$share/g/#", qos=2) == (2,)
        for qos in (0, 1, 2):
            before = withheld(gateway)
            await publish_all(gateway, qos)
            assert [topic_of(one) for one in await received(client, 2)] == ["a/1", "a/2"]
            await aeventually(has_withheld(gateway, before + DENIED))
        await client.unsubscribe("$share/g/#")
    await end(gateway, "member")


async def test_who_comes_and_goes(gateway: InProcess) -> None:
    """`$SYS` as a whole is allowed; one topic of it is not, and its last value is not sent either."""
    async with await RawClient5.connect5(gateway.port, "watcher") as client:
        assert await client.subscribe5(Subscription("$SYS/#", 0)) == (0,)
        async with await RawClient.connect(gateway.port, "somebody"):
            topics: list[str] = []
            while not any(topic.endswith("clients/somebody/connected") for topic in topics):
                topics.append(topic_of(await client.expect(Publish)))
        assert any("stats/" in topic for topic in topics)
        assert not any(topic.startswith("$SYS/brokers/") and topic.endswith("/uptime") for topic in topics)


async def test_a_filter_without_rules_for_its_presence_topics(nats_server: NatsServer, tmp_path: Path) -> None:
    """A default is not enough to be told who comes and goes, also within a wider filter."""
    file = tmp_path / "acl.toml"
    file.write_text('default = "allow"\n', encoding="utf-8")
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), acl_file=file, acl_subscribe="deliver")
    with running(settings) as gateway:
        async with await RawClient5.connect5(gateway.port, "watcher") as client:
            within = "$SYS/brokers/+/clients/+/connected"
            assert await client.subscribe(within, "$SYS/#") == (NOT_AUTHORIZED, 0)
            async with await RawClient.connect(gateway.port, "somebody") as other:
                await aeventually(lambda: withheld(gateway) > 0)
                await other.quiet()
            client.write(PINGREQ)
            while isinstance(packet := await client.packet(), Publish):
                assert "/clients/somebody/" not in topic_of(packet)


async def test_rules_that_change(nats_server: NatsServer, tmp_path: Path) -> None:
    """What was decided is forgotten; a message that was sent, and not acknowledged, is not sent again."""
    file = tmp_path / "acl.toml"
    file.write_text(RULES, encoding="utf-8")
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), acl_file=file, acl_subscribe="deliver")
    with running(settings) as gateway:
        for version in (4, 5):
            async with await connect(gateway, version, "held", True) as client:
                await client.subscribe("+/1", "a/+", qos=2)
                async with await RawClient.connect(gateway.port, "p") as publisher:
                    for qos in (0, 1, 2):
                        await publisher.deliver("a/1", b"%d" % qos, qos)
                    # The order is one of the messages at the same QoS [MQTT-4.6.0-5] (5.0).
                    assert sorted([(await client.expect(Publish)).qos for _ in range(3)]) == [0, 1, 2]
                    file.write_text(RULES.replace('"a/#"', '"b/#"'), encoding="utf-8")
                    gateway.call(gateway.gateway.reload)
                    for qos in (0, 1, 2):
                        await publisher.deliver("a/1", b"denied", qos)
                        await publisher.deliver("b/1", b"%d" % qos, qos)
                    assert [topic_of(await client.expect(Publish)) for _ in range(3)] == ["b/1"] * 3
                await client.quiet()
            async with await connect(gateway, version, "held", True) as client:
                assert client.session_present
                packets = [await client.packet() for _ in range(3)]
                # What it has at QoS 2, and must not be sent again, it is asked to give up.
                assert [packet.kind for packet in packets if isinstance(packet, Ack)] == [PUBREL]
                found = [packet for packet in packets if isinstance(packet, Publish)]
                assert [(topic_of(one), one.qos) for one in found] == [("b/1", 1), ("b/1", 2)]
            await end(gateway, "held")
            file.write_text(RULES, encoding="utf-8")
            gateway.call(gateway.gateway.reload)


async def test_hooks_are_asked_about_topics_once(nats_server: NatsServer, tmp_path: Path) -> None:
    """They have the last word about the filter, and about each topic until the rules change; a failure is not kept."""
    file = tmp_path / "acl.toml"
    file.write_text(RULES, encoding="utf-8")
    asked: list[str] = []

    def authorize(event: Authorizing, allowed: bool) -> Continue[bool]:
        if event.access == "subscribe" and event.topic != "#":
            asked.append(event.topic)
            if asked == ["a/1"]:
                raise OSError("nobody can tell at the moment")
        return Continue(allowed or event.topic == "b/1")

    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), acl_file=file, acl_subscribe="deliver")
    with running(settings) as gateway:
        gateway.call(lambda: gateway.account.services.hooks.add(CLIENT_AUTHORIZE, authorize))
        async with await RawClient.connect(gateway.port, "hooked") as client:
            await client.subscribe("#", qos=1)
            async with await RawClient.connect(gateway.port, "p") as publisher:
                await publisher.deliver("a/1", b"", 0)
                await aeventually(lambda: withheld(gateway) == 1)
                for qos in (0, 1, 1):
                    for topic in ("a/1", "b/1", "b/2"):
                        await publisher.deliver(topic, b"", qos)
                await publisher.deliver("a/1", b"", 1)
            assert [topic_of(one) for one in await received(client, 7)] == [*["a/1", "b/1"] * 3, "a/1"]
            assert asked == ["a/1", "a/1", "b/1", "b/2"]


async def test_what_is_remembered_of_topics_has_a_limit(nats_server: NatsServer, tmp_path: Path) -> None:
    file = tmp_path / "acl.toml"
    file.write_text(RULES, encoding="utf-8")
    settings = Settings(
        listen="127.0.0.1:0",
        nats=(nats_server.url,),
        acl_file=file,
        acl_subscribe="deliver",
        max_cache_bytes=ByteSize(1024 * 1024),
        max_client_cache_bytes=ByteSize(64 * 1024),
    )
    with running(settings) as gateway:
        budget = gateway.account.services.path.memory
        async with (
            await RawClient.connect(gateway.port, "reader") as client,
            await RawClient.connect(gateway.port, "p") as publisher,
        ):
            await client.subscribe("#", qos=0)
            for number in range(4000):
                publisher.publish(f"b/{number:0100}", b"")
            await publisher.deliver("a/1", b"")
            await client.receive("a/1", b"")
            assert withheld(gateway) == 4000
            assert budget.used <= budget.limit


@pytest.mark.parametrize("mode", ["filter", "deliver"])
async def test_nothing_is_asked_of_messages_by_default(nats_server: NatsServer, tmp_path: Path, mode: str) -> None:
    """With `filter` a client with rules is served like one without: nobody looks at its messages."""
    file = tmp_path / "acl.toml"
    file.write_text(RULES, encoding="utf-8")
    values = {"listen": "127.0.0.1:0", "nats": (nats_server.url,), "acl_file": file}
    if mode == "deliver":
        values["acl_subscribe"] = mode
    with running(Settings.model_validate(values)) as gateway:
        async with await RawClient.connect(gateway.port, "reader") as client:
            code = 0x80 if mode == "filter" else 0
            assert await client.subscribe("#", "a/+", "a/1") == (code, code, 0)
            table = gateway.account.services.path.table

            def looked_at() -> int:
                return sum(len(group.guarded) for group in table.route(b"\0\3a/1").groups.values())

            assert gateway.call(looked_at) == (0 if mode == "filter" else 1)
