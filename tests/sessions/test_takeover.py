# SPDX-License-Identifier: Apache-2.0
"""Which acknowledgements of writes to session records tell a client that its session has moved."""

from __future__ import annotations

from typing import cast

import pytest

from mqtt_nats.backbone.connect import NatsLinks, Phase
from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.client.client import Client
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_nats.sessions.takeover import IDLE_BUCKETS_MOST, SIGNALS, Claims
from mqtt_nats.transport.connection import Connection
from mqtt_streams.hashing import second_key
from mqtt_streams.sessions import V5, SessionRecord, claim_subject
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeClient, FakeInbox, FakeLink, FakeServices, Handler, as_client, as_inbox, as_link

ACK = b'{"stream":"$MQTT_sess","seq":%d}'


@stands_for(RequestInbox)
class FakeLiteralInbox(FakeInbox):
    """Stands for `RequestInbox`: keeps the subjects of answers."""

    def __init__(self) -> None:
        super().__init__()
        self.fake_literal: list[bytes] = []

    def literal(self, subject: bytes, headers: bytes, payload: bytes) -> None:
        self.fake_literal.append(subject)


@stands_for(Client)
class FakeClaimed:
    """Stands for `Client`: counts how often it was taken over."""

    def __init__(self, name: str, epoch: int) -> None:
        self.hash = name
        self.epoch = epoch
        self.foreign = 0
        self.taken = 0

    def hear_claim(self, sequence: int) -> None:
        self.foreign = max(self.foreign, sequence)

    def taken_over(self) -> None:
        self.taken += 1


class Setup:
    """A gateway of the name ``own00000``."""

    def __init__(self, domain: str = "") -> None:
        services, inbox = FakeServices(), FakeLiteralInbox()
        self.literal = inbox.fake_literal
        self.link = FakeLink()
        others = services.nats
        nats = NatsLinks(as_link(self.link), others.wild, others.shared, as_inbox(inbox), others.store)
        self.reconnect = nats.reconnect
        self.claims = Claims(nats, services.streams.sessions, domain, "own00000")

    @property
    def handlers(self) -> dict[bytes, Handler]:
        """The handlers of present subscriptions by subject."""
        return {self.link.fake_subjects[sid]: handler for sid, handler in self.link.handlers.items()}

    def client(self, name: str, epoch: int) -> FakeClaimed:
        client = FakeClaimed(name, epoch)
        self.claims.listen(cast(Client, client))
        return client

    def leave(self, client: FakeClaimed) -> bool:
        return self.claims.leave(cast(Client, client))

    def hear(self, gateway: str, client: str, payload: bytes) -> None:
        subject = f"$MQTT.JSA.{gateway}.SP.{client}.x".encode()
        self.handlers[SIGNALS](subject, b"", b"", payload)


def test_a_later_write_of_somebody_else() -> None:
    setup = Setup()
    one, other = setup.client("one", 5), setup.client("other", 5)
    setup.hear("foreign0", "one", ACK % 4)
    assert (one.taken, one.foreign) == (0, 4)
    setup.hear("foreign0", "one", ACK % 6)
    assert (one.taken, one.foreign) == (1, 6)
    assert (other.taken, other.foreign) == (0, 0)
    setup.hear("foreign0", "nobody", ACK % 7)


def test_before_its_own_claim_is_confirmed() -> None:
    """What is heard then is compared with it afterwards."""
    setup = Setup()
    client = setup.client("one", 0)
    setup.hear("foreign0", "one", ACK % 9)
    setup.hear("foreign0", "one", ACK % 8)
    assert (client.taken, client.foreign) == (0, 9)


def test_its_own_writes_are_answers() -> None:
    setup = Setup()
    client = setup.client("one", 5)
    setup.hear("own00000", "one", ACK % 6)
    setup.claims.named("another0")
    setup.hear("own00000", "one", ACK % 7)
    setup.hear("another0", "elsewhere", ACK % 8)
    assert setup.literal == [
        b"$MQTT.JSA.own00000.SP.one.x",
        b"$MQTT.JSA.own00000.SP.one.x",
        b"$MQTT.JSA.another0.SP.elsewhere.x",
    ]
    assert (client.taken, client.foreign) == (0, 0)


def test_both_connections_of_a_session_hear() -> None:
    setup = Setup()
    former, latter = setup.client("one", 5), setup.client("one", 6)
    setup.hear("foreign0", "one", ACK % 7)
    assert (former.taken, latter.taken) == (1, 1)
    setup.leave(former)
    setup.leave(former)
    setup.hear("foreign0", "one", ACK % 8)
    assert (former.taken, latter.taken) == (1, 2)
    setup.leave(latter)
    setup.hear("foreign0", "one", ACK % 9)
    assert (former.taken, latter.taken) == (1, 2)
    setup.leave(FakeClaimed("never", 0))


