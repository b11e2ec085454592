# SPDX-License-Identifier: Apache-2.0
"""Shared subscriptions of one client: joining and leaving groups, and messages that are assigned to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mqtt_nats.backbone import retry
from mqtt_nats.protocol.transient_sender import TransientSender
from mqtt_nats.sessions.groups import subscribe as shared_subscribe
from mqtt_nats.sessions.groups.ownership import NAK
from mqtt_nats.sessions.groups.subscribe import (
    acknowledged,
    ask_groups_again,
    begin_shared,
    detach,
    leave_at_end,
    look_after,
    recover_inboxes,
    recover_queues,
    rejoin_shared,
    resend,
    settled,
    subscribe_shared,
    unsubscribe_shared,
)
from mqtt_streams.api import ApiError, RequestTimeout
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import PREFIX, SharedSubscription
from mqtt_streams.shared import CONSUMER_PREFIX, Assignment, SharedStore, assigned_subject, group_hash, members_subject
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeClient, FakeServices, FakeSide, as_client, as_services, v5_of

pytestmark = pytest.mark.sources

TEXT = "$share/group/topic"
GROUP = group_hash("group", "topic")
WANTED = SharedSubscription(1, False, None, 0)
NEXT = f"$JS.API.CONSUMER.MSG.NEXT.{MESSAGES}.{CONSUMER_PREFIX}{GROUP}".encode()


@pytest.fixture
def client() -> FakeClient:
    """A durable session whose record is stored, and whose machine is open."""
    services = FakeServices()
    client = FakeClient(services)
    assert client.record is not None
    client.epoch = services.fake_inbox.put(PREFIX + client.hash, client.record.encode())
    client.durable_side = FakeSide(client)
    client.durable_side.machine.start()
    for _ in range(7):
        services.fake_inbox.put("$MQTT.msgs.topic")
    return client


async def subscribe(client: FakeClient, wanted: SharedSubscription = WANTED) -> None:
    """SUBSCRIBE; the mark of its beginning is answered."""
    work = asyncio.create_task(subscribe_shared(as_client(client), {TEXT: wanted}))
    await aeventually(lambda: bool(client.services.fake_store.fake_put))
    operation = client.services.fake_store.fake_put.pop()[3]
    operation.failed(ApiError(400, 10071, f"wrong last sequence: {client.services.fake_inbox.last[MESSAGES]}"))
    await work


def sent(client: FakeClient, subject: bytes) -> list[bytes]:
    """The frames for a subject since the last look."""
    out = client.services.fake_link.out
    found = [frame for frame in out if frame.split(b" ")[1] == subject]
    out[:] = [frame for frame in out if frame not in found]
    return found


# -- joining and leaving ------------------------------------------------------------------------------


async def test_a_member_joins(client: FakeClient) -> None:
    await subscribe(client)
    services = client.services
    assert v5_of(client).shared == {TEXT: replace(WANTED, start=8)}
    assert client.epoch == services.fake_inbox.last["$MQTT_sess"]
    assert members_subject(GROUP, client.hash) in services.fake_inbox.subjects("$MQTT_shared")
    assert services.fake_inbox.consumers[MESSAGES][CONSUMER_PREFIX + GROUP]["config"]["opt_start_seq"] == 8
    assert list(services.fake_shared.fake_subjects.values()) == [b"topic"]
    assert services.nodes.fake_fences == 1


async def test_options_change_and_the_beginning_stays(client: FakeClient) -> None:
    await subscribe(client)
    assert client.shares is not None
    member = client.shares[TEXT]
    client.services.fake_inbox.put("$MQTT.msgs.topic")
    await subscribe(client, replace(WANTED, qos=2))
    assert client.shares[TEXT] is member
    assert (v5_of(client).shared[TEXT].start, member.source.qos) == (8, 2)
    assert client.durable_side.has_pubrels


async def test_a_member_leaves(client: FakeClient) -> None:
    """Its note goes, with the last member the consumer, and the record does not name it any more."""
    await subscribe(client)
    await unsubscribe_shared(as_client(client), [TEXT])
    assert (client.shares, v5_of(client).shared) == ({}, {})
    assert client.services.fake_inbox.subjects("$MQTT_shared") == []
    assert client.services.fake_inbox.consumers[MESSAGES] == {}


async def test_many_groups_are_left_together(client: FakeClient) -> None:
    """The session record is read once, after all registrations: they may be newer than the record else."""
    texts = [f"$share/group/{number}" for number in range(100)]
    inbox = client.services.fake_inbox
    for number in range(100):
        inbox.put(members_subject(group_hash("group", str(number)), client.hash))
    v5_of(client).leaving = texts
    await rejoin_shared(as_client(client), [])
    assert inbox.subjects("$MQTT_shared") == []
    read = [subject.rpartition(".")[2] for subject in inbox.asked if ".MSG.GET." in subject]
    assert read == ["$MQTT_shared"] * 100 + ["$MQTT_sess"]


async def test_nothing_to_leave(client: FakeClient) -> None:
    await unsubscribe_shared(as_client(client), [])
    assert client.services.fake_inbox.asked == []


async def test_a_session_that_ends_with_its_connection_leaves_afterwards(client: FakeClient) -> None:
    await subscribe(client)
    assert await leave_at_end(as_client(client))
    assert client.services.fake_inbox.subjects("$MQTT_shared") == []
    assert client.services.fake_inbox.consumers[MESSAGES] == {}


async def test_nobody_answers_then(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done again: nobody else would do it."""
    await subscribe(client)
    monkeypatch.setattr(retry, "RETRY_PAUSE_S", 0.0)
    failures = 3

    def fail(subject: str) -> None:
        nonlocal failures
        if subject.startswith("$JS.API.STREAM.PURGE") and failures:
            failures -= 1
            raise RequestTimeout("no answer")

    client.services.fake_inbox.before = fail
    await leave_at_end(as_client(client))
    assert client.services.fake_inbox.subjects("$MQTT_shared") == []


