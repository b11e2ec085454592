# SPDX-License-Identifier: Apache-2.0
"""QoS 2 messages that are one member's of a shared subscription, in a real server."""

import time
from collections.abc import AsyncGenerator

import pytest

from mqtt_streams import headers, stored
from mqtt_streams.api import ApiError, Reply, RequestTimeout, publish
from mqtt_streams.definitions import ensure_streams
from mqtt_streams.shared import (
    ASSIGNED,
    STREAM,
    TAKEN,
    Assignment,
    Owner,
    SharedStore,
    assigned_block,
    assigned_subject,
    group_hash,
)
from tests.streams.support import NatsPyJetStream

CLIENT, OTHER = "A" * 22, "B" * 22
NUMBER = 5
SUBSCRIPTION, OTHER_SUBSCRIPTION = "$share/a group/x/#", "$share/another/x/#"
GROUP, OTHER_GROUP = group_hash("a group", "x/#"), group_hash("another", "x/#")
ACK = b"$JS.ACK.$MQTT_msgs.share_group.1.5.9.1764102000000000000.0"
SUBJECT = assigned_subject(CLIENT, GROUP, NUMBER)


async def assign(
    js: NatsPyJetStream,
    client: str,
    packet_id: int,
    arrived: float = 0.0,
    *,
    arrived_at: int = 0,
    sole: bool = True,
    group: str = GROUP,
) -> int:
    """Store that a group's message is a client's, which had come so many seconds before."""
    at = arrived_at or int((time.time() - arrived) * 1e9)
    subscription = SUBSCRIPTION if group == GROUP else OTHER_SUBSCRIPTION
    block = assigned_block(packet_id, group, NUMBER, subscription, at, ACK, sole=sole)
    return await publish(js, assigned_subject(client, group, NUMBER), b"", block)


async def owner(js: NatsPyJetStream, stored_ns: int = 0, number: int = NUMBER) -> Owner | None:
    """Whose the group's copy of a message is."""
    return await SharedStore(js).owner(GROUP, number, stored_ns)


class Counting(NatsPyJetStream):
    """Counts what JetStream is asked."""

    def __init__(self, js: NatsPyJetStream) -> None:
        super().__init__(js.client, js.api_prefix)
        self.asked = 0

    async def _answers(
        self, subject: str, payload: bytes, headers: bytes, timeout: float, inbox: str
    ) -> AsyncGenerator[Reply, None]:
        self.asked += 1
        async for answer in super()._answers(subject, payload, headers, timeout, inbox):
            yield answer


async def test_assignments_are_read_by_pages(js: NatsPyJetStream) -> None:
    """A session may have thousands after its nats-server was killed again and again; they are read at each resume."""
    await ensure_streams(js)
    at = time.time_ns()
    for number in range(1, 31):
        block = assigned_block(number, GROUP, number, SUBSCRIPTION, at, b"")
        await publish(js, assigned_subject(CLIENT, GROUP, number), b"", block)
    counting = Counting(js)
    found, _ = await SharedStore(counting).assigned(CLIENT)
    assert [one.packet_id for one in found] == list(range(1, 31))
    assert counting.asked < 6


