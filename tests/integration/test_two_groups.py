# SPDX-License-Identifier: Apache-2.0
"""A message at QoS 2 that several groups get: each group has a copy of its own [MQTT-4.8.2-4] (5.0)."""

from __future__ import annotations

from typing import Any

import pytest

from mqtt_nats.codec import Ack, Disconnect, Publish, Subscription
from mqtt_streams.hashing import name_hash
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector, Connector5, Stored, until
from tests.integration.test_shared import all_of

DURABLE: dict[str, Any] = {"session_expiry_interval": 3600}
PAYLOADS = [b"%d" % number for number in range(5)]


async def assigned(stored: Stored, *names: str, count: int = 0) -> None:
    """Wait until so many messages belong to these clients."""

    async def left() -> None:
        subjects = [f"$MQTT.shared.assigned.{name_hash(name)}.*" for name in set(names)]
        assert sum([await stored.count("$MQTT_shared", subject) for subject in subjects]) == count

    await until(left)


async def after_pubrels(client: RawClient5) -> Publish:
    """The first PUBLISH of a connection; what is owed before it is completed."""
    while isinstance(packet := await client.packet(), Ack):
        assert packet.kind == PUBREL
        client.ack(PUBCOMP, packet.packet_id)
    assert isinstance(packet, Publish)
    return packet


def by_identifier(found: list[Publish]) -> dict[int, list[Publish]]:
    """Messages by the subscription identifier under which they came."""
    by: dict[int, list[Publish]] = {}
    for one in found:
        (identifier,) = (one.properties or {})["subscription_identifier"]
        by.setdefault(identifier, []).append(one)
    return by


@pytest.mark.parametrize("where", ["one gateway", "two gateways"])
@pytest.mark.parametrize("kinds", ["durable durable", "durable regular", "regular regular", "durable 3.1.1"])
async def test_each_group_gets_each_message(
    connect: Connector, connect5: Connector5, name: str, stored: Stored, second_gateway: Gateway, kinds: str, where: str
) -> None:
    """Whoever its member is, and wherever."""
    members: list[RawClient] = []
    for number, kind in enumerate(kinds.split()):
        to = second_gateway if number and where == "two gateways" else None
        if kind == "3.1.1":
            members.append(await connect(f"{name}-{number}", clean=False, to=to))
        else:
            members.append(await connect5(f"{name}-{number}", to=to, **(DURABLE if kind == "durable" else {})))
        await members[-1].subscribe(f"$share/g{number}/{name}/#", qos=2)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(f"{name}/a", PAYLOADS, 2)
    found = await all_of(members, 2 * len(PAYLOADS))
    assert [[one.payload for one in each] for each in found] == [PAYLOADS, PAYLOADS]
    await assigned(stored, f"{name}-0", f"{name}-1")


@pytest.mark.parametrize("qos", [1, 2], ids=["one at QoS 1", "all at QoS 2"])
@pytest.mark.parametrize("apart", [False, True], ids=["one session", "three sessions"])
async def test_filters_of_groups_that_overlap(
    connect5: Connector5, name: str, stored: Stored, second_gateway: Gateway, apart: bool, qos: int
) -> None:
    """Each has its copy under an identifier of its own, which comes again at another gateway as it was."""
    texts = [f"$share/g0/{name}/#", f"$share/g1/{name}/+", f"$share/g0/{name}/a"]
    names = [f"{name}-{number if apart else 0}" for number in range(3)]
    members = {one: await connect5(one, **DURABLE) for one in dict.fromkeys(names)}
    for number, text in enumerate(texts):
        wanted = Subscription(text, qos if number == 1 else 2)
        await members[names[number]].subscribe5(wanted, subscription_identifier=[number + 1])
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(f"{name}/a", PAYLOADS, 2)
    first: dict[str, list[Publish]] = {}
    for one, member in members.items():
        first[one] = await member.messages(len(PAYLOADS) * (1 if apart else 3))
        await member.quiet()
        assert len({publish.packet_id for publish in first[one]}) == len(first[one])
    by = by_identifier([publish for each in first.values() for publish in each])
    payloads = {number: [publish.payload for publish in found] for number, found in by.items()}
    assert payloads == dict.fromkeys((1, 2, 3), PAYLOADS)
    await assigned(stored, *names, count=len(PAYLOADS) * (qos + 1))
    for one, member in members.items():
        member.drop()
        again = await connect5(one, clean=False, to=second_gateway, **DURABLE)
        found = await again.messages(len(first[one]))
        at_2 = [{(each.payload, each.packet_id, str(each.properties)) for each in first[one] if each.qos == 2}]
        assert [{(each.payload, each.packet_id, str(each.properties)) for each in found if each.dup}] == at_2
        for publish in found:
            await again.complete(publish)
        await again.quiet()
    await assigned(stored, *names)


