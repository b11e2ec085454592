# SPDX-License-Identifier: Apache-2.0
"""Assignments that are stored when the session has moved: the gateway of its client sends the message."""

from __future__ import annotations

import pytest

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.sessions.groups.member import Membership
from mqtt_nats.sessions.groups.subscribe import LateAssignments
from mqtt_streams.gateway_subjects import ASSIGNED
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import SharedSubscription
from mqtt_streams.shared import SharedStore, assigned_block, assigned_subject, group_hash
from tests.harness.jetstream import NS
from tests.sessions.fakes import FakeClient, FakeServices, FakeSide, as_client

TEXT = "$share/group/topic"
GROUP = group_hash("group", "topic")


class Setup:
    """A member of a group, a stored message, and an assignment of it that this connection has not seen."""

    def __init__(self) -> None:
        self.services = FakeServices()
        self.late = LateAssignments(self.services.nats, self.services.registry)
        self.client = FakeClient(self.services)
        self.client.shares = {TEXT: Membership(as_client(self.client), TEXT, SharedSubscription(2, False, None, 1))}
        self.side = self.client.durable_side = FakeSide(self.client)
        self.side.machine.start()
        self.message = self.services.fake_inbox.put("$MQTT.msgs.topic", b"text", b"NATS/1.0\r\nNmqtt-Pub:2\r\n\r\n")
        block = assigned_block(50000, GROUP, self.message, TEXT, self.services.fake_inbox.now, b"", sole=False)
        self.record = self.services.fake_inbox.put(assigned_subject(self.client.hash, GROUP, self.message), b"", block)

    def published(self) -> list[tuple[object, ...]]:
        self.side.machine.pump()
        return [call for call in self.side.fake_ports.take() if call[0] == "publish"]


@pytest.fixture
def setup() -> Setup:
    return Setup()


async def test_another_gateway_names_it(setup: Setup) -> None:
    """The message has the epoch of its sender: an owed PUBREL may be left of an earlier use of its first identifier."""
    setup.client.epoch = 9
    setup.services.fake_link.fake_bring(ASSIGNED, b"%d client" % setup.record)
    await setup.client.fake_work()
    ((found,), _) = await SharedStore(setup.services.fake_inbox).assigned(setup.client.hash)
    assert setup.side.assigned == {setup.record, found.seq}
    assert setup.published() == [("publish", -setup.message, 2, False)]
    assert setup.side.machine.inflight.keys() == {found.packet_id} == {49153}
    assert found.epoch == 9


async def test_it_is_sent_once(setup: Setup) -> None:
    for _ in range(2):
        setup.services.fake_link.fake_bring(ASSIGNED, b"%d client" % setup.record)
    await setup.client.fake_work()
    assert len(setup.published()) == 1
    assert len([one for one in setup.services.fake_inbox.asked if one.endswith(MESSAGES)]) == 1


async def test_this_gateway_names_it_to_others_and_to_itself(setup: Setup) -> None:
    """A connection to NATS does not get its own messages."""
    setup.late.tell("client", setup.record)
    body = b"%d client" % setup.record
    assert setup.services.fake_link.out == [b"PUB %b %d\r\n%b\r\n" % (ASSIGNED, len(body), body)]
    await setup.client.fake_work()
    assert len(setup.published()) == 1


@pytest.mark.parametrize("payload", [b"", b"client", b"-1 client", b"%d client" % 10**20, b"7 \xff"])
def test_what_cannot_be_read_is_ignored(setup: Setup, payload: bytes) -> None:
    setup.services.fake_link.fake_bring(ASSIGNED, payload)
    assert setup.client.fake_jobs == []


@pytest.mark.parametrize("name", ["alive", "durable"])
def test_a_client_without_a_session_here_is_none(setup: Setup, name: str) -> None:
    setattr(setup.client, name, False)
    setup.services.fake_link.fake_bring(ASSIGNED, b"%d client" % setup.record)
    assert setup.client.fake_jobs == []


async def test_an_assignment_that_is_not_there(setup: Setup) -> None:
    setup.services.fake_link.fake_bring(ASSIGNED, b"99 client")
    await setup.client.fake_work()
    assert (setup.side.assigned, setup.published()) == (None, [])


async def test_an_assignment_that_was_stored_too_late(setup: Setup) -> None:
    """It is void: the group may have given the message to another member."""
    block = assigned_block(50001, GROUP, setup.message, TEXT, setup.services.fake_inbox.now, b"", sole=False)
    setup.services.fake_inbox.now += 60 * NS
    record = setup.services.fake_inbox.put(assigned_subject(setup.client.hash, GROUP, 2), b"", block)
    setup.services.fake_link.fake_bring(ASSIGNED, b"%d client" % record)
    await setup.client.fake_work()
    assert setup.published() == []


async def test_a_subscription_that_has_ended_is_left_to_the_next_resume(setup: Setup) -> None:
    setup.client.shares = None
    setup.services.fake_link.fake_bring(ASSIGNED, b"%d client" % setup.record)
    await setup.client.fake_work()
    assert (setup.side.assigned, setup.published()) == (None, [])


async def test_a_message_that_was_removed(setup: Setup) -> None:
    """Nobody has sent it: the assignment goes, and no identifier is asked for."""
    setup.services.fake_inbox.messages["$MQTT_msgs"].clear()
    setup.services.fake_link.fake_bring(ASSIGNED, b"%d client" % setup.record)
    await setup.client.fake_work()
    assert setup.services.fake_dropped == [b"%d" % setup.record]
    assert setup.published() == []


def test_a_reconnect(setup: Setup) -> None:
    setup.services.nats.reconnect.renew(Phase.REQUESTS)
    assert setup.services.fake_link.fake_renewed == [(b"1", ASSIGNED)]