async def test_an_assignment_and_its_owner(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = SharedStore(js)
    before = time.time_ns()
    seq = await assign(js, CLIENT, 7, arrived_at=before)
    assert await store.assigned(CLIENT) == (
        [Assignment(7, seq, NUMBER, SUBSCRIPTION, ACK, subject=SUBJECT)],
        None,
    )
    assert await store.assigned(OTHER) == ([], None)
    assert await owner(js, before) == Owner(CLIENT, 7, seq, before)
    assert await owner(js, time.time_ns() + 10**9) is None, "the message is newer"
    assert await owner(js, before, NUMBER + 1) is None


async def test_what_is_assigned_is_not_assigned_again(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    await assign(js, CLIENT, 7)
    with pytest.raises(ApiError) as caught:
        await assign(js, OTHER, 8)
    assert caught.value.err_code == TAKEN[0]
    now = time.time_ns()
    seq = await assign(js, OTHER, 8, arrived_at=now, sole=False)
    assert await owner(js) == Owner(OTHER, 8, seq, now)


@pytest.mark.parametrize("client", [CLIENT, OTHER], ids=["the same client", "another one"])
async def test_each_group_assigns_its_copy(js: NatsPyJetStream, client: str) -> None:
    """The end of one assignment leaves the other."""
    await ensure_streams(js)
    store = SharedStore(js)
    now = time.time_ns()
    first = await assign(js, CLIENT, 7, arrived_at=now)
    second = await assign(js, client, 8, arrived_at=now, group=OTHER_GROUP)
    assert await owner(js) == Owner(CLIENT, 7, first, now)
    assert await store.owner(OTHER_GROUP, NUMBER, 0) == Owner(client, 8, second, now)
    found, _ = await store.assigned(client)
    assert found[-1] == Assignment(
        8, second, NUMBER, OTHER_SUBSCRIPTION, ACK, subject=assigned_subject(client, OTHER_GROUP, NUMBER)
    )
    assert len(found) == (2 if client == CLIENT else 1)
    assert await stored.delete(js, STREAM, first)
    assert await owner(js) is None
    assert await store.owner(OTHER_GROUP, NUMBER, 0) == Owner(client, 8, second, now)


async def test_an_assignment_that_was_stored_too_late_is_void(js: NatsPyJetStream) -> None:
    """The group has given the message to another member since."""
    await ensure_streams(js)
    store = SharedStore(js)
    await assign(js, CLIENT, 7, 14.0)
    assert await owner(js) is not None
    await assign(js, CLIENT, 7, 16.0, sole=False)
    assert await owner(js) is None
    assert await store.assigned(CLIENT) == ([], None)
    assert await stored.get_last(js, STREAM, f"{ASSIGNED}>") is None, "it was removed"


async def test_an_assignment_gets_another_packet_identifier(js: NatsPyJetStream) -> None:
    """It is in time from then on, an attempt may be repeated, and one that is replaced or removed stays so."""
    await ensure_streams(js)
    store = SharedStore(js)
    first = await assign(js, CLIENT, 7, 14.0)
    ((one,), _) = await store.assigned(CLIENT)
    now = time.time_ns() + 10**9
    changed = await store.change_packet_id(one, 8, 5, now)
    assert changed is not None
    assert changed.seq > first
    assert await store.change_packet_id(one, 8, 5, now) == changed, "the answer to the first attempt was lost"
    assert await store.assigned(CLIENT) == ([changed], None)
    assert changed == one._replace(packet_id=8, seq=changed.seq, epoch=5)
    assert await owner(js) == Owner(CLIENT, 8, changed.seq, now)
    assert await store.change_packet_id(one, 9, 5, now) is None
    assert await stored.delete(js, STREAM, changed.seq)
    assert await store.change_packet_id(changed, 9, 5, now) is None
    assert await store.assigned(CLIENT) == ([], None)


class Replicating(NatsPyJetStream):
    """Refuses messages as nats-server does while it replicates another message of their subject."""

    async def _answers(
        self, subject: str, payload: bytes, headers: bytes, timeout: float, inbox: str
    ) -> AsyncGenerator[Reply, None]:
        if subject.startswith(ASSIGNED):
            refused = b'{"error":{"code":400,"err_code":%d,"description":"wrong last sequence"}}' % TAKEN[1]
            yield Reply(inbox, b"", refused, "")
        else:
            async for answer in super()._answers(subject, payload, headers, timeout, inbox):
                yield answer


async def test_an_assignment_whose_replacement_is_not_stored_yet(js: NatsPyJetStream) -> None:
    """The outcome of the earlier attempt is not known: it is asked for again, and the identifier stays reserved."""
    await ensure_streams(js)
    first = await assign(js, CLIENT, 7)
    ((one,), _) = await SharedStore(js).assigned(CLIENT)
    with pytest.raises(RequestTimeout):
        await SharedStore(Replicating(js.client, js.api_prefix)).change_packet_id(one, 8, 5, time.time_ns())
    assert [found.seq for found in (await SharedStore(js).assigned(CLIENT))[0]] == [first]


async def test_whether_an_assignment_may_be_stored_yet(js: NatsPyJetStream) -> None:
    """The question stores nothing, whatever is there."""
    await ensure_streams(js)
    store = SharedStore(js)
    place = CLIENT, GROUP, NUMBER
    await store.decide(*place)
    assert await stored.get_last(js, STREAM, f"{ASSIGNED}>") is None
    seq = await assign(js, OTHER, 7)
    await store.decide(*place)
    found = await stored.get_last(js, STREAM, f"{ASSIGNED}>")
    assert found is not None
    assert found.seq == seq
    with pytest.raises(RequestTimeout):
        await SharedStore(Replicating(js.client, js.api_prefix)).decide(*place)


async def test_only_a_void_assignment_is_removed_as_such(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = SharedStore(js)
    await assign(js, CLIENT, 7, 14.0)
    for _ in range(2):
        await store.remove_void(CLIENT, GROUP, NUMBER)
        assert await stored.get_last(js, STREAM, SUBJECT) is not None
        await store.remove_void(OTHER, GROUP, NUMBER)
    await assign(js, CLIENT, 7, 16.0, sole=False)
    await store.remove_void(CLIENT, GROUP, NUMBER)
    assert await stored.get_last(js, STREAM, SUBJECT) is None


@pytest.mark.parametrize(
    "ack",
    [
        "$MQTT.msgs.x",
        "$JS.ACK.$MQTT_msgs.share_group.1.6.9.1764102000000000000.0",
        "$JS.ACK.$MQTT_msgs.else.1.5.9.1764102000000000000.0",
        "$JS.ACK.else.share_group.1.5.9.1764102000000000000.0",
        "$JS.ACK.$MQTT_msgs.share_group 9.1.5.9.1764102000000000000.0",
    ],
)
async def test_an_assignment_that_names_something_else_to_acknowledge(js: NatsPyJetStream, ack: str) -> None:
    """Somebody else has written it: gateways publish on no such subject."""
    await ensure_streams(js)
    block = headers.build([("Nmqtt-PacketId", "7"), ("Nmqtt-Seq", f"{NUMBER}"), ("Nmqtt-Ack", ack)])
    seq = await publish(js, assigned_subject(CLIENT, GROUP, NUMBER), b"", block)
    assert await SharedStore(js).assigned(CLIENT) == (
        [Assignment(7, seq, NUMBER, "", subject=SUBJECT)],
        None,
    )