@pytest.mark.parametrize(
    ("same", "end"),
    [
        (True, "complete"),
        (True, "unsubscribe"),
        (False, "complete"),
        (False, "unsubscribe"),
        (False, "session ends"),
    ],
)
async def test_what_one_group_is_done_with_is_still_the_other_ones(
    connect5: Connector5, name: str, stored: Stored, second_gateway: Gateway, same: bool, end: str
) -> None:
    """What says whose the other group's copy is stays, in the same session or in another one."""
    names = [f"{name}-0", f"{name}-{0 if same else 1}"]
    texts = [f"$share/g{number}/{name}" for number in range(2)]
    members = {one: await connect5(one, **DURABLE) for one in dict.fromkeys(names)}
    for number in range(2):
        await members[names[number]].subscribe5(Subscription(texts[number], 2), subscription_identifier=[number + 1])
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(name, b"x", 2)
    by = by_identifier([one for member in members.values() for one in await member.messages(3 - len(members))])
    await assigned(stored, *names, count=2)
    done = members[names[0]]
    if end == "session ends":
        await done.disconnect5(session_expiry_interval=0)
    else:
        if end == "unsubscribe":
            await done.unsubscribe(texts[0])
        await done.complete(by[1][0])
    await assigned(stored, *names, count=1)
    members[names[1]].drop()
    again = await connect5(names[1], clean=False, to=second_gateway, **DURABLE)
    one = await after_pubrels(again)
    assert (one.payload, one.dup, one.packet_id) == (b"x", True, by[2][0].packet_id)
    await again.complete(one)
    await again.quiet()
    await assigned(stored, *names)


async def test_the_second_copy_has_another_identifier_than_a_pubrel_on_record(
    connect5: Connector5, name: str, stored: Stored, second_gateway: Gateway
) -> None:
    """The record of that PUBREL names the same message: by it, the second copy would be one that the client has."""
    client = await connect5(name, receive_maximum=1, **DURABLE)
    for number in range(2):
        await client.subscribe(f"$share/g{number}/{name}", qos=2)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(name, b"x", 2)
    one = await client.message(name, b"x", qos=2)
    client.ack(PUBREC, one.packet_id)
    await client.released(one.packet_id, answer=False)
    client.send(Ack(PUBCOMP, one.packet_id, 0), Disconnect())  # at once: the second copy would come between them
    await client.expect_closed()
    await assigned(stored, name)
    client = await connect5(name, clean=False, receive_maximum=1, to=second_gateway, **DURABLE)
    two = await after_pubrels(client)
    assert (two.payload, two.dup) == (b"x", False)
    assert two.packet_id != one.packet_id
    client.drop()
    client = await connect5(name, clean=False, receive_maximum=1, **DURABLE)
    again = await after_pubrels(client)
    assert (again.payload, again.dup, again.packet_id) == (b"x", True, two.packet_id)
    await client.complete(again)
    await client.quiet()
    await assigned(stored, name)
