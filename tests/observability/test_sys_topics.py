# SPDX-License-Identifier: Apache-2.0
"""`$SYS` topics of two gateways."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import orjson
import pytest
from nats.aio.client import Client as NatsClient

from mqtt_nats.codec import PINGREQ, Ack, PingResp, Publish, ReasonCode
from mqtt_nats.config.settings import Settings
from mqtt_nats.observability import sys_topics
from tests.harness.fence import fence
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually

Pair = tuple[InProcess, InProcess]


async def values(client: RawClient) -> dict[str, str]:
    """The last values of all that has been sent to a client until now."""
    found: dict[str, str] = {}
    client.write(PINGREQ)
    while not isinstance(packet := await client.packet(), PingResp):
        assert isinstance(packet, Publish)
        found[topic_of(packet)] = packet.payload.decode()
    return found


def tick(*gateways: InProcess) -> None:
    for one in gateways:
        one.run(one.account.ingress.system.tick(60.0))


async def both_known(pair: Pair) -> None:
    """Wait until each gateway knows of the other."""
    for one in pair:
        await aeventually(partial(_knows_two, one))


def _knows_two(one: InProcess) -> bool:
    return len(one.call(one.account.ingress.system.values)["$SYS/brokers"].split(",")) == 2


async def test_the_last_values_are_there_at_once(pair: Pair, name: str) -> None:
    await both_known(pair)
    async with await RawClient.connect(pair[0].port, name) as client:
        await client.subscribe("$SYS/#")
        first = await client.expect(Publish)
        assert first.retain
        found = await values(client) | {topic_of(first): first.payload.decode()}
        ids = sorted(one.account.services.identity.id for one in pair)
        assert found["$SYS/brokers"] == ",".join(ids)
        assert {f"$SYS/brokers/{one}/sysdescr" for one in ids} <= found.keys()
        assert found["$SYS/broker/version"].startswith("mqtt-nats version ")
        assert found["$SYS/broker/uptime"].endswith(" seconds")
        await client.subscribe("$SYS/broker/uptime")
        packet = await client.expect(Publish)
        assert (topic_of(packet), packet.retain) == ("$SYS/broker/uptime", True)


async def test_reports_of_many_gateways_are_read_where_a_client_wants_them(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await both_known(pair)
    monkeypatch.setattr(sys_topics, "GATEWAYS_READ_MOST", 0)
    first = pair[0].account.ingress.system
    stored = "$SYS/broker/messages/stored"

    def known() -> int:
        return len(pair[0].call(first.values)["$SYS/brokers"].split(","))

    tick(*pair)
    assert known() == 1, "nobody wants the values: the other gateway's report is not read"
    assert stored not in pair[0].call(first.values), "nor are the streams asked for their sizes"
    async with await RawClient.connect(pair[0].port, name) as client:
        await client.subscribe("$SYS/broker/clients/connected")
        assert (await client.expect(Publish)).retain
        await aeventually(lambda: known() == 2)
        async with await RawClient.connect(pair[1].port, name + "elsewhere"):
            tick(pair[1])
            await aeventually(lambda: pair[0].call(first.values)["$SYS/broker/clients/connected"] == "1")
            tick(pair[0])
            assert (await client.expect(Publish)).payload == b"2"
            assert stored in pair[0].call(first.values)
    await aeventually(lambda: not pair[0].account.registry.connections)
    tick(pair[0])
    assert known() == 1
    monkeypatch.undo()
    for one in pair:
        one.call(one.account.ingress.system._ask)
    await both_known(pair)


@pytest.mark.parametrize("topic", ["$SYS/broker/messages/stored", "$SYS/brokers/{}/stats/retained/count"])
async def test_only_the_size_of_a_stream_is_wanted_of_many_gateways(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    """A gateway that has not read the sizes has no value of the topic, but a client that wants it."""
    await both_known(pair)
    monkeypatch.setattr(sys_topics, "GATEWAYS_READ_MOST", 0)
    tick(*pair)
    topic = topic.format(pair[0].account.services.identity.id)
    async with await RawClient.connect(pair[0].port, name) as client:
        await client.subscribe(topic)
        for _ in range(2):
            tick(pair[0])
            assert topic_of(await client.expect(Publish)) == topic
    monkeypatch.undo()
    for one in pair:
        one.call(one.account.ingress.system._ask)
    await both_known(pair)


async def test_sums_over_gateways(pair: Pair, name: str) -> None:
    async with (
        await RawClient.connect(pair[0].port, name, clean=False) as one,
        await RawClient.connect(pair[1].port, f"{name}-2") as two,
        await RawClient.connect(pair[1].port, f"{name}-3") as three,
    ):
        before = int(pair[0].call(pair[0].account.ingress.system.values)["$SYS/broker/publish/messages/received"])
        await two.deliver_all(f"{name}/a", [b"x"] * 5, 1)
        await three.deliver_all(f"{name}/a", [b"x"] * 2, 0)
        await one.subscribe("$SYS/broker/+/+", "$SYS/broker/publish/messages/received")

        async def summed() -> bool:
            tick(pair[1], pair[0])
            found = await values(one)
            return (
                found["$SYS/broker/clients/connected"] == "3"
                and int(found["$SYS/broker/publish/messages/received"]) >= before + 7
                and int(found["$SYS/broker/messages/stored"]) >= 5
                and int(found["$SYS/broker/clients/total"]) >= 3
            )

        await aeventually(summed)


async def test_another_gateways_topics_come_through_nats(pair: Pair, name: str, nats_client: NatsClient) -> None:
    first, second = pair
    read = await nats_client.subscribe(f"$MQTT_SYS.brokers.{second.account.services.identity.id}.>")
    await fence(nats_client)
    async with await RawClient.connect(first.port, name) as client:
        topic = f"$SYS/brokers/{second.account.services.identity.id}/version"
        await client.subscribe(topic)
        await client.expect(Publish)  # as it was
        tick(second)
        packet = await client.expect(Publish)
        assert (topic_of(packet), packet.retain) == (topic, False)
        assert (await read.next_msg(30)).subject.startswith(f"$MQTT_SYS.brokers.{second.account.services.identity.id}.")
        tick(first)  # nobody has it twice
        await client.quiet()


@pytest.mark.parametrize("retain", [False, True])
async def test_clients_do_not_publish_on_them(pair: Pair, name: str, retain: bool) -> None:
    """Also where gateways have published on them before."""
    async with (
        await RawClient.connect(pair[0].port, f"{name}-watcher") as watcher,
        await RawClient5.connect5(pair[0].port, name) as client,
    ):
        await watcher.subscribe(
            "$SYS/broker/clients/connected", f"$SYS/brokers/{pair[1].account.services.identity.id}/version"
        )
        tick(*pair)
        await watcher.expect(Publish)
        for topic in ("$SYS/broker/clients/connected", f"$SYS/brokers/{pair[1].account.services.identity.id}/version"):
            client.publish5(topic, b"forged", 1, retain=retain, packet_id=1)
            assert (await client.expect(Ack)).reason == ReasonCode.NOT_AUTHORIZED
        assert "forged" not in (await values(watcher)).values()


async def test_wildcards_at_the_first_level_do_not_match(pair: Pair, name: str) -> None:
    """[MQTT-4.7.2-1] (3.1.1, 5.0)"""
    async with await RawClient.connect(pair[0].port, name) as client:
        await client.subscribe("#", "+/broker/uptime", "+/#")
        tick(*pair)
        await client.quiet()


async def test_clients_cannot_publish_there(pair: Pair, name: str) -> None:
    async with await RawClient5.connect5(pair[0].port, name) as client:
        identifier = client.publish("$SYS/broker/uptime", b"for ever", 1)
        ack = await client.expect(Ack)
        assert (ack.packet_id, ack.reason) == (identifier, ReasonCode.NOT_AUTHORIZED)


@pytest.mark.long
async def test_a_gateway_that_is_not_heard_of_is_forgotten(pair: Pair, nats_client: NatsClient) -> None:
    first, _ = pair
    heard = await nats_client.subscribe("$MQTT.gateways.report")
    await fence(nats_client)
    tick(first)
    report = orjson.loads((await heard.next_msg(30)).data)

    def names() -> str:
        return first.call(first.account.ingress.system.values)["$SYS/brokers"]

    for broken in (
        b"",
        b"[]",
        b"{}",
        b'{"id": 1}',
        b'{"id": "ghost"}',
        orjson.dumps(report | {"id": "ghost", "sent": 0}),
    ):
        await nats_client.publish("$MQTT.gateways.report", broken)
    await nats_client.publish("$MQTT.gateways.report", orjson.dumps(report | {"id": "spirit", "interval": 1.0}))
    await aeventually(lambda: "spirit" in names())
    assert "ghost" not in names()
    await aeventually(lambda: "spirit" not in names())


async def test_a_gateway_that_ends_is_forgotten_at_once(pair: Pair, nats_server: NatsServer) -> None:
    first, _ = pair
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), sys_interval=3600)
    with running(settings) as third:
        identity = third.account.services.identity.id
        await aeventually(lambda: identity in first.call(first.account.ingress.system.values)["$SYS/brokers"])
        # What the newcomer has missed it is told.
        await aeventually(
            lambda: (
                first.account.services.identity.id in third.call(third.account.ingress.system.values)["$SYS/brokers"]
            )
        )
    await aeventually(lambda: identity not in first.call(first.account.ingress.system.values)["$SYS/brokers"])


async def test_they_can_be_turned_off(
    nats_server: NatsServer, name: str, nats_client: NatsClient, readers: Path
) -> None:
    read = await nats_client.subscribe("$MQTT.presence.>")
    await fence(nats_client)
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), sys_interval=0, presence=False, acl_file=readers)
    with running(settings) as gateway:
        async with await RawClient.connect(gateway.port, name) as client:
            assert await client.subscribe("$SYS/#") == (0,)
            await client.quiet()
            await client.disconnect()
    await nats_client.publish("$MQTT.presence.end", b"")
    assert (await read.next_msg(30)).subject == "$MQTT.presence.end"


@pytest.mark.parametrize(("topics", "code"), [("#", 0x80), ("$SYS/broker/#", 0)])
async def test_rules_have_to_name_them(
    nats_server: NatsServer, name: str, tmp_path_factory: pytest.TempPathFactory, topics: str, code: int
) -> None:
    file = tmp_path_factory.mktemp("acl") / "acl.toml"
    file.write_text(f'[[rules]]\neffect = "allow"\ntopics = "{topics}"\n', encoding="utf-8")
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), acl_file=file, sys_interval=3600)
    with running(settings) as gateway:
        async with await RawClient.connect(gateway.port, name) as client:
            assert await client.subscribe("$SYS/broker/uptime") == (code,)
