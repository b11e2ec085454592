# SPDX-License-Identifier: Apache-2.0
"""Delayed publish: when, at which QoS, once, and whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import nats
import pytest

from mqtt_nats.codec import Publish, Subscription, TopicNameInvalid, Will
from mqtt_nats.ingress import scheduled as scheduling
from mqtt_nats.plugins.delayed import parse
from mqtt_streams.timers import FiredTimer
from tests.harness.inprocess import InProcess
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.plugins.conftest import Start, installed, running_with

pytestmark = pytest.mark.anyio

LONG = 30.0  # seconds in which a message that is due must come

TIMERS = "$MQTT.timers.message.*"


@pytest.fixture(scope="module")
def delaying(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    acl = tmp_path_factory.mktemp("acl") / "acl.toml"
    acl.write_text(
        '[[rules]]\neffect = "deny"\naccess = "publish"\ntopics = "secret/#"\n[[rules]]\neffect = "allow"\n'
        'topics = ["#", "$x/#"]\n',
        encoding="utf-8",
    )
    with installed(), running_with({"delayed": {"max_delay": 1000}}, nats_server.url, acl_file=acl) as found:
        yield found


async def scheduled(server: NatsServer, subject: str = TIMERS) -> int:
    client = await nats.connect(server.url)
    try:
        info = await client.jetstream().stream_info("$MQTT_timers", subjects_filter=subject)
        return sum((info.state.subjects or {}).values())
    finally:
        await client.close()


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("version", [4, 5])
async def test_a_message_comes_later_as_it_was_published(
    delaying: InProcess, nats_server: NatsServer, qos: int, version: int
) -> None:
    topic = f"later/{qos}{version} x"
    async with (
        await RawClient5.connect5(delaying.port, "reader") as reader,
        await RawClient5.connect5(delaying.port, "keeper", session_expiry_interval=100) as keeper,
        await RawClient.connect(delaying.port, "old") as old,
        await RawClient5.connect5(delaying.port, "new") as new,
    ):
        for one in (reader, keeper):
            await one.subscribe("later/#", "$delayed/#", qos=2)
        begun = time.monotonic()
        if version == 4:
            await old.deliver(f"$delayed/1/{topic}", b"x", qos, retain=True)
        else:
            number = new.publish5(
                f"$delayed/1/{topic}",
                b"x",
                qos,
                retain=True,
                content_type="text",
                message_expiry_interval=100,
                user_property=[("a", "b"), ("a", "c")],
            )
            if qos == 1:
                await new.expect_ack(PUBACK, number)
            elif qos == 2:
                await new.expect_ack(PUBREC, number)
                new.ack(PUBREL, number)
                await new.expect_ack(PUBCOMP, number)
        for one in (reader, keeper):
            found = await one.message(topic, b"x", LONG, qos=qos)
            await one.complete(found)
            properties: Any = found.properties or {}
            assert properties.get("content_type") == ("text" if version == 5 else None)
            assert properties.get("user_property") == ([("a", "b"), ("a", "c")] if version == 5 else None)
            if version == 5:
                assert 90 < properties["message_expiry_interval"] <= 100
        assert time.monotonic() - begun > 0.7  # the server counts in quarters of a second
        for one in (reader, keeper):
            await one.quiet()

        async def gone() -> bool:
            return await scheduled(nats_server, "$MQTT.timers.>") == 0

        await aeventually(gone, LONG)
        await old.subscribe(topic, qos=2)
        await old.receive(topic, b"x", qos=qos, retain=True)
        await old.unsubscribe(topic)
        await keeper.disconnect5(session_expiry_interval=0)
        await old.deliver(topic, b"", 1, retain=True)


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_no_local_holds_for_messages_that_come_later(delaying: InProcess, qos: int) -> None:
    """[MQTT-3.8.3-3] (5.0): a message that comes later is still one of its publisher."""
    topic = f"own/{qos}"
    async with (
        await RawClient5.connect5(delaying.port, "owner") as owner,
        await RawClient5.connect5(delaying.port, "other") as other,
    ):
        await owner.subscribe5(Subscription("own/#", 2, no_local=True))
        await other.subscribe(topic, qos=2)
        await owner.deliver(f"$delayed/0/{topic}", b"x", qos)
        await other.receive(topic, b"x", timeout=LONG, qos=qos)
        await other.deliver("own/last", b"", 1)
        await owner.receive("own/last", b"")


@pytest.mark.parametrize(
    ("topic", "reason"),
    [
        ("$delayed/x/a", 0x90),
        ("$delayed/-1/a", 0x90),
        ("$delayed/1.5/a", 0x90),
        ("$delayed/1001/a", 0x90),
        ("$delayed/99999999999/a", 0x90),
        ("$delayed/1", 0x90),
        ("$delayed/1/", 0x90),
        ("$delayed/1/$delayed/1/a", 0x90),
        ("$delayed/1/$MQTT/x", 0x87),
        ("$delayed/1/secret/x", 0x87),
        ("$delayed/1/$reply/x", 0x87),
    ],
)
@pytest.mark.parametrize("qos", [1, 2])
async def test_what_is_refused(delaying: InProcess, nats_server: NatsServer, topic: str, reason: int, qos: int) -> None:
    """The rules are held against the topic that the message is for."""
    async with await RawClient5.connect5(delaying.port, "new") as new:
        new.publish5(topic, b"", qos, packet_id=9)
        await new.expect_refusal(3 + qos, 9, reason)
    assert await scheduled(nats_server) == 0


async def test_a_client_of_3_1_1_is_told_of_a_denial_by_nothing(delaying: InProcess, nats_server: NatsServer) -> None:
    async with await RawClient.connect(delaying.port, "old") as old:
        for qos in (0, 1, 2):
            await old.deliver("$delayed/1/secret/x", b"", qos)
        assert await scheduled(nats_server) == 0
        old.publish("$delayed/x/y", b"", 1)
        await old.expect_closed()


async def test_a_will_has_a_delay_of_its_own(delaying: InProcess) -> None:
    will = Will("$delayed/1/a", b"", 1, False)
    async with await RawClient5.connect5(delaying.port, "new", will=will, code=0x87) as new:
        await new.expect_closed()


@pytest.mark.parametrize(
    ("topic", "found"),
    [("$delayed/0/a", (0, "a")), ("$delayed/1000/a//b", (1000, "a//b")), ("$delayed/007/$x", (7, "$x"))],
)
def test_what_is_understood(topic: str, found: tuple[int, str]) -> None:
    assert parse(topic, 1000) == found


def test_digits_of_other_scripts_are_no_number() -> None:
    with pytest.raises(TopicNameInvalid):
        parse("$delayed/٣/a", 1000)


async def test_without_the_plugin_it_is_a_topic_like_others(start: Start) -> None:
    inside = start({})
    async with await RawClient.connect(inside.port, "c") as client:
        await client.subscribe("$delayed/#")
        client.publish("$delayed/1/a", b"x")
        await client.message("$delayed/1/a", b"x")


@pytest.mark.long
async def test_any_gateway_publishes_what_is_due_when_the_others_are_gone(
    start: Start, nats_server: NatsServer
) -> None:
    """One that has no such plugin, after the one that had it has ended; the session of a reader has moved there."""
    first = start({"delayed": {}})
    async with await RawClient5.connect5(first.port, "mover", session_expiry_interval=500) as mover:
        await mover.subscribe("moved/#", qos=2)
        for qos in (1, 2):
            await mover.deliver(f"$delayed/3/moved/{qos}", b"%d" % qos, qos)
    first.stop()
    second = start({})
    async with await RawClient5.connect5(second.port, "mover", clean=False, session_expiry_interval=500) as mover:
        bodies = set()
        for _ in range(2):
            message = (await mover.messages(1, LONG))[0]
            bodies.add((message.payload, message.qos))
            await mover.complete(message)
        assert bodies == {(b"1", 1), (b"2", 2)}
        await mover.quiet()
        await mover.disconnect5(session_expiry_interval=0)


async def test_a_release_that_is_repeated_elsewhere_is_one_message(start: Start, nats_server: NatsServer) -> None:
    """PUBREC has come, then the gateway is gone; the next one gets PUBREL. And a timer that comes twice is one, too."""
    first, second = start({"delayed": {}}), start({"delayed": {}})
    async with await RawClient.connect(second.port, "reader") as reader:
        await reader.subscribe("once", qos=2)
        async with await RawClient5.connect5(first.port, "p", session_expiry_interval=500) as publisher:
            number = publisher.publish5("$delayed/1/once", b"x", 2)
            await publisher.expect_ack(PUBREC, number)
        assert await scheduled(nats_server) == 0  # nothing yet
        async with await RawClient5.connect5(second.port, "p", clean=False, session_expiry_interval=500) as publisher:
            publisher.ack(PUBREL, number)
            await publisher.expect_ack(PUBCOMP, number)
            await publisher.disconnect5(session_expiry_interval=0)
        message = (await reader.messages(1, LONG))[0]
        assert (message.payload, message.qos) == (b"x", 2)
        await reader.complete(message)
        await reader.quiet()


@pytest.fixture
def fired(delaying: InProcess, monkeypatch: pytest.MonkeyPatch) -> list[FiredTimer]:
    """The timers that the gateway has dealt with, and removes."""
    found: list[FiredTimer] = []
    timers = delaying.account.services.streams.timers
    done = timers.done

    async def keep(timer: FiredTimer) -> bool:
        found.append(timer)
        return await done(timer)

    monkeypatch.setattr(timers, "done", keep)
    return found


async def test_a_timer_that_comes_again_is_not_published_again(delaying: InProcess, fired: list[FiredTimer]) -> None:
    """The gateway publishes, and dies before it has removed the timer: another one gets it, here by hand."""
    async with (
        await RawClient.connect(delaying.port, "reader") as reader,
        await RawClient.connect(delaying.port, "keeper", clean=False) as keeper,
        await RawClient.connect(delaying.port, "w") as writer,
    ):
        for one in (reader, keeper):
            await one.subscribe("again", qos=2)
        await writer.deliver("$delayed/0/again", b"x", 1)
        for one in (reader, keeper):
            message = (await one.messages(1, LONG))[0]
            await one.complete(message)
        await aeventually(lambda: fired, LONG)
        tokens = fired[0].ack.split(".")
        assert tokens[4] == "1"
        tokens[4] = "2"
        again = fired[0]._replace(ack=".".join(tokens))
        delaying.run(scheduling.message_due(delaying.account.ingress, again))
        for one in (reader, keeper):
            await one.quiet()
        async with await RawClient.connect(delaying.port, "keeper"):
            pass


@pytest.mark.parametrize("newer", [False, True], ids=["it was not retained", "something newer is"])
@pytest.mark.parametrize("payload", [b"x", b""], ids=["message", "removal"])
async def test_what_was_published_is_retained_by_the_next_gateway(
    delaying: InProcess, fired: list[FiredTimer], newer: bool, payload: bytes
) -> None:
    """The gateway has published it, and dies before the copy that is to be retained is stored.

    [MQTT-3.3.1-5] (3.1.1, 5.0)
    """
    topic = f"kept-{newer}-{payload.decode()}"
    async with await RawClient.connect(delaying.port, "w") as writer:
        await writer.deliver(topic, b"older", 1, retain=True)
        await writer.deliver(f"$delayed/0/{topic}", payload, 1)
        await aeventually(lambda: fired, LONG)
        if newer:
            await writer.deliver(topic, b"newer", 1, retain=True)
        tokens = fired[0].ack.split(".")
        tokens[4] = "2"
        headers = fired[0].headers.replace(b"Nmqtt-Pub:", b"Nmqtt-Retain:1\r\nNmqtt-Pub:", 1)
        again = fired[0]._replace(ack=".".join(tokens), headers=headers)
        delaying.run(scheduling.message_due(delaying.account.ingress, again))
        await writer.subscribe(topic, qos=2)
        if newer or payload:
            await writer.receive(topic, b"newer" if newer else payload, qos=1, retain=True)
        await writer.quiet()
        await writer.unsubscribe(topic)
        await writer.deliver(topic, b"", 1, retain=True)


async def test_what_is_scheduled_survives_the_kill_of_all(
    nats_factory: Callable[..., NatsServer], start: Start
) -> None:
    """nats-server is killed too; the time passes while nobody runs."""
    server = nats_factory()
    first = start({"delayed": {}}, url=server.url)
    async with await RawClient5.connect5(first.port, "mover", session_expiry_interval=500) as mover:
        await mover.subscribe("k", qos=1)
        await mover.deliver("$delayed/1/k", b"x", 2)
    first.stop()
    server.kill()
    await asyncio.sleep(1.5)
    server.start()
    second = start({}, url=server.url)

    async def received() -> Publish | None:
        """None while nats-server, just started, has consumers that cannot be moved yet: the client is sent away."""
        async with await RawClient5.connect5(second.port, "mover", clean=False, session_expiry_interval=500) as mover:
            packet = await mover.packet(LONG)
            if not isinstance(packet, Publish):
                return None
            await mover.complete(packet)
            await mover.quiet()
            return packet

    message = await aeventually(received, LONG)
    assert (message.payload, message.qos) == (b"x", 1)
