# SPDX-License-Identifier: Apache-2.0
"""A resumed session's shared subscriptions are in force when CONNACK comes, as after SUBACK."""

from __future__ import annotations

import pytest

from mqtt_nats.codec import Ack, Publish
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBCOMP, PUBREL, RawClient
from tests.integration.conftest import Connector, Connector5

ROUNDS = 8


async def skipping_pubrels(client: RawClient) -> Publish:
    """The next PUBLISH. PUBREL of the message before comes once more when its record is about to be removed."""
    while not isinstance(packet := await client.packet(), Publish):
        assert isinstance(packet, Ack)
        assert packet.kind == PUBREL
        client.ack(PUBCOMP, packet.packet_id)
    return packet


@pytest.mark.parametrize("version", [4, 5], ids=["3.1.1", "5.0"])
@pytest.mark.parametrize("published", [0, 1, 2])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["one gateway", "two gateways"])
async def test_published_right_after_connack(
    connect: Connector,
    connect5: Connector5,
    name: str,
    second_gateway: Gateway,
    version: int,
    published: int,
    qos: int,
    elsewhere: bool,
) -> None:
    """The message is published as soon as the client has CONNACK."""

    async def member(*, again: bool) -> RawClient:
        if version == 5:
            client: RawClient = await connect5(name, clean=not again, session_expiry_interval=300)
        else:
            client = await connect(name, clean=False)
        assert client.session_present == again
        return client

    client = await member(again=False)
    await client.subscribe(f"$share/group/{name}/#", qos=qos)
    publisher = await connect5(f"{name}-publisher", to=second_gateway if elsewhere else None)
    await publisher.deliver(f"{name}/a", b"before", published)
    await client.receive(f"{name}/a", b"before", qos=min(qos, published))
    for number in range(ROUNDS):
        client.drop()
        client = await member(again=True)
        await publisher.deliver(f"{name}/a", b"%d" % number, published)
        got = await skipping_pubrels(client)
        assert (got.payload, got.qos, got.dup) == (b"%d" % number, min(qos, published), False)
        await client.complete(got)
