# SPDX-License-Identifier: Apache-2.0
"""QoS 2 publishes keep their order when a connection ends between PUBREC and PUBREL."""

from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL, RawClient


async def test_releases_keep_their_order_over_a_reconnect(gateway: Gateway) -> None:
    """[MQTT-4.6.0-6]"""
    topic = "order/release"
    async with await RawClient.connect(gateway.port, "order-sub") as subscriber:
        await subscriber.subscribe(topic, qos=2)
        async with await RawClient.connect(gateway.port, "order-pub", clean=False) as publisher:
            for packet_id in range(1, 21):
                publisher.publish(topic, b"%d" % packet_id, 2, packet_id=packet_id)
            await publisher.expect_ack(PUBREC, *range(1, 21))
        async with await RawClient.connect(gateway.port, "order-pub", clean=False) as publisher:
            assert publisher.session_present
            publisher.publish(topic, b"21", 2, packet_id=21)
            publisher.publish(topic, b"22", 2, packet_id=22)
            await publisher.expect_ack(PUBREC, 21, 22)
            publisher.ack(PUBREL, *range(1, 23))
            await publisher.expect_ack(PUBCOMP, *range(1, 23))
        received = await subscriber.messages(22)
        assert [int(message.payload) for message in received] == list(range(1, 23))
        assert {message.qos for message in received} == {2}
