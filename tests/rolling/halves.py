# SPDX-License-Identifier: Apache-2.0
"""Sessions with all that a gateway stores for them, left at one gateway and continued at another."""

from __future__ import annotations

from dataclasses import dataclass

from mqtt_nats.codec import Subscription, Will
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.rawclient5 import RawClient5

NEVER = 0xFFFFFFFF
"""Session expiry interval of a session that does not end."""

PATIENCE = 30.0

ROLLER, MEMBER, PLAIN, MORTAL = "roller", "member", "plain", "mortal"
"""Client ids: a session of MQTT 5.0, one with a shared subscription, one of 3.1.1, and a client with a will."""

HELD = 99
"""Packet identifier of a held publish."""


@dataclass(frozen=True)
class Left:
    """Packet identifiers of messages that are not complete: of an owed PUBREL, of messages without an answer."""

    owed: int
    unanswered: int
    assigned: int


async def leave(port: int) -> tuple[Left, RawClient]:
    """Leave sessions at a gateway with messages of every kind under way; also returns the client `MORTAL`."""
    async with await RawClient.connect(port, "publisher") as publisher:
        await publisher.deliver("kept", b"kept", 1, retain=True)
        async with await RawClient.connect(port, PLAIN, clean=False) as plain:
            await plain.subscribe("p/#", qos=1)
        async with await RawClient5.connect5(port, ROLLER, session_expiry_interval=NEVER) as client:
            both = (Subscription("r/#", 2), Subscription("r/+", 1, retain_as_published=True))
            assert await client.subscribe5(*both, subscription_identifier=[7]) == (2, 1)
            assert await client.subscribe5(Subscription("$share/group/s", 1)) == (1,)
            await publisher.deliver("r/a", b"owed", 2)
            owed = await client.message("r/a", b"owed", qos=2)
            client.ack(PUBREC, owed.packet_id)
            await client.released(owed.packet_id, answer=False)
            await publisher.deliver("r/a", b"unanswered", 2)
            unanswered = await client.message("r/a", b"unanswered", qos=2, dup=False)
            client.publish("held", b"held", 2, packet_id=HELD)
            await client.expect_ack(PUBREC, HELD)
        async with await RawClient5.connect5(port, MEMBER, session_expiry_interval=NEVER) as member:
            assert await member.subscribe5(Subscription("$share/team/t", 2)) == (2,)
            await publisher.deliver("t", b"assigned", 2)
            assigned = await member.message("t", b"assigned", qos=2, dup=False)
        await publisher.deliver("r/a", b"meanwhile", 1)
        await publisher.deliver("p/a", b"absent", 1)
        mortal = await RawClient.connect(port, MORTAL, will=Will("wills/1", b"x", 1, True))
    assert owed.packet_id
    assert unanswered.packet_id
    assert assigned.packet_id
    return Left(owed.packet_id, unanswered.packet_id, assigned.packet_id), mortal


async def go_on(port: int, left: Left) -> None:
    """Continue the sessions at a gateway: what was in flight, owed, held and granted is so there."""
    async with await RawClient.connect(port, "publisher") as publisher:
        await publisher.subscribe("held", "kept", qos=2)
        await publisher.receive("kept", b"kept", retain=True)
        async with await RawClient5.connect5(port, ROLLER, clean=False, session_expiry_interval=NEVER) as client:
            assert client.session_present
            await client.expect_ack(PUBREL, left.owed)
            again = await client.message("r/a", b"unanswered", qos=2, dup=True, packet_id=left.unanswered)
            assert (again.properties or {}).get("subscription_identifier") == [7, 7]
            await client.receive("r/a", b"meanwhile", qos=1)
            client.ack(PUBCOMP, left.owed)
            client.ack(PUBREC, left.unanswered)
            client.ack(PUBREL, HELD)
            await client.released(left.unanswered)
            await client.expect_ack(PUBCOMP, HELD)
            await publisher.receive("held", b"held", qos=2)
            await client.unsubscribe("r/+")
            await publisher.deliver("r/a", b"end", 2)
            end = await client.receive("r/a", b"end", qos=2)
            assert (end.properties or {}).get("subscription_identifier") == [7]
            await publisher.deliver("s", b"shared", 1)
            await client.receive("s", b"shared", qos=1)
            await client.quiet()
        async with await RawClient5.connect5(port, MEMBER, clean=False, session_expiry_interval=NEVER) as member:
            assert member.session_present
            await member.complete(await member.message("t", b"assigned", qos=2, dup=True, packet_id=left.assigned))
            await publisher.deliver("t", b"next", 2)
            await member.receive("t", b"next", qos=2)
            await member.quiet()
        async with await RawClient.connect(port, PLAIN, clean=False) as plain:
            assert plain.session_present
            await plain.receive("p/a", b"absent", qos=1)
            await publisher.deliver("p/a", b"more", 1)
            await plain.receive("p/a", b"more", qos=1)
            await plain.quiet()


async def end_all(port: int) -> None:
    """End the sessions at a gateway."""
    for client_id in (ROLLER, MEMBER, PLAIN):
        async with await RawClient.connect(port, client_id):  # clean
            pass
