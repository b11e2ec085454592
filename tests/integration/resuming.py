# SPDX-License-Identifier: Apache-2.0
"""Messages that a client gets when its durable session is resumed."""

from __future__ import annotations

from mqtt_nats.codec import Publish
from tests.harness.rawclient import PUBCOMP, PUBREL, RawClient


async def received(client: RawClient, count: int) -> list[Publish]:
    """So many messages, in the order in which they come."""
    return await client.messages(count, timeout=30)


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
