# SPDX-License-Identifier: Apache-2.0
"""QoS 1 and 2 exchanges that start on one listener and end on the other."""

import pytest
from nats.aio.client import Client as NatsClient

from mqtt_nats.codec import Ack, Publish
from mqtt_nats.protocol.durable_sender import packet_id
from mqtt_streams.hashing import name_hash
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.waiting import aeventually
from tests.integration.conftest import settled
from tests.interop.conftest import handed_over
from tests.interop.support import BOTH_WAYS, Raws, unique


async def stored(client: NatsClient, stream: str, subject: str) -> int:
    """Messages that a stream has on a subject."""
    info = await client.jetstream().stream_info(stream, subjects_filter=subject)
    return sum((info.state.subjects or {}).values())


async def hurry(client: NatsClient, stream: str, durable_prefix: str) -> None:
    """Let a session's consumers redeliver after half a second: nats-server's listener waits for that."""
    js = client.jetstream()
    for info in await js.consumers_info(stream):
        if info.name.startswith(durable_prefix):
            config = info.config
            config.ack_wait = 0.5
            await js.add_consumer(stream, config)


async def subscriber_on(raw: Raws, side: str, topic: str, qos: int = 2) -> RawClient:
    """A new clean client that has subscribed."""
    client = await raw(side, unique("watch"))
    assert await client.subscribe(topic, qos=qos) == (qos,)
    return client


@BOTH_WAYS
@pytest.mark.parametrize("again", [False, True], ids=["pubrel", "publish-again"])
async def test_a_held_publish_is_released_by_the_other_side(
    raw: Raws, nats_client: NatsClient, here: str, there: str, again: bool
) -> None:
    topic, client_id = unique("held/"), unique("pub")
    watchers = [await subscriber_on(raw, side, topic) for side in (here, there)]
    publisher = await raw(here, client_id, clean=False)
    for number in (7, 8):
        publisher.publish(topic, b"%d" % number, 2, packet_id=number)
    await publisher.expect_ack(PUBREC, 7, 8)
    publisher.drop()
    publisher = await raw(there, client_id, clean=False)
    assert publisher.session_present
    if again:
        for number in (7, 8):
            publisher.publish(topic, b"%d" % number, 2, packet_id=number, dup=True)
        await publisher.expect_ack(PUBREC, 7, 8)
    publisher.ack(PUBREL, 7, 8)
    await publisher.expect_ack(PUBCOMP, 7, 8)
    for watcher in watchers:
        await watcher.receive(topic, b"7", qos=2)
        await watcher.receive(topic, b"8", qos=2)
        await watcher.quiet()
    assert await stored(nats_client, "$MQTT_qos2in", f"$MQTT.qos2.in.{client_id}.*") == 0


@BOTH_WAYS
async def test_a_clean_start_on_the_other_side_drops_what_is_held(
    raw: Raws, here: str, there: str, nats_client: NatsClient
) -> None:
    topic, client_id = unique("held/"), unique("pub")
    publisher = await raw(here, client_id, clean=False)
    publisher.publish(topic, b"old", 2, packet_id=7)
    await publisher.expect_ack(PUBREC, 7)
    publisher.drop()
    if there == "nats-server":  # it leaves what is held: the gateway has to cope with that afterwards
        (await raw(there, client_id)).drop()
        there = "gateway"
    publisher = await raw(there, client_id)
    watcher = await subscriber_on(raw, there, topic)
    await publisher.deliver(topic, b"unrelated", 2)
    publisher.publish(topic, b"new", 2, packet_id=7)
    await publisher.expect_ack(PUBREC, 7)
    publisher.ack(PUBREL, 7)
    await publisher.expect_ack(PUBCOMP, 7)
    await watcher.receive(topic, b"unrelated")
    await watcher.receive(topic, b"new")
    await watcher.quiet()


@BOTH_WAYS
async def test_an_owed_pubrel_is_sent_by_the_other_side(
    raw: Raws, nats_client: NatsClient, here: str, there: str
) -> None:
    topic, client_id = unique("owed/"), unique("sub")
    publisher = await raw(here, unique("pub"))
    subscriber = await raw(here, client_id, clean=False)
    await subscriber.subscribe(topic, qos=2)
    await publisher.deliver(topic, b"x", 2)
    message = await subscriber.message(topic, b"x", qos=2)
    subscriber.ack(PUBREC, message.packet_id)
    await subscriber.expect_ack(PUBREL, message.packet_id)
    subscriber.drop()
    await handed_over(nats_client, client_id)
    owed = f"$MQTT.out.pubrel.{name_hash(client_id)}"
    assert await stored(nats_client, "$MQTT_out", owed) == 1
    if there == "nats-server":
        await hurry(nats_client, "$MQTT_out", f"$MQTT_PUBREL_{name_hash(client_id)}")
    subscriber = await raw(there, client_id, clean=False)
    assert subscriber.session_present
    await subscriber.expect_ack(PUBREL, message.packet_id)
    subscriber.ack(PUBCOMP, message.packet_id)

    async def gone() -> bool:
        return await stored(nats_client, "$MQTT_out", owed) == 0

    await aeventually(gone)
    await publisher.deliver(topic, b"y", 2)
    await subscriber.receive(topic, b"y", qos=2)
    await subscriber.quiet()