async def test_that_jetstream_refuses_it_is_logged(client: FakeClient, caplog: pytest.LogCaptureFixture) -> None:
    """The caller is told, since the record has to stay."""
    await subscribe(client)

    def fail(subject: str) -> None:
        raise ApiError(404, 10059, "stream not found")

    client.services.fake_inbox.before = fail
    assert not await leave_at_end(as_client(client))
    assert "it could not leave its shared subscriptions yet: " in caplog.text


async def test_a_member_that_has_left_does_not_come_back(client: FakeClient) -> None:
    """The group's consumer was deleted, and the client unsubscribes before the consumer would be created again."""
    await subscribe(client)
    assert client.shares is not None
    member = client.shares[TEXT]
    client.services.fake_link.fake_bring(member.address, headers=b"NATS/1.0 409 Consumer Deleted\r\n\r\n")
    assert len(client.fake_jobs) == 1
    await unsubscribe_shared(as_client(client), [TEXT])
    await client.fake_work()
    assert client.services.fake_inbox.subjects("$MQTT_shared") == []
    assert client.services.fake_inbox.consumers[MESSAGES] == {}


async def test_a_former_gateway_registers_the_member_late(client: FakeClient) -> None:
    """Whoever has stored the registration: it goes with the subscription."""
    await subscribe(client)
    client.services.fake_inbox.put(members_subject(GROUP, client.hash))
    await unsubscribe_shared(as_client(client), [TEXT])
    assert client.services.fake_inbox.subjects("$MQTT_shared") == []


async def test_a_resumed_session_leaves_what_it_had_left(client: FakeClient) -> None:
    client.services.fake_inbox.put(members_subject(GROUP, client.hash))
    v5_of(client).leaving = [TEXT]
    await rejoin_shared(as_client(client), [])
    assert (client.shares, v5_of(client).leaving) == (None, [])
    assert client.services.fake_inbox.subjects("$MQTT_shared") == []


async def test_a_resumed_session_joins_again(client: FakeClient, caplog: pytest.LogCaptureFixture) -> None:
    """A group that this gateway does not take, as of another version, is left out."""
    v5_of(client).shared = {TEXT: replace(WANTED, start=5), "$share/group/#/x": WANTED}
    assert client.record is not None
    client.epoch = client.services.fake_inbox.put(PREFIX + client.hash, client.record.encode())
    begun = begin_shared(as_client(client), set())
    assert client.shares is not None
    assert begun == [client.shares[TEXT]]
    assert begun[0].queues
    await rejoin_shared(as_client(client), begun)
    assert list(client.shares) == [TEXT]
    assert "is not resumed" in caplog.text
    assert members_subject(GROUP, client.hash) in client.services.fake_inbox.subjects("$MQTT_shared")


async def test_a_resumed_session_without_groups(client: FakeClient) -> None:
    assert begin_shared(as_client(client), set()) == []
    await rejoin_shared(as_client(client), [])
    assert client.shares is None


async def test_a_denied_group_is_not_joined_again(client: FakeClient) -> None:
    """The subscription is there to be ended, and takes no part."""
    v5_of(client).shared = {TEXT: WANTED}
    assert begin_shared(as_client(client), {TEXT}) == []
    assert client.shares is not None
    assert client.shares[TEXT].queues == []
    await unsubscribe_shared(as_client(client), [TEXT])
    assert v5_of(client).shared == {}


