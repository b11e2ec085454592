# SPDX-License-Identifier: Apache-2.0
"""A gateway and its nats-server die at the same moment, which leaves nobody who knows what was acknowledged last."""

import nats

from mqtt_nats.codec import PINGREQ, Ack, PingResp, Publish
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.waiting import aeventually

_MESSAGES = 40


async def test_a_qos_2_message_that_is_complete_does_not_come_again(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory
) -> None:
    """nats-server has confirmed the acknowledgement, and not written it yet: the PUBREL record is still there."""
    server = nats_factory()
    gateway = gateway_factory(server)
    publisher = await RawClient.connect(gateway.port, "pub")
    subscriber = await RawClient.connect(gateway.port, "sub", clean=False)
    await subscriber.subscribe("a", qos=2)
    for number in range(_MESSAGES):
        await publisher.deliver("a", b"%d" % number, 2)
        await subscriber.receive("a", b"%d" % number, qos=2)
    await subscriber.quiet()
    server.kill()
    gateway.kill()
    publisher.drop()
    subscriber.drop()
    server.start()
    gateway.start()

    async with (
        await RawClient.connect(gateway.port, "sub", clean=False) as subscriber,
        await RawClient.connect(gateway.port, "pub") as publisher,
    ):
        await publisher.deliver("a", b"new", 2)
        while True:
            packet = await subscriber.packet()
            if isinstance(packet, Publish):
                assert packet.payload == b"new"
                break
            assert isinstance(packet, Ack)
            assert packet.kind == PUBREL
            subscriber.ack(PUBCOMP, packet.packet_id)
        subscriber.ack(PUBREC, packet.packet_id)
        await subscriber.released(packet.packet_id)


async def test_a_client_that_is_back_at_once_may_be_asked_again(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory
) -> None:
    """The record goes soon after the exchange; where the connection ends before, a nats-server may forget that."""
    server = nats_factory()
    gateway = gateway_factory(server)
    client = await nats.connect(server.url)
    js = client.jetstream()

    async def complete() -> bool:
        """Whether JetStream has confirmed the acknowledgement, and delivered the record of the PUBREL."""
        acknowledged = [one.num_ack_pending for one in await js.consumers_info("$MQTT_msgs")]
        last = (await js.stream_info("$MQTT_out")).state.last_seq
        delivered = [one.delivered.stream_seq for one in await js.consumers_info("$MQTT_out") if one.delivered]
        return not any(acknowledged) and all(one >= last for one in delivered)

    async with await RawClient.connect(gateway.port, "pub") as publisher:
        async with await RawClient.connect(gateway.port, "sub", clean=False) as subscriber:
            await subscriber.subscribe("a", qos=2)
            await publisher.deliver("a", b"x", 2)
            first = await subscriber.receive("a", b"x", qos=2)
            await subscriber.quiet()
            await aeventually(complete, 30)
            await subscriber.quiet()
        async with await RawClient.connect(gateway.port, "sub", clean=False) as subscriber:
            subscriber.write(PINGREQ)
            packet = await subscriber.packet()
            if not isinstance(packet, PingResp):
                assert packet == Ack(PUBREL, first.packet_id, 0)
                subscriber.ack(PUBCOMP, first.packet_id)
                await subscriber.expect(PingResp)
            await publisher.deliver("a", b"y", 2)
            await subscriber.receive("a", b"y", qos=2)

            async def empty() -> bool:
                return (await js.stream_info("$MQTT_out")).state.messages == 0

            await aeventually(empty, 30)
    await client.close()
