# SPDX-License-Identifier: Apache-2.0
"""UNSUBSCRIBE from a shared subscription while messages are not acknowledged, and the end of the connection then.

The messages are completed with the same client when it returns, or another member gets them at once.
"""

from __future__ import annotations

from collections import Counter

import pytest

from mqtt_nats.codec import Publish, Subscription
from mqtt_streams.hashing import name_hash
from mqtt_streams.shared import assigned_subjects
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, RawClient
from tests.integration.conftest import Connector, Connector5, Stored, until
from tests.integration.test_shared import all_of, distinct

COUNT = 6

AT_ONCE = 12.0
"""Seconds: far less than the 30 after which nats-server delivers again what nobody has acknowledged."""

VERSIONS = pytest.mark.parametrize("version", [4, 5], ids=["3.1.1", "5.0"])


class Worker:
    """A client that takes work from a group, in either version of the protocol."""

    def __init__(self, connect: Connector, connect5: Connector5, version: int, name: str, *, durable: bool) -> None:
        self._connect, self._connect5 = connect, connect5
        self.version, self.name, self.durable = version, name, durable

    async def start(self, to: Gateway | None = None, *, again: bool = False) -> RawClient:
        """Connect; ``again``: the session is there."""
        clean = not self.durable or not again
        if self.version == 5:
            expiry = 300 if self.durable else 0
            client: RawClient = await self._connect5(self.name, clean=clean, to=to, session_expiry_interval=expiry)
        else:
            if self.durable and not again:
                clean = False
            client = await self._connect(self.name, clean=clean, to=to)
        assert client.session_present == again
        return client


async def working(
    worker: Worker, publisher: RawClient, text: str, topic: str, qos: int
) -> tuple[RawClient, list[Publish]]:
    """A worker that has got `COUNT` messages, has acknowledged none, and has sent UNSUBSCRIBE."""
    client = await worker.start()
    await client.subscribe(text, qos=qos)
    await publisher.deliver_all(topic, [b"%d" % number for number in range(COUNT)], qos)
    sent = await client.messages(COUNT)
    await client.unsubscribe(text)
    return client, sent


async def nothing_owed(stored: Stored, name: str) -> None:
    """Wait until nothing is stored any more that a client has to complete."""

    async def gone() -> None:
        assert not await stored.count("$MQTT_shared", assigned_subjects(name_hash(name)))
        assert "pubrels" not in await stored.traces(name)
        assert "ended" not in (await stored.record(name))["v5"]

    await until(gone)


async def end(client: RawClient, how: str) -> None:
    """End a connection."""
    if how == "disconnect":
        await client.disconnect()
    elif how == "close":  # what was sent before is read
        client.half_close()
        await client.expect_closed()
    else:
        client.drop()


@VERSIONS
@pytest.mark.parametrize("how", ["disconnect", "drop"])
@pytest.mark.parametrize("qos", [1, 2])
async def test_alone(
    connect: Connector,
    connect5: Connector5,
    name: str,
    second_gateway: Gateway,
    stored: Stored,
    version: int,
    how: str,
    qos: int,
) -> None:
    """What was sent comes again under its identifiers, at any gateway, until it is acknowledged, and then no more."""
    worker = Worker(connect, connect5, version, name, durable=True)
    publisher = await connect5(f"{name}-publisher")
    client, sent = await working(worker, publisher, f"$share/group/{name}", name, qos)
    await end(client, how)
    await publisher.deliver(name, b"nobody has subscribed", qos)
    client = await worker.start(second_gateway, again=True)
    for one in sent:
        await client.message(name, one.payload, qos=qos, dup=True, packet_id=one.packet_id)
    client.drop()
    client = await worker.start(again=True)
    for one in sent:
        await client.message(name, one.payload, qos=qos, dup=True, packet_id=one.packet_id)
        await client.complete(one)
    await nothing_owed(stored, name)
    await end(client, how)
    client = await worker.start(second_gateway, again=True)
    await client.quiet()


@VERSIONS
@pytest.mark.parametrize("how", ["disconnect", "close"])
async def test_some_are_acknowledged(
    connect: Connector, connect5: Connector5, name: str, stored: Stored, version: int, how: str
) -> None:
    """After UNSUBSCRIBE, and at once before the connection ends: these do not come again."""
    worker = Worker(connect, connect5, version, name, durable=True)
    publisher = await connect5(f"{name}-publisher")
    client, sent = await working(worker, publisher, f"$share/group/{name}", name, 1)
    client.ack(PUBACK, sent[1].packet_id)
    await client.quiet()
    client.ack(PUBACK, sent[3].packet_id, sent[4].packet_id)
    await end(client, how)
    left = (sent[0], sent[2], sent[5])

    async def forgotten() -> None:
        named = (await stored.record(name))["v5"]["ended"][f"$share/group/{name}"]["sent"]
        assert [packet_id for packet_id, _ in named] == [one.packet_id for one in left]
        assert (await stored.traces(name)).get("timers"), "the deadline is set after that write"

    await until(forgotten)
    client = await worker.start(again=True)
    for one in left:
        await client.message(name, one.payload, qos=1, dup=True, packet_id=one.packet_id)
    await client.quiet()