@pytest.mark.parametrize(
    "payload",
    [
        b'{"error":{"code":503}}',
        b'{"error":{"code":400},"seq":9}',
        b'{"stream":"$MQTT_sess","seq":9,"domain":"leaf"}',
        b'{"stream":"$MQTT_msgs","seq":9}',
        b'{"seq":9}',
        b'{"seq":"x"}',
        b"{}",
        b"[9]",
        b"9",
        b"",
        b"\xff",
    ],
)
def test_what_is_no_claim(payload: bytes) -> None:
    """A refused write, another domain's stream, anything that a NATS client may have sent."""
    setup = Setup()
    client = setup.client("one", 5)
    setup.hear("foreign0", "one", payload)
    assert (client.taken, client.foreign) == (0, 0)


def test_in_a_domain() -> None:
    setup = Setup("leaf")
    client = setup.client("one", 5)
    setup.hear("foreign0", "one", ACK % 9)
    assert client.taken == 0
    setup.hear("foreign0", "one", b'{"stream":"$MQTT_sess","seq":9,"domain":"leaf"}')
    assert client.taken == 1


def test_who_leaves_learns_whether_others_have_the_session_or_claim_it() -> None:
    """Also one that has not claimed anything: whoever names a client id may fail before."""
    setup = Setup()
    first, second, stranger = setup.client("one", 5), setup.client("one", 0), FakeClaimed("one", 0)
    setup.client("two", 5)
    assert setup.leave(first)
    assert setup.leave(stranger)
    assert not setup.leave(second)
    assert not setup.leave(stranger)


def test_after_a_reconnect() -> None:
    setup = Setup()
    setup.claims.second_keys = False
    setup.reconnect.renew(Phase.CLAIMS)
    assert setup.claims.second_keys
    assert setup.link.fake_renewed == [(b"1", SIGNALS)]


def test_only_claims_that_concern_the_gateway_are_heard() -> None:
    """Claims of buckets without sessions are not; those of second keys always are, as any gateway may have to look."""
    setup = Setup()
    first = setup.client("Aone0000", 5)
    setup.claims.hear_concerned()
    assert not setup.claims.hears_all
    assert set(setup.handlers) == {b"$MQTT.JSA.2.SP.*.*", b"$MQTT.JSA.Ao.SP.*.*"}
    second, other = setup.client("Aotwo000", 5), setup.client("Bone0000", 5)
    assert set(setup.handlers) == {b"$MQTT.JSA.2.SP.*.*", b"$MQTT.JSA.Ao.SP.*.*", b"$MQTT.JSA.Bo.SP.*.*"}
    with setup.claims.hearing("Cone0000"):
        assert b"$MQTT.JSA.Co.SP.*.*" in setup.handlers
    setup.leave(first)
    setup.leave(first)
    setup.leave(other)
    setup.leave(second)
    assert len(setup.handlers) == 4, "clients that connect again need no new subscription"
    third = setup.client("Cone0000", 5)
    for number in range(IDLE_BUCKETS_MOST - 2):
        setup.leave(setup.client(f"a{chr(0x100 + number)}000000", 5))
    assert {b"$MQTT.JSA.Ao.SP.*.*", b"$MQTT.JSA.Bo.SP.*.*"} < set(setup.handlers)
    setup.leave(setup.client("b0000000", 5))
    assert b"$MQTT.JSA.Bo.SP.*.*" not in setup.handlers, "the oldest is given up"
    setup.leave(setup.client("b1000000", 5))
    assert b"$MQTT.JSA.Ao.SP.*.*" not in setup.handlers
    setup.leave(third)
    assert len(setup.handlers) == IDLE_BUCKETS_MOST + 1


def test_a_bucket_that_is_used_again_is_not_given_up() -> None:
    setup = Setup()
    setup.claims.hear_concerned()
    setup.leave(setup.client("Aone0000", 5))
    again = setup.client("Atwo0000", 5)
    client = setup.client("Aone0000", 5)
    for number in range(IDLE_BUCKETS_MOST + 1):
        setup.leave(setup.client(f"a{chr(0x100 + number)}000000", 5))
    setup.leave(again)
    setup.handlers[b"$MQTT.JSA.Ao.SP.*.*"](claim_subject("Aone0000", "foreign0", "x").encode(), b"", b"", ACK % 6)
    assert client.taken == 1


def test_claims_whose_subjects_name_the_bucket() -> None:
    setup = Setup()
    client = setup.client("one00000", 5)
    setup.claims.hear_concerned()
    handler = setup.handlers[b"$MQTT.JSA.on.SP.*.*"]
    own = claim_subject("one00000", "own00000", "x").encode()
    handler(own, b"", b"", ACK % 6)
    assert (setup.literal, client.taken) == ([own], 0)
    handler(claim_subject("one00000", "foreign0", "x").encode(), b"", b"", ACK % 7)
    assert (setup.literal, client.taken) == ([own], 1)