@BOTH_WAYS
@pytest.mark.parametrize("qos", [1, 2])
async def test_what_was_not_acknowledged_comes_again(
    raw: Raws, nats_client: NatsClient, here: str, there: str, qos: int
) -> None:
    """A gateway sends it with DUP; nats-server does not know that a reader of a gateway has brought it."""
    topic, client_id = unique("dup/"), unique("sub")
    publisher = await raw(here, unique("pub"))
    subscriber = await raw(here, client_id, clean=False)
    await subscriber.subscribe(topic, qos=qos)
    await publisher.deliver_all(topic, [b"1", b"2", b"3"], qos)
    await subscriber.messages(3)
    subscriber.drop()
    await handed_over(nats_client, client_id)
    subscriber = await raw(there, client_id, clean=False)
    messages = await subscriber.messages(3)
    again = there == "gateway"
    assert [(one.payload, one.qos, one.dup) for one in messages] == [
        (b"1", qos, again),
        (b"2", qos, again),
        (b"3", qos, again),
    ]
    for message in messages:
        await subscriber.complete(message)
    await publisher.deliver(topic, b"4", qos)
    await subscriber.receive(topic, b"4", qos=qos, dup=False)
    await subscriber.quiet()


@BOTH_WAYS
async def test_window_of_mixed_states_moves_over(raw: Raws, nats_client: NatsClient, here: str, there: str) -> None:
    """Of six QoS 2 messages two are complete, two are released, two not acknowledged at all.

    nats-server sends messages from the oldest one that is not complete, and without DUP.
    """
    topic, client_id = unique("mixed/"), unique("sub")
    publisher = await raw(here, unique("pub"))
    subscriber = await raw(here, client_id, clean=False)
    await subscriber.subscribe(topic, qos=2)
    await publisher.deliver_all(topic, [b"%d" % number for number in range(6)], 2)
    messages = await subscriber.messages(6)
    ids = [message.packet_id for message in messages]
    subscriber.ack(PUBREC, *ids[:4])
    await subscriber.expect_ack(PUBREL, *ids[:4])
    subscriber.ack(PUBCOMP, *ids[:2])
    await settled(nats_client.jetstream(), client_id, inflight=2, owed=2)
    subscriber.drop()
    await handed_over(nats_client, client_id)
    if there == "nats-server":
        await hurry(nats_client, "$MQTT_out", f"$MQTT_PUBREL_{name_hash(client_id)}")
    subscriber = await raw(there, client_id, clean=False)
    packets = [await subscriber.packet() for _ in range(4)]
    releases = [packet for packet in packets if isinstance(packet, Ack)]
    assert {(one.kind, one.packet_id) for one in releases} == {(PUBREL, ids[2]), (PUBREL, ids[3])}
    again = [packet for packet in packets if isinstance(packet, Publish)]
    assert {(one.payload, one.dup) for one in again} == {(b"4", there == "gateway"), (b"5", there == "gateway")}
    if there == "gateway":
        assert packets == [*releases, *again]
        assert [one.payload for one in again] == [b"4", b"5"]
    subscriber.ack(PUBCOMP, *ids[2:4])
    for message in again:
        await subscriber.complete(message)
    await subscriber.quiet()


async def test_ids_of_pubrels_owed_by_nats_server_are_not_used(raw: Raws, nats_client: NatsClient) -> None:
    topic, client_id = unique("owed/"), unique("sub")
    publisher = await raw("nats-server", unique("pub"))
    subscriber = await raw("nats-server", client_id, clean=False)
    await subscriber.subscribe(topic, qos=2)
    subscriber.drop()
    # A record as nats-server writes it, of the identifier that the next message would have.
    js = nats_client.jetstream()
    last = (await js.stream_info("$MQTT_msgs")).state.last_seq
    owed = packet_id(last + 1)
    await js.publish(f"$MQTT.out.pubrel.{name_hash(client_id)}", b"", headers={"Nmqtt-PubRel": str(owed)})
    subscriber = await raw("gateway", client_id, clean=False)
    await subscriber.expect_ack(PUBREL, owed)
    await publisher.deliver(topic, b"x", 2)
    message = await subscriber.receive(topic, b"x", qos=2)
    assert message.packet_id != owed
    subscriber.ack(PUBCOMP, owed)
    await subscriber.quiet()
