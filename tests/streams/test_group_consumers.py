# SPDX-License-Identifier: Apache-2.0
"""The consumer of a shared subscription while several gateways change its configuration, in a real server."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mqtt_streams.api import Reply
from mqtt_streams.consumers import ACK_WAIT_NS, consumer_info
from mqtt_streams.definitions import ensure_streams
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.shared import CONSUMER_PREFIX, EXPIRED_NS, SharedStore, group_hash
from tests.streams.support import NatsPyJetStream

TEXT = "$share/group/x"
GROUP = group_hash("group", "x")
SHORT, LONG, NEVER = 1_000_000_000_000, 2_000_000_000_000, 0

Other = Callable[[], Awaitable[None]]


class Interrupted(NatsPyJetStream):
    """Another gateway does something between a read and a write of a consumer's configuration.

    Args:
        other: what it does.
        write: before which write; 1 is the first.
    """

    def __init__(self, js: NatsPyJetStream, other: Other, write: int = 1) -> None:
        super().__init__(js.client, js.api_prefix)
        self.other = other
        self.writes = write

    async def request(
        self, subject: str, payload: bytes = b"", headers: bytes = b"", *, timeout: float = 5.0, reply: str = ""
    ) -> Reply:
        if ".CONSUMER.DURABLE.CREATE." in subject:
            self.writes -= 1
            if not self.writes:
                await self.other()
        return await super().request(subject, payload, headers, timeout=timeout, reply=reply)


async def join(js: NatsPyJetStream, client: str, threshold: int) -> None:
    """Become a member whose session needs the consumer for that long."""
    store = SharedStore(js)
    await store.join(GROUP, client * 22, client, TEXT, threshold)
    await store.ensure_consumer(GROUP, TEXT, ("x",), 1, threshold)


async def config(js: NatsPyJetStream) -> dict[str, Any]:
    info = await consumer_info(js, MESSAGES, CONSUMER_PREFIX + GROUP)
    assert info is not None
    return info.config


@pytest.mark.parametrize("needed", [LONG, NEVER])
@pytest.mark.parametrize("write", [1, 2])
async def test_a_member_joins_while_the_ack_wait_is_short(js: NatsPyJetStream, needed: int, write: int) -> None:
    """The gateway that sets AckWait, or sets it back, does not undo what the member needs."""
    await ensure_streams(js)
    await join(js, "A", SHORT)
    store = SharedStore(Interrupted(js, lambda: join(js, "B", needed), write))
    assert await store.set_wait(GROUP, EXPIRED_NS, -1)
    await store.restore_wait(GROUP)
    found = await config(js)
    assert (found.get("inactive_threshold", 0), found["ack_wait"]) == (needed, ACK_WAIT_NS)


@pytest.mark.parametrize("needed", [LONG, NEVER])
async def test_two_members_join_at_the_same_time(js: NatsPyJetStream, needed: int) -> None:
    """The consumer lasts as long as the longer one of them needs it."""
    await ensure_streams(js)
    await join(js, "A", SHORT)
    await join(Interrupted(js, lambda: join(js, "B", needed)), "C", SHORT + 1)
    assert (await config(js)).get("inactive_threshold", 0) == needed


async def test_members_whose_records_cannot_be_read(js: NatsPyJetStream) -> None:
    """They do not say what they need: the consumer keeps what it has."""
    await ensure_streams(js)
    await join(js, "A", LONG)
    subject = f"$MQTT.shared.members.{GROUP}.{'D' * 22}"
    for body in (b'{"client":"D","filter":"$share/group/x"}', b"no JSON", b"[]"):
        await js.client.jetstream().publish(subject, body)
        store = SharedStore(js)
        assert await store.set_wait(GROUP, EXPIRED_NS, -1)
        await store.restore_wait(GROUP)
        assert (await config(js))["inactive_threshold"] == LONG


async def test_a_group_without_a_consumer(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    await SharedStore(js).restore_wait(GROUP)
    assert await consumer_info(js, MESSAGES, CONSUMER_PREFIX + GROUP) is None