# -- messages -----------------------------------------------------------------------------------------


async def test_messages_are_asked_for_when_there_is_room(client: FakeClient) -> None:
    await subscribe(client)
    acknowledged(as_client(client))
    assert [frame.splitlines()[1] for frame in sent(client, NEXT)] == [b'{"batch":10,"expires":30000000000}']
    acknowledged(as_client(client))  # one request is open
    assert sent(client, NEXT) == []
    ask_groups_again(as_services(client.services), {"another"})
    assert sent(client, NEXT) == []
    ask_groups_again(as_services(client.services), {GROUP})
    assert len(sent(client, NEXT)) == 1


async def test_what_is_renewed_with_a_connection(client: FakeClient) -> None:
    await subscribe(client)
    acknowledged(as_client(client))
    client.services.fake_link.out.clear()
    recover_inboxes(as_services(client.services))
    assert client.shares is not None
    assert [subject for _, subject in client.services.fake_link.fake_renewed] == [client.shares[TEXT].address]
    assert len(sent(client, NEXT)) == 1
    recover_queues(as_services(client.services))
    assert client.services.nodes.fake_renewed == 1
    assert client.services.fake_shared.out == [b"SUB topic %b 1\r\n" % GROUP.encode()]


async def test_a_regular_session_answers_for_its_client(client: FakeClient) -> None:
    """What its client has not acknowledged at the end goes back to the group."""
    client.durable_side, client.regular_side = None, TransientSender(10, 10, lambda data: None)
    await subscribe(client)
    assert client.shares is not None
    held = client.shares[TEXT].held
    held |= {b"$JS.ACK.one", b"$JS.ACK.two"}
    assert client.regular_side.settled is not None
    client.regular_side.settled(b"$JS.ACK.one")
    assert sent(client, b"$JS.ACK.one") == [b"PUB $JS.ACK.one 0\r\n\r\n"]
    detach(as_client(client))
    assert sent(client, b"$JS.ACK.two") == [b"PUB $JS.ACK.two %d\r\n%b\r\n" % (len(NAK), NAK)]
    assert held == set()


def test_a_message_of_a_group_that_was_left_is_acknowledged_all_the_same(client: FakeClient) -> None:
    settled(as_client(client), b"$JS.ACK.one")
    assert sent(client, b"$JS.ACK.one") == [b"PUB $JS.ACK.one 0\r\n\r\n"]


