# SPDX-License-Identifier: Apache-2.0
"""QoS 2 messages that are one member's of a shared subscription, in a real server."""

import time

import pytest

from mqtt_streams import headers, stored
from mqtt_streams.api import ApiError, publish
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
)
from tests.streams.support import NatsPyJetStream

CLIENT, OTHER = "A" * 22, "B" * 22
NUMBER = 5
SUBSCRIPTION = "$share/a group/x/#"
ACK = b"$JS.ACK.$MQTT_msgs.share_group.1.5.9.1764102000000000000.0"


async def assign(
    js: NatsPyJetStream, client: str, packet_id: int, arrived: float = 0.0, *, arrived_at: int = 0, sole: bool = True
) -> int:
    """Store that a message is a client's, which had come so many seconds before."""
    at = arrived_at or int((time.time() - arrived) * 1e9)
    block = assigned_block(packet_id, NUMBER, SUBSCRIPTION, at, ACK, sole=sole)
    return await publish(js, assigned_subject(client, NUMBER), b"", block)


async def test_an_assignment_and_its_owner(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = SharedStore(js)
    before = time.time_ns()
    seq = await assign(js, CLIENT, 7, arrived_at=before)
    assert await store.assigned(CLIENT) == ([Assignment(7, seq, NUMBER, SUBSCRIPTION, ACK)], None)
    assert await store.assigned(OTHER) == ([], None)
    assert await store.owner(NUMBER, before) == Owner(CLIENT, 7, seq, before)
    assert await store.owner(NUMBER, time.time_ns() + 10**9) is None, "the message is newer"
    assert await store.owner(NUMBER + 1, before) is None


async def test_what_is_assigned_is_not_assigned_again(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    await assign(js, CLIENT, 7)
    with pytest.raises(ApiError) as caught:
        await assign(js, OTHER, 8)
    assert caught.value.err_code == TAKEN[0]
    now = time.time_ns()
    seq = await assign(js, OTHER, 8, arrived_at=now, sole=False)
    assert await SharedStore(js).owner(NUMBER, 0) == Owner(OTHER, 8, seq, now)


async def test_an_assignment_that_was_stored_too_late_is_void(js: NatsPyJetStream) -> None:
    """The group has given the message to another member since."""
    await ensure_streams(js)
    store = SharedStore(js)
    await assign(js, CLIENT, 7, 14.0)
    assert await store.owner(NUMBER, 0) is not None
    await assign(js, CLIENT, 7, 16.0, sole=False)
    assert await store.owner(NUMBER, 0) is None
    assert await store.assigned(CLIENT) == ([], None)
    assert await stored.get_last(js, STREAM, f"{ASSIGNED}>") is None, "it was removed"


async def test_an_assignment_of_a_former_gateway(js: NatsPyJetStream) -> None:
    """It does not say when the message had come."""
    await ensure_streams(js)
    block = headers.build([("Nmqtt-PacketId", "7"), ("Nmqtt-Seq", f"{NUMBER}"), ("Nmqtt-Share", "x")])
    seq = await publish(js, assigned_subject(CLIENT, NUMBER), b"", block)
    assert await SharedStore(js).assigned(CLIENT) == ([Assignment(7, seq, NUMBER, "x")], None)
    assert await SharedStore(js).owner(NUMBER, 0) == Owner(CLIENT, 7, seq)


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
    seq = await publish(js, assigned_subject(CLIENT, NUMBER), b"", block)
    assert await SharedStore(js).assigned(CLIENT) == ([Assignment(7, seq, NUMBER, "")], None)
