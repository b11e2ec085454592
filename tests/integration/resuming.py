# SPDX-License-Identifier: Apache-2.0
"""A durable session before the end of its connection, and the messages that its client gets when it is resumed."""

from __future__ import annotations

from mqtt_nats.codec import Publish
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL, RawClient
from tests.integration.conftest import Stored, position, until


async def received(client: RawClient, count: int) -> list[Publish]:
    """So many messages, in the order in which they come."""
    return await client.messages(count, timeout=30)


async def mixed_window(client: RawClient, publisher: RawClient, stored: Stored, name: str) -> list[int]:
    """Six QoS 2 messages to a client named as its topic, until its position has them; their packet identifiers.

    Two are complete, two are released, two not acknowledged at all.
    """
    await publisher.deliver_all(name, [b"%d" % number for number in range(6)], 2)
    ids = [one.packet_id for one in await received(client, 6)]
    client.ack(PUBREC, *ids[:4])
    await client.expect_ack(PUBREL, *ids[:4])
    client.ack(PUBCOMP, *ids[:2])
    last = await stored.last_sequence()

    async def written() -> None:
        at = await position(stored.js, name)
        assert at.reached >= last
        assert (len(at.pending), len(at.released)) == (2, 2)

    await until(written)
    return ids


async def left(stored: Stored, client_id: str) -> None:
    """Wait until a session was left in order."""

    async def clean() -> None:
        assert (await position(stored.js, client_id)).clean

    await until(clean)


async def expect_rest(client: RawClient, ids: list[int], *, killed: bool) -> None:
    """Two owed PUBRELs, two messages in flight again, and a new one; the client answers all of them.

    Args:
        ids: packet identifiers of the six messages before the end of the last connection; the first two are complete.
        killed: the last gateway was killed, and could not say which messages it had not sent.
    """
    await client.expect_ack(PUBREL, *ids[2:4])
    again = await received(client, 3)
    assert [one.payload for one in again] == [b"4", b"5", b"new"]
    assert [one.packet_id for one in again[:2]] == ids[4:]
    assert all(one.dup for one in again[:2])
    assert again[2].dup is killed
    client.ack(PUBCOMP, *ids[2:4])
    for one in again:
        await client.complete(one)
    await client.quiet()