@VERSIONS
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "regular"])
@pytest.mark.parametrize("how", ["disconnect", "drop"])
async def test_with_another_member(
    connect: Connector,
    connect5: Connector5,
    name: str,
    second_gateway: Gateway,
    version: int,
    durable: bool,
    how: str,
) -> None:
    """It gets at once what was not acknowledged; the client that has left does not get that again."""
    text = f"$share/group/{name}"
    worker = Worker(connect, connect5, version, name, durable=durable)
    publisher = await connect5(f"{name}-publisher")
    client = await worker.start()
    await client.subscribe(text, qos=1)
    await publisher.deliver_all(name, [b"%d" % number for number in range(COUNT)], 1)
    sent = await client.messages(COUNT)
    other = await connect5(f"{name}-other", to=second_gateway)
    await other.subscribe(text, qos=1)
    await client.unsubscribe(text)
    client.ack(PUBACK, sent[0].packet_id)
    await other.quiet()
    await end(client, how)
    got = await other.messages(COUNT - 1, timeout=AT_ONCE)
    assert Counter(one.payload for one in got) == Counter(one.payload for one in sent[1:])
    other.ack(PUBACK, *(one.packet_id for one in got))
    if durable:
        client = await worker.start(second_gateway, again=True)
        await client.quiet()
    await other.quiet()


@pytest.mark.parametrize("qos", [1, 2])
async def test_qos_2_comes_to_one_client_alone(
    connect5: Connector5, name: str, second_gateway: Gateway, qos: int
) -> None:
    """QoS 2 belongs to the client that has left, also when it comes back later; QoS 1 does not."""
    text = f"$share/group/{name}"
    client = await connect5(name, session_expiry_interval=300)
    await client.subscribe(text, qos=qos)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(name, [b"%d" % number for number in range(COUNT)], qos)
    sent = await client.messages(COUNT)
    other = await connect5(f"{name}-other", to=second_gateway)
    await other.subscribe(text, qos=qos)
    await client.unsubscribe(text)
    client.drop()
    found = await all_of([other], COUNT if qos == 1 else 0)
    again = await connect5(name, clean=False, session_expiry_interval=300)
    found += [await again.messages(COUNT)] if qos == 2 else []
    assert distinct(found) == Counter(one.payload for one in sent)
    await again.quiet()


@VERSIONS
@pytest.mark.parametrize("qos", [1, 2])
async def test_the_gateway_is_killed(
    connect: Connector,
    connect5: Connector5,
    name: str,
    second_gateway: Gateway,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
    version: int,
    qos: int,
) -> None:
    """UNSUBACK says that the messages are stored with the session."""
    doomed = gateway_factory(nats_server)
    text = f"$share/group/{name}"
    worker = Worker(connect, connect5, version, name, durable=True)
    publisher = await connect5(f"{name}-publisher")
    client = await worker.start(doomed)
    await client.subscribe(text, qos=qos)
    await publisher.deliver_all(name, [b"%d" % number for number in range(COUNT)], qos)
    sent = await client.messages(COUNT)
    await client.unsubscribe(text)
    doomed.kill()
    client = await worker.start(second_gateway, again=True)
    for one in sent:
        await client.message(name, one.payload, qos=qos, dup=True, packet_id=one.packet_id)
        await client.complete(one)
    await client.quiet()


async def test_a_later_member_begins_anew(connect5: Connector5, name: str, second_gateway: Gateway) -> None:
    """It gets what is published after its SUBSCRIBE; what was sent before stays with the client that had it."""
    text = f"$share/group/{name}"
    client = await connect5(name, session_expiry_interval=300)
    publisher = await connect5(f"{name}-publisher")
    await client.subscribe5(Subscription(text, 1, retain_as_published=True), subscription_identifier=[9])
    publisher.publish5(name, b"sent", 1, retain=True)
    await publisher.packet()
    sent = await client.message(name, b"sent", retain=True)
    assert sent.properties == {"subscription_identifier": [9]}
    await client.unsubscribe(text)
    client.drop()
    await publisher.deliver(name, b"nobody has subscribed", 1)
    later = await connect5(f"{name}-later", to=second_gateway)
    await later.subscribe(text, qos=1)
    await publisher.deliver(name, b"later", 1)
    await later.receive(name, b"later")
    again = await connect5(name, clean=False, session_expiry_interval=300, to=second_gateway)
    got = await again.receive(name, b"sent", retain=True, dup=True)
    assert got.properties == {"subscription_identifier": [9]}
    await later.quiet()
    await again.quiet()


async def test_the_client_subscribes_again(connect5: Connector5, name: str) -> None:
    """The identifiers stay in use meanwhile; what was sent before and after comes again, each once."""
    text = f"$share/group/{name}"
    client = await connect5(name, session_expiry_interval=300)
    publisher = await connect5(f"{name}-publisher")
    await client.subscribe(text, qos=1)
    await publisher.deliver(name, b"before", 1)
    before = await client.message(name, b"before")
    await client.unsubscribe(text)
    await client.subscribe(text, qos=1)
    await publisher.deliver(name, b"after", 1)
    after = await client.message(name, b"after")
    assert after.packet_id != before.packet_id
    client.drop()
    again = await connect5(name, clean=False, session_expiry_interval=300)
    got = {one.payload: one for one in await again.messages(2)}
    assert got[b"before"].dup
    assert got[b"before"].packet_id == before.packet_id
    again.ack(PUBACK, *(one.packet_id for one in got.values()))
    await again.quiet()


async def test_qos_2_is_released_after_the_group_has_ended(connect5: Connector5, name: str, stored: Stored) -> None:
    """No record is left when the exchanges are complete."""
    client = await connect5(name, session_expiry_interval=300)
    publisher = await connect5(f"{name}-publisher")
    text = f"$share/group/{name}"
    await client.subscribe(text, qos=2)
    await publisher.deliver_all(name, [b"0", b"1"], 2)
    sent = await client.messages(2)
    await client.unsubscribe(text)
    for one in sent:
        await client.complete(one)
    await nothing_owed(stored, name)