def test_all_claims_are_heard_again() -> None:
    setup = Setup()
    setup.client("one00000", 5)
    assert not setup.claims.hear_all()
    setup.claims.hear_concerned()
    assert setup.claims.hear_all()
    assert set(setup.handlers) == {SIGNALS}
    setup.claims.hear_concerned()
    setup.reconnect.renew(Phase.CLAIMS)
    assert set(setup.handlers) == {SIGNALS}
    assert setup.claims.hears_all


def test_a_claim_of_a_second_key() -> None:
    setup = Setup()
    setup.claims.second_keys = False
    setup.claims.hear_concerned()
    key = second_key("one", "")
    subject = claim_subject(key, "foreign0", "x").encode()
    setup.handlers[b"$MQTT.JSA.2.SP.*.*"](subject, b"", b"", ACK % 6)
    assert subject.startswith(b"$MQTT.JSA.2.SP.")
    assert setup.claims.second_keys


# -- the connections of one client --------------------------------------------------------------------


@stands_for(Connection)
class FakeConnection:
    """Stands for `Connection`: whether the client has closed it, and since when nothing has come."""

    def __init__(self) -> None:
        self.number = 1
        self.hung_up = False
        self.silence = 0.0


@stands_for(Client)
class FakeClaimant(FakeClient):
    """Stands for `Client`: a connection that has claimed the session, or has not yet (epoch 0)."""

    def __init__(self, services: FakeServices, epoch: int) -> None:
        super().__init__(services)
        services.registry.clients.clear()
        self.connection = FakeConnection()
        self.epoch = epoch
        self.foreign = 0


def test_the_last_claim_ends_the_former_connection() -> None:
    claims, services = Setup().claims, FakeServices()
    former, latter = FakeClaimant(services, 5), FakeClaimant(services, 6)
    claims.take_over(as_client(former))
    claims.take_over(as_client(former))
    assert former.fake_ended == []
    claims.take_over(as_client(latter))
    assert (former.fake_ended, latter.fake_ended) == (["taken over"], [])
    assert services.registry.clients == {"client": latter}


@pytest.mark.parametrize("foreign", [0, 9], ids=["here", "elsewhere"])
def test_a_claim_after_which_another_one_was_stored(foreign: int) -> None:
    claims, services = Setup().claims, FakeServices()
    former, latter = FakeClaimant(services, 5), FakeClaimant(services, 6)
    former.foreign = foreign
    if not foreign:
        claims.take_over(as_client(latter))
    known = dict(services.registry.clients)
    with pytest.raises(MqttError) as raised:
        claims.take_over(as_client(former))
    assert raised.value.reason is ReasonCode.SESSION_TAKEN_OVER
    assert (services.registry.clients, latter.fake_ended) == (known, [])


def test_a_client_that_has_closed_its_connection_may_be_elsewhere() -> None:
    """Its session may have a record that is younger than its last bytes; of this gateway, one of a later connection."""
    claims, services = Setup().claims, FakeServices()
    client, later = FakeClaimant(services, 0), FakeClaimant(services, 0)
    for one in (client, later):
        claims.listen(as_client(one))
    now = int(natstime.now() * 1e9)
    old, young = (
        SessionRecord("client", v5=V5(owner="another0"), time_ns=at)
        for at in (now - 60_000_000_000, now + 60_000_000_000)
    )
    own = SessionRecord("client", v5=V5(owner=services.identity.id), time_ns=now + 60_000_000_000)
    client.connection.silence = 30.0
    assert not claims.is_elsewhere(as_client(client), young), "the connection is open"
    client.connection.hung_up = True
    found = [claims.is_elsewhere(as_client(client), one) for one in (old, young, own)]
    later.epoch, later.connection.number = 7, client.connection.number + 1
    assert (found, claims.is_elsewhere(as_client(client), own)) == ([False, True, False], True)


@pytest.mark.parametrize("number", [1, 3], ids=["earlier", "later"])
def test_a_client_whose_later_connection_was_authenticated_sooner(number: int) -> None:
    claims, services = Setup().claims, FakeServices()
    other, client = FakeClaimant(services, 7), FakeClaimant(services, 0)
    other.connection.number, client.connection.number = number, 2
    for one in (other, client):
        claims.listen(as_client(one))
    client.connection.hung_up = True
    own = SessionRecord("client", v5=V5(owner=services.identity.id))
    assert claims.is_elsewhere(as_client(client), own) == (number == 3)


def test_a_later_connection_keeps_the_session_that_it_has_claimed_first() -> None:
    """[MQTT-3.1.4-2] (3.1.1), [MQTT-3.1.4-3] (5.0): both are open; answers of JetStream come in any order."""
    claims, services = Setup().claims, FakeServices()
    client, later = FakeClaimant(services, 0), FakeClaimant(services, 0)
    for one in (client, later):
        claims.listen(as_client(one))
    assert not claims.is_claimed_later(as_client(client)), "neither has the session"
    later.epoch = 7
    assert (claims.is_claimed_later(as_client(client)), claims.is_claimed_later(as_client(later))) == (True, False)
    claims.leave(as_client(later))
    assert not claims.is_claimed_later(as_client(client))