async def test_slow_members_get_more_time(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.durable_side, client.regular_side = None, TransientSender(10, 10, lambda data: None)
    await subscribe(client)
    assert client.shares is not None
    client.shares[TEXT].held.add(b"$JS.ACK.one")
    monkeypatch.setattr(shared_subscribe, "LOOK_AFTER_ROUND_S", 0.0)
    monkeypatch.setattr(shared_subscribe, "PROGRESS_REQUEST_S", -1.0)
    looking = asyncio.create_task(look_after(as_services(client.services)))
    await aeventually(lambda: b"PUB $JS.ACK.one 4\r\n+WPI\r\n" in client.services.fake_link.out)
    looking.cancel()


async def test_sessions_without_groups_are_not_looked_at(client: FakeClient) -> None:
    client.durable_side, client.regular_side = None, TransientSender(10, 10, lambda data: None)
    other = FakeClient(client.services, "other")
    await subscribe(client)
    registry = client.services.registry
    assert registry.sharing == {client}
    registry.leave(as_client(other))
    assert registry.sharing == {client}
    registry.leave(as_client(client))
    assert registry.sharing == set()


async def test_a_new_leader_gets_the_last_acknowledgements(client: FakeClient) -> None:
    """Those of before a request that one leader has served for half a minute are not sent again."""
    client.durable_side, client.regular_side = None, TransientSender(10, 10, lambda data: None)
    await subscribe(client)
    assert client.shares is not None
    member = client.shares[TEXT]
    acknowledged(as_client(client))

    def repeated() -> list[bytes]:
        client.services.fake_link.out.clear()
        ask_groups_again(as_services(client.services), {GROUP})
        return [frame.split(b" ")[1] for frame in client.services.fake_link.out if frame.startswith(b"PUB $JS.ACK.")]

    def expire() -> None:
        client.services.fake_link.fake_bring(member.address, headers=b"NATS/1.0 408 Request Timeout\r\n\r\n")

    member.source.settle(b"$JS.ACK.one")
    assert repeated() == [b"$JS.ACK.one"]
    expire()
    member.source.settle(b"$JS.ACK.two")
    assert repeated() == [b"$JS.ACK.one", b"$JS.ACK.two"]
    expire()
    assert repeated() == [b"$JS.ACK.two"]
    expire()
    assert repeated() == []


# -- messages that are assigned to a client -----------------------------------------------------------


async def test_an_assigned_message_is_sent_again(client: FakeClient) -> None:
    side = client.durable_side
    await resend(as_client(client), [Assignment(50000, 3, 5, TEXT, b"$JS.ACK.own")])
    side.machine.pump()
    assert side.assigned == {3}
    assert [call for call in side.fake_ports.calls if call[0] == "publish"] == [("publish", -5, 2, True)]


async def test_what_the_client_has_is_not_sent_again(client: FakeClient) -> None:
    """Its PUBREL is owed; the message is acknowledged to the group once more."""
    side = client.durable_side
    side.machine.owe(50000, 5)
    await resend(as_client(client), [Assignment(50000, 3, 5, TEXT, b"$JS.ACK.own")])
    ((token, identifier),) = side.fake_confirmed
    assert (token[:3], identifier) == (b"=3 ", 50000)
    assert 50000 in side.machine.releases
    assert not side.machine.others


async def test_a_message_that_was_removed(client: FakeClient) -> None:
    """The client may know its identifier, and is asked to give it up."""
    side = client.durable_side
    await resend(as_client(client), [Assignment(50000, 3, 99, TEXT, b"")])
    assert side.machine.releases[50000].records == [b"=3"]


async def test_a_message_of_a_stream_that_was_replaced(client: FakeClient) -> None:
    side = client.durable_side
    side.replaced = 4
    await resend(as_client(client), [Assignment(50000, 3, 5, TEXT, b"")])
    assert side.machine.releases[50000].former
    assert not side.machine.others


@pytest.mark.parametrize("owed", [True, False])
@pytest.mark.parametrize("epochs", [(1, 9), (9, 1), (0, 0)])
async def test_two_assignments_with_one_packet_identifier(
    client: FakeClient, epochs: tuple[int, int], owed: bool
) -> None:
    """The later connection has sent its message; the other is sent for the first time, under another identifier."""
    side, inbox = client.durable_side, client.services.fake_inbox
    later = 1 if epochs[1] > epochs[0] or (owed and epochs[0] == epochs[1]) else 0
    both = []
    for sequence, epoch in zip((5, 6), epochs, strict=True):
        subject = assigned_subject(client.hash, GROUP, sequence)
        both.append(Assignment(50000, inbox.put(subject), sequence, TEXT, b"$JS.ACK.own", epoch, subject))
    sent, unsent = both[later], both[1 - later]
    if owed:
        side.machine.owe(50000, sent.message_seq)
    await resend(as_client(client), both)
    side.machine.pump()
    published = {call[1:] for call in side.fake_ports.calls if call[0] == "publish"}
    assert published == {(-unsent.message_seq, 2, False)} | (set() if owed else {(-sent.message_seq, 2, True)})
    assert side.machine.inflight.keys() == {49153} | (set() if owed else {50000})
    assert side.machine.releases.keys() == ({50000} if owed else set())
    found, _ = await SharedStore(inbox).assigned(client.hash)
    assert [(one.message_seq, one.epoch) for one in found if one.packet_id == 49153] == [
        (unsent.message_seq, client.epoch)
    ]


@pytest.mark.parametrize(("stored_at", "unsent"), [(9, True), (5, False), (1, False)])
async def test_an_assignment_with_the_packet_identifier_of_an_owed_pubrel(
    client: FakeClient, stored_at: int, unsent: bool
) -> None:
    """A later connection has stored the PUBREL of another message: the client has that one, and not the assigned one.

    The PUBREL of the same connection, or of an earlier one, was answered before the identifier was used again.
    """
    side, inbox = client.durable_side, client.services.fake_inbox
    subject = assigned_subject(client.hash, GROUP, 5)
    one = Assignment(50000, inbox.put(subject), 5, TEXT, b"$JS.ACK.own", 5, subject)
    side.machine.owe(50000, 6, epoch=stored_at)
    await resend(as_client(client), [one])
    side.machine.pump()
    assert {call[1:] for call in side.fake_ports.calls if call[0] == "publish"} == {(-5, 2, not unsent)}
    assert side.machine.inflight.keys() == {49153 if unsent else 50000}
    assert side.machine.releases.keys() == ({50000} if unsent else set())


@pytest.mark.parametrize("known", [None, {1}])
async def test_nothing_is_assigned(client: FakeClient, known: set[int] | None) -> None:
    """What the connection knows already stays known."""
    client.durable_side.assigned = known
    await resend(as_client(client), [])
    assert client.durable_side.assigned == known
