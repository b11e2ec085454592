# SPDX-License-Identifier: Apache-2.0
"""Sessions whose position is in records: they have no consumers while the shared reader serves them, or are absent."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from nats.aio.msg import Msg

from mqtt_nats.codec import Publish, Suback, Subscribe, Subscription
from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory, _gateway_factory
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.integration.conftest import Connector, Connector5, Stored, position, until
from tests.integration.resuming import expect_rest, left, mixed_window, received

PUBACK, PUBREC, PUBREL, PUBCOMP = 4, 5, 6, 7
RECORDS = ("--session-positions", "records")


def _started(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory, *arguments: str) -> Iterator[Gateway]:
    with _gateway_factory(tmp_path_factory.mktemp("gateway")) as start:
        yield start(nats_server, *arguments)


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose sessions have no consumers."""
    yield from _started(nats_server, tmp_path_factory, *RECORDS)


@pytest.fixture(scope="module")
def other(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One more."""
    yield from _started(nats_server, tmp_path_factory, *RECORDS)


@pytest.fixture(scope="module")
def keeping(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One whose sessions have consumers."""
    yield from _started(nats_server, tmp_path_factory)


async def consumerless(stored: Stored, client_id: str, count: int = 1) -> None:
    """Wait until a session is served by the shared reader, and has no consumer."""

    async def none() -> None:
        at = await position(stored.js, client_id)
        assert (len(at.live), at.clean) == (count, False)
        assert not await stored.session_consumers(client_id)

    await until(none)


async def absent(stored: Stored, client_id: str) -> None:
    """Wait until a session was left in order, and has no consumer."""

    async def left() -> None:
        at = await position(stored.js, client_id)
        assert at.clean
        assert at.live
        assert not await stored.session_consumers(client_id)

    await until(left)


class Created:
    """Consumers of messages that were created since."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def note(self, message: Msg) -> None:
        self.names.append(message.subject.rpartition(".")[2])

    def of(self, client_id: str) -> list[str]:
        """Those of a session."""
        return [one for one in self.names if one.startswith(f"{name_hash(client_id)}_")]


async def created(stored: Stored) -> Created:
    """From now on."""
    found = Created()
    await stored.nats.subscribe("$JS.EVENT.ADVISORY.CONSUMER.CREATED.$MQTT_msgs.*", cb=found.note)
    await fence(stored.nats)
    return found


async def version(stored: Stored, client_id: str) -> int:
    found: int = (await stored.record(client_id))["v5"]["version"]
    return found


@pytest.mark.parametrize("goes", ["here", "other", "keeping"])
@pytest.mark.parametrize("qos", [1, 2])
async def test_what_waits_for_an_absent_client_comes(
    connect: Connector,
    name: str,
    stored: Stored,
    gateway: Gateway,
    other: Gateway,
    keeping: Gateway,
    qos: int,
    goes: str,
) -> None:
    """Once, in order and without DUP, at whichever gateway; only gateways with consumers make some."""
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/#", qos=qos)
    await consumerless(stored, name, 2)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(f"{name}/a", b"present", qos)
    await client.complete(*(await received(client, 1)))
    await client.disconnect()
    await absent(stored, name)
    payloads = [b"%d" % number for number in range(5)]
    await publisher.deliver_all(f"{name}/a", payloads, qos)
    to = {"here": gateway, "other": other, "keeping": keeping}[goes]
    new = await created(stored)
    client = await connect(name, clean=False, to=to)
    got = await received(client, 5)
    assert [(one.payload, one.dup) for one in got] == [(payload, False) for payload in payloads]
    for one in got:
        await client.complete(one)
    if goes in ("here", "other"):
        await consumerless(stored, name, 2)
        assert new.of(name) == []
    else:
        assert len(await stored.session_consumers(name)) == 2
    await publisher.deliver(f"{name}", b"later", qos)
    (one,) = await received(client, 1)
    assert one.payload == b"later"
    await client.complete(one)
    await client.quiet()
    await stored.settled(name)


async def test_a_session_gets_consumers_and_loses_them_again(
    connect: Connector, name: str, stored: Stored, keeping: Gateway
) -> None:
    """By the gateway that it is resumed at."""
    publisher = await connect(f"{name}-publisher")
    for number in range(4):
        client = await connect(name, clean=False, to=keeping if number % 2 else None)
        if not number:
            await client.subscribe(name, qos=1)
        else:
            (one,) = await received(client, 1)
            assert (one.payload, one.dup) == (b"%d" % number, False)
            await client.complete(one)
        if number % 2:
            await stored.live(name)
            assert len(await stored.session_consumers(name)) == 1
        else:
            await consumerless(stored, name)
        await client.disconnect()
        await left(stored, name)
        await publisher.deliver(name, b"%d" % (number + 1), 1)


@pytest.mark.parametrize(
    ("end", "goes"),
    [("lost", "near"), ("lost", "other"), ("lost", "keeping"), ("killed", "other"), ("killed", "keeping")],
)
async def test_window_of_mixed_states(
    connect: Connector,
    name: str,
    stored: Stored,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
    other: Gateway,
    keeping: Gateway,
    end: str,
    goes: str,
) -> None:
    """Of six QoS 2 messages two are complete, two are released, two not acknowledged at all [MQTT-4.4.0-1]."""
    near = gateway_factory(nats_server, *RECORDS)
    client = await connect(name, clean=False, to=near)
    await client.subscribe(name, qos=2)
    await consumerless(stored, name)
    publisher = await connect(f"{name}-publisher", to=other)
    ids = await mixed_window(client, publisher, stored, name)
    if end == "killed":
        near.kill()
    client.drop()
    if end == "lost":
        await absent(stored, name)
    await publisher.deliver(name, b"new", 2)
    new = await created(stored)
    client = await connect(name, clean=False, to={"near": near, "other": other, "keeping": keeping}[goes])
    await expect_rest(client, ids, killed=end == "killed")
    await stored.settled(name)
    assert len(new.of(name)) == (goes == "keeping")


async def test_a_session_that_has_missed_nothing(connect: Connector, name: str, stored: Stored) -> None:
    """It is resumed without a consumer, again and again."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    await consumerless(stored, name)
    publisher = await connect(f"{name}-publisher")
    for number in range(3):
        await client.disconnect()
        await absent(stored, name)
        await publisher.deliver(f"{name}/not", b"", 1)
        new = await created(stored)
        client = await connect(name, clean=False)
        await consumerless(stored, name)
        await publisher.deliver(name, b"%d" % number, 1)
        (one,) = await received(client, 1)
        assert (one.payload, one.dup) == (b"%d" % number, False)
        await client.complete(one)
        await stored.settled(name)
        assert new.of(name) == []


async def test_window_of_a_session_that_catches_up(connect5: Connector5, name: str, stored: Stored) -> None:
    """What it has missed comes at the pace of the client; it leaves in between, and loses nothing."""
    options: dict[str, Any] = {"clean": False, "session_expiry_interval": 300, "receive_maximum": 5}
    client = await connect5(name, **options)
    await client.subscribe5(Subscription(f"{name}/+", 2), Subscription(f"{name}/a", 1))
    await consumerless(stored, name, 2)
    await client.disconnect()
    await absent(stored, name)
    publisher = await connect5(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(60)]
    await publisher.deliver_all(f"{name}/a", payloads, 2)
    got: list[bytes] = []
    sent = 0
    for most in (7, 20, 60):
        client = await connect5(name, **options)
        while len(got) < most:
            (one,) = await received(client, 1)
            assert (one.qos, one.dup) == (2, len(got) < sent)
            got.append(one.payload)
            await client.complete(one)
        sent = min(most + 5, 60)
        if most < 60:
            await client.messages(5)
            client.drop()
            await absent(stored, name)
    assert got == payloads
    await client.quiet()
    await stored.settled(name)
    await consumerless(stored, name, 2)


async def test_client_that_falls_behind(connect: Connector, name: str, stored: Stored) -> None:
    """It gets no consumer: it reads when its client has taken what waits, and goes on with the shared reader."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    await consumerless(stored, name)
    publisher = await connect(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(4400)]
    for start in range(0, 4400, 200):
        await publisher.deliver_all(name, payloads[start : start + 200], 1)

    last = await stored.last_sequence()

    async def behind() -> None:
        found = await position(stored.js, name)
        assert found.live
        assert found.reached < last

    await until(behind)
    assert not await stored.session_consumers(name)
    got: list[Publish] = []
    while len(got) < len(payloads):
        (one,) = await received(client, 1)
        got.append(one)
        await client.complete(one)
    assert [one.payload for one in got] == payloads
    assert not any(one.dup for one in got)
    await client.quiet()
    await consumerless(stored, name)
    await stored.settled(name)


async def test_limit_of_what_waits_for_an_absent_client(
    connect: Connector, name: str, stored: Stored, nats_server: NatsServer, gateway_factory: GatewayFactory
) -> None:
    """No consumer counts what waits, or brings it."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    await consumerless(stored, name)
    await client.disconnect()
    await absent(stored, name)
    publisher = await connect(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(60)]
    await publisher.deliver_all(name, payloads, 1)
    limited = gateway_factory(nats_server, *RECORDS, "--max-backlog", "5")
    client = await connect(name, clean=False, to=limited)
    got = await received(client, 5)
    assert [one.payload for one in got] == payloads[-5:]
    assert not await stored.session_consumers(name)
    for one in got:
        await client.complete(one)
    await client.quiet()
    await stored.settled(name)


async def test_overlapping_subscriptions(connect: Connector, name: str, stored: Stored) -> None:
    """One message, once, at the highest QoS [MQTT-3.3.5-1]; one of the subscriptions ends."""
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/a", qos=1)
    await consumerless(stored, name)
    await client.subscribe(f"{name}/+", qos=2)
    await consumerless(stored, name, 2)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(f"{name}/a", b"1", 2)
    (one,) = await received(client, 1)
    assert (one.payload, one.qos) == (b"1", 2)
    await client.complete(one)
    await client.disconnect()
    await absent(stored, name)
    await publisher.deliver(f"{name}/a", b"2", 2)
    client = await connect(name, clean=False)
    (one,) = await received(client, 1)
    assert (one.payload, one.qos, one.dup) == (b"2", 2, False)
    await client.complete(one)
    await client.unsubscribe(f"{name}/a")
    await consumerless(stored, name)
    await publisher.deliver(f"{name}/a", b"3", 2)
    (one,) = await received(client, 1)
    assert (one.payload, one.qos) == (b"3", 2)
    await client.complete(one)
    await client.quiet()
    await stored.settled(name)


async def test_lowered_to_qos_0(connect: Connector, name: str, stored: Stored) -> None:
    """What the client has yet to acknowledge is completed; what follows comes from core NATS [MQTT-3.8.4-3]."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    await consumerless(stored, name)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"1", 1)
    (one,) = await received(client, 1)
    await client.subscribe(name, qos=0)
    await publisher.deliver(name, b"2", 1)
    (last,) = await received(client, 1)
    assert (last.payload, last.qos) == (b"2", 0)
    await client.complete(one)
    await client.quiet()
    await stored.settled(name)
    assert not await stored.session_consumers(name)


async def test_raised_from_qos_0(connect: Connector, name: str, stored: Stored) -> None:
    """The reader serves the subscription from the start, and what core NATS has brought does not come again."""
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/+", qos=0)
    publisher = await connect(f"{name}-publisher")
    new = await created(stored)
    for qos, payload in enumerate([b"0", b"1", b"2"]):
        await client.subscribe(f"{name}/{'+' if qos != 1 else '#'}", qos=qos)
        await publisher.deliver(f"{name}/a", payload, 2)
        (one,) = await received(client, 1)
        assert (one.payload, one.qos) == (payload, qos)
        await client.complete(one)
    await client.quiet()
    assert new.of(name) == []


async def test_lowered_while_messages_wait(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, other: Gateway
) -> None:
    """[MQTT-3.8.4-4] (5.0): the reader brings the rest at the QoS from before, also at the next gateway."""
    publisher = await connect5(f"{name}-publisher")
    resume = partial(connect5, name, clean=False, session_expiry_interval=60, receive_maximum=1)
    client = await resume()
    await client.subscribe(f"{name}/+", qos=1)
    await client.subscribe(f"{name}/#", qos=2)
    await consumerless(stored, name, 3)
    new = await created(stored)
    payloads = [b"%d" % number for number in range(8)]
    await publisher.deliver_all(f"{name}/a", payloads[:4], 2)
    first = await client.message(f"{name}/a", payloads[0], qos=2)
    await client.subscribe(f"{name}/#", qos=0)
    await publisher.deliver(f"{name}/a/b", b"by core NATS", 1)
    client.drop()
    client = await resume(to=other)
    again = await client.message(f"{name}/a", payloads[0], qos=2, dup=True)
    assert again.packet_id == first.packet_id
    await publisher.deliver_all(f"{name}/a", payloads[4:], 2)
    await publisher.deliver(f"{name}/a/b", b"new", 1)
    await client.complete(again)
    got = []
    for _ in range(8):
        got.append((await received(client, 1))[0])
        await client.complete(got[-1])
    stream = [(one.payload, one.qos) for one in got if one.payload != b"new"]
    assert stream == [(payload, 2 if payload < b"4" else 1) for payload in payloads[1:]]
    assert [one.qos for one in got if one.payload == b"new"] == [0]

    async def ended() -> None:
        assert not (await stored.record(name))["v5"].get("draining")

    await until(ended)
    assert new.of(name) == []


@pytest.mark.parametrize("moves", [False, True])
async def test_lowered_far_behind(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, other: Gateway, moves: bool
) -> None:
    """[MQTT-3.8.4-4] (5.0): more messages of another subscription than a window are before the last one of this one."""
    publisher = await connect5(f"{name}-publisher")
    resume = partial(connect5, name, clean=False, session_expiry_interval=60, receive_maximum=10)
    client = await resume()
    await client.subscribe(f"{name}/b", qos=1)
    await publisher.deliver(f"{name}-other", b"", 1)  # the other subscription begins later
    await client.subscribe(f"{name}/#", qos=1)
    client.drop()
    await absent(stored, name)
    payloads = [b"%d" % number for number in range(60)]
    await publisher.deliver_all(f"{name}/c", payloads[:-1], 1)
    await publisher.deliver(f"{name}/b", payloads[-1], 1)
    client = await resume()
    waiting = await client.messages(10)
    client.send(Subscribe(7, (Subscription(f"{name}/b", 0),)))
    await client.expect(Suback)
    if moves:
        client.drop()
        client = await resume(to=other)
        waiting = []
    got = [one.payload for one in waiting]
    for one in waiting:
        client.ack(PUBACK, one.packet_id)
    while len(got) < 60:
        (one,) = await client.messages(1)
        got.append(one.payload)
        client.ack(PUBACK, one.packet_id)
    assert got == payloads


async def test_a_replay_that_goes_on(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, other: Gateway
) -> None:
    """[MQTT-3.3.1-9] (5.0): retained messages that are left come before new ones, and a reader brings these."""
    publisher = await connect5(f"{name}-publisher")
    topics = [f"{name}/{number}" for number in range(5)]
    for topic in topics:
        await publisher.deliver(topic, b"retained", 1, retain=True)
    resume = partial(connect5, name, clean=False, session_expiry_interval=60, receive_maximum=1)
    client = await resume()
    new = await created(stored)
    await client.subscribe(f"{name}/+", qos=1)
    first = await client.message(topics[0], b"retained", qos=1)
    client.drop()
    await publisher.deliver(topics[0], b"new", 1)
    client = await resume(to=other)
    again = await client.message(topics[0], b"retained", qos=1, dup=True)
    assert again.packet_id == first.packet_id
    await client.complete(again)
    for topic in topics[1:]:
        await client.complete(await client.message(topic, b"retained", qos=1))
    await client.complete(await client.message(topics[0], b"new", qos=1))
    await client.quiet()
    assert new.of(name) == []
    for topic in topics:
        await publisher.deliver(topic, b"", 1, retain=True)


@pytest.mark.parametrize("end", ["clean start", "expiry", "unsubscribe"])
async def test_nothing_is_left(connect5: Connector5, name: str, stored: Stored, end: str) -> None:
    """Of a session that has ended, or has no subscription any more."""
    client = await connect5(name, clean=False, session_expiry_interval=1 if end == "expiry" else 1000)
    await client.subscribe5(Subscription(name, 2))
    await consumerless(stored, name)
    if end == "unsubscribe":
        await client.unsubscribe(name)
        assert not (await stored.record(name)).get("cons")
    await client.disconnect()
    if end != "expiry":
        client = await connect5(name, clean=True, session_expiry_interval=0)
        await client.disconnect()
    await stored.gone(name)
    assert not await stored.count("$MQTT_pos", f"$MQTT.pos.{name_hash(name)}")


async def test_client_that_leaves_at_once(connect: Connector, name: str, stored: Stored) -> None:
    """Its consumers go when it was served by the shared reader; until then they stay and have its messages."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    await client.disconnect()
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"1", 1)
    client = await connect(name, clean=False)
    (one,) = await received(client, 1)
    assert one.payload == b"1"
    await client.complete(one)
    await consumerless(stored, name)


async def test_expiry_that_disconnect_sets(connect5: Connector5, name: str, stored: Stored) -> None:
    """There is no consumer that would have to live as long as the session."""
    client = await connect5(name, clean=False, session_expiry_interval=1000)
    await client.subscribe5(Subscription(name, 1))
    await consumerless(stored, name)
    await client.disconnect5(session_expiry_interval=2000)

    async def changed() -> None:
        assert (await stored.record(name))["v5"]["expiry"] == 2000
        assert (await position(stored.js, name)).clean

    await until(changed)
    client = await connect5(name, clean=False, session_expiry_interval=1000)
    assert client.session_present
