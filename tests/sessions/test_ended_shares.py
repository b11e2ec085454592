# SPDX-License-Identifier: Apache-2.0
"""QoS 1 messages of ended shared subscriptions: in the session record until they are acknowledged or with the group."""

from __future__ import annotations

import pytest

from mqtt_nats.messages.message import Stored
from mqtt_nats.protocol.transient_sender import TransientSender
from mqtt_nats.sessions.groups.ended_shares import end_share, members_of, resend_unacknowledged
from mqtt_nats.sessions.groups.member import Membership
from mqtt_nats.sessions.groups.ownership import NAK
from mqtt_nats.sessions.groups.subscribe import detach, settled
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import PREFIX, EndedShare, SharedSubscription
from mqtt_streams.shared import CONSUMER_PREFIX, group_hash
from tests.sessions.fakes import FakeClient, FakeServices, FakeSide, as_client, v5_of

pytestmark = pytest.mark.sources

TEXT = "$share/group/topic"
GROUP = group_hash("group", "topic")
FIRST, SECOND = 49153, 49154


@pytest.fixture
def client() -> FakeClient:
    """A durable session whose record is stored, and seven messages."""
    services = FakeServices()
    client = FakeClient(services)
    assert client.record is not None
    client.epoch = services.fake_inbox.put(PREFIX + client.hash, client.record.encode())
    client.durable_side = FakeSide(client)
    client.durable_side.machine.start()
    for _ in range(7):
        services.fake_inbox.put("$MQTT.msgs.topic")
    return client


def member_with(client: FakeClient, *sequences: int) -> Membership:
    """A member whose client has got these messages."""
    member = Membership(as_client(client), TEXT, SharedSubscription(1, True, 7, 1))
    client.make_shares()[TEXT] = member
    machine = client.durable_side.machine
    for sequence in sequences:
        body = Stored("topic", b"\0\5topic", b"", 1, 0)
        machine.share(member.source, sequence, machine.allocate_packet_id(sequence), 1, body, b"$JS.ACK.%d" % sequence)
    return member


def out(client: FakeClient, subject: bytes) -> list[bytes]:
    """The frames for a subject."""
    return [frame for frame in client.services.fake_link.out if frame.split(b" ")[1] == subject]


def test_the_record_names_what_was_sent(client: FakeClient) -> None:
    """Twice, where the client subscribes again meanwhile; what nobody has to acknowledge leaves no trace."""
    end_share(as_client(client), member_with(client, 3))
    end_share(as_client(client), member_with(client, 5))
    assert v5_of(client).ended == {TEXT: EndedShare(True, 7, ((FIRST, 3), (SECOND, 5)))}
    end_share(as_client(client), member_with(client))
    assert client.ended_shares is not None
    assert len(client.ended_shares.members) == 2


async def test_the_record_forgets_what_is_acknowledged(client: FakeClient) -> None:
    """One write for all that is acknowledged meanwhile."""
    member = member_with(client, 3, 5)
    end_share(as_client(client), member)
    ended = client.ended_shares
    assert ended is not None
    assert not ended.take_acknowledged()
    machine = client.durable_side.machine
    machine.on_drained_message = lambda delivery: ended.acknowledged(delivery.source)
    machine.acknowledged(4, [FIRST, SECOND])
    (job,) = client.fake_jobs
    await job
    assert v5_of(client).ended == {}
    assert list(members_of(as_client(client))) == [member]  # not as an ended one
    assert not ended.members
    assert client.epoch == client.services.fake_inbox.last["$MQTT_sess"]


def test_what_is_left_at_the_end_goes_to_the_group(client: FakeClient) -> None:
    member = member_with(client, 3)
    del client.make_shares()[TEXT]
    end_share(as_client(client), member)
    detach(as_client(client))
    assert out(client, b"$JS.ACK.3") == [b"PUB $JS.ACK.3 %d\r\n%b\r\n" % (len(NAK), NAK)]


def test_a_regular_session_has_it_until_its_end(client: FakeClient) -> None:
    client.durable_side, client.regular_side = None, TransientSender(10, 10, lambda data: None)
    member = Membership(as_client(client), TEXT, SharedSubscription(1, False, None, 1))
    member.held |= {b"$JS.ACK.3", b"$JS.ACK.5"}
    end_share(as_client(client), member)
    assert v5_of(client).ended == {}
    settled(as_client(client), b"$JS.ACK.3")
    assert list(members_of(as_client(client))) == [member]
    settled(as_client(client), b"$JS.ACK.5")
    assert not list(members_of(as_client(client)))


@pytest.mark.parametrize(("begin", "again"), [(None, True), (6, True), (5, False), (1, False)])
async def test_sent_again_unless_the_group_has_it(client: FakeClient, begin: int | None, again: bool) -> None:
    """A consumer of the group that begins at the message, or before it, delivers it to another member."""
    if begin is not None:
        client.services.fake_inbox.consumers[MESSAGES][CONSUMER_PREFIX + GROUP] = {"config": {"opt_start_seq": begin}}
    v5_of(client).ended = {TEXT: EndedShare(True, 7, ((FIRST, 5),))}
    await resend_unacknowledged(as_client(client), set())
    side = client.durable_side
    assert [one for one in side.fake_ports.calls if one[0] == "publish"] == [("publish", -5, 1, True)] * again
    assert bool(v5_of(client).ended) == again
    assert side.take_record_change() != again
    if again:
        (member,) = members_of(as_client(client))
        assert (member.source.kept, member.source.identifier, member.text) == (True, 7, TEXT)


async def test_another_identifier_where_the_former_is_in_use(client: FakeClient) -> None:
    v5_of(client).ended = {TEXT: EndedShare(False, None, ((50000, 5), (50001, 99)))}
    await resend_unacknowledged(as_client(client), {50000})
    assert v5_of(client).ended == {TEXT: EndedShare(False, None, ((FIRST, 5),))}, "message 99 was removed"


async def test_a_filter_that_is_not_taken_any_more(client: FakeClient, caplog: pytest.LogCaptureFixture) -> None:
    v5_of(client).ended = {"$share/group/#/x": EndedShare(False, None, ((50000, 5),))}
    await resend_unacknowledged(as_client(client), set())
    assert v5_of(client).ended == {}
    assert "are not sent again" in caplog.text
