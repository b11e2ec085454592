# SPDX-License-Identifier: Apache-2.0
"""Shared subscriptions when gateways and nats-server die."""

from collections import Counter

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.rawclient5 import RawClient5

TEXT = "$share/group/work"
ACK_WAIT = 30.0  # seconds after which JetStream gives a message to somebody else


async def test_members_of_a_killed_gateway(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    """What they had at QoS 1 goes to the others; what they had at QoS 2 is theirs."""
    server = nats_factory()
    first, second = gateway_factory(server), gateway_factory(server)
    lost = await RawClient5.connect5(first.port, "lost", session_expiry_interval=3600, receive_maximum=6)
    await lost.subscribe(TEXT, qos=2)
    publisher = await RawClient5.connect5(second.port, "publisher")
    await publisher.deliver_all("work", [b"1-%d" % number for number in range(3)], 1)
    await publisher.deliver_all("work", [b"2-%d" % number for number in range(3)], 2)
    sent = await lost.messages(6)
    first.kill()
    other = await RawClient5.connect5(second.port, "other")
    await other.subscribe(TEXT, qos=2)
    got = [await other.message("work", b"1-%d" % number, ACK_WAIT + 15) for number in range(3)]
    assert not any(publish.dup for publish in got)
    await other.quiet()
    again = await RawClient5.connect5(second.port, "lost", clean=False, session_expiry_interval=3600)
    for publish in (one for one in sent if one.qos == 2):
        await again.message("work", publish.payload, qos=2, dup=True, packet_id=publish.packet_id)
    await again.quiet()
    for client in (lost, publisher, other, again):
        client.drop()


async def test_nats_server_restarts(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    """Members go on, of a regular and of a durable session."""
    server = nats_factory()
    gateway = gateway_factory(server)
    members = [
        await RawClient5.connect5(gateway.port, "regular"),
        await RawClient5.connect5(gateway.port, "durable", session_expiry_interval=3600),
    ]
    for member in members:
        await member.subscribe(TEXT, qos=1)
    publisher = await RawClient5.connect5(gateway.port, "publisher")
    for _ in range(2):
        payloads = [b"%d" % number for number in range(20)]
        await publisher.deliver_all("work", payloads, 1)
        got: Counter[bytes] = Counter()
        for member in members:
            for publish in await member.messages(10):
                await member.complete(publish)
                got[publish.payload] += 1
            await member.quiet()
        assert got == Counter(payloads)
        server.kill()
        server.start()
    for client in (publisher, *members):
        client.drop()
