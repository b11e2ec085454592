# SPDX-License-Identifier: Apache-2.0
"""The session record: who has written it, and what goes with a session that ends."""

from __future__ import annotations

import pytest

from mqtt_nats.backbone import retry
from mqtt_nats.sessions.record import (
    Exchanges,
    discard_expired,
    discard_session,
    last_sequences,
    leftovers,
    list_exchanges,
    save_record,
    unfinished,
)
from mqtt_streams.api import ApiError, RequestTimeout
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.hashing import held_token, name_hash
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import CONSUMER_PREFIX, pubrel_subject
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.qos2 import STREAM as HELD
from mqtt_streams.qos2 import held_subject
from mqtt_streams.sessions import FIRST, PREFIX, V5, Conflict, Draining, SessionRecord, SharedSubscription
from mqtt_streams.shared import STREAM as SHARED
from mqtt_streams.shared import assigned_subject, group_hash, members_subject
from tests.harness.jetstream import NS
from tests.sessions.fakes import FakeClient, FakeServices, as_client, as_services, v5_of

pytestmark = pytest.mark.sources

KEY = name_hash("client")
PUBRELS = CONSUMER_PREFIX + KEY


def consumer(name: str) -> ConsumerRef:
    return ConsumerRef(name, "$MQTT.sub.deliver", "$MQTT.msgs.a", 10)


# -- writing ------------------------------------------------------------------------------------------


async def test_a_record_that_somebody_has_overwritten_is_not_the_owners() -> None:
    """Also when nobody can read it."""
    client = FakeClient(FakeServices(), v5=V5(first=FIRST))
    await save_record(as_client(client), 0)
    client.services.fake_inbox.put(PREFIX + KEY, b"\xff")
    with pytest.raises(Conflict):
        await save_record(as_client(client), client.epoch)


async def test_the_first_record_says_whose_it_is() -> None:
    client = FakeClient(FakeServices(), v5=V5(first=FIRST))
    assert await save_record(as_client(client), 0) == client.epoch == 1
    found = await client.services.streams.sessions.load(KEY, "client")
    assert found is not None
    v5 = found[0].v5
    assert v5 is not None
    assert (found[0].origin, v5.owner, v5.nonce, v5.q2) == ("gateway0", "gateway0", "nuid1", True)
    assert client.services.quotas.fake_written == [client.record]


async def test_later_records_name_the_first_one() -> None:
    client = FakeClient(FakeServices(), v5=V5(first=FIRST))
    await save_record(as_client(client), 0)
    await save_record(as_client(client), client.epoch)
    assert (v5_of(client).first, client.epoch) == (1, 2)


async def test_another_connection_has_written() -> None:
    client = FakeClient(FakeServices())
    client.services.fake_inbox.put(PREFIX + KEY, b"{}")
    with pytest.raises(Conflict):
        await save_record(as_client(client), 0)
    assert client.epoch == 0


@pytest.mark.parametrize("stored", [True, False])
async def test_a_write_without_an_answer(stored: bool) -> None:
    """It is read back: its nonce says that it was stored; otherwise it is made once more."""
    client = FakeClient(FakeServices())
    silent = [True]

    def fail(subject: str) -> None:
        if silent and subject.startswith(PREFIX):
            silent.clear()
            raise RequestTimeout("no answer")

    inbox = client.services.fake_inbox
    if stored:
        inbox.after = fail
    else:
        inbox.before = fail
    assert await save_record(as_client(client), 0) == 1
    assert [one.seq for one in inbox.messages["$MQTT_sess"]] == [1]


async def test_a_write_without_an_answer_that_another_connection_has_prevented() -> None:
    client = FakeClient(FakeServices())
    inbox = client.services.fake_inbox
    other = SessionRecord("client", v5=V5(nonce="other"))

    def fail(subject: str) -> None:
        if subject.startswith(PREFIX) and not inbox.messages["$MQTT_sess"]:
            inbox.put(PREFIX + KEY, other.encode())
            raise RequestTimeout("no answer")

    inbox.before = fail
    with pytest.raises(Conflict):
        await save_record(as_client(client), 0)


REFUSED = ApiError(400, 10164, "wrong last sequence")
"""What a leader answers while another write of the subject is on its way."""


@pytest.mark.parametrize("times", [1, 3])
async def test_a_write_of_the_owner_while_another_one_is_on_its_way(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again: nobody has claimed the session."""
    monkeypatch.setattr(retry, "RETRY_PAUSE_S", 0.0)
    client = FakeClient(FakeServices())
    await save_record(as_client(client), 0)
    left = [REFUSED] * times

    def refuse(subject: str) -> None:
        if left and subject.startswith(PREFIX):
            raise left.pop()

    client.services.fake_inbox.before = refuse
    assert await save_record(as_client(client), client.epoch) == client.epoch == 2
    assert not left


async def test_a_claim_that_was_on_its_way_when_the_owner_wrote() -> None:
    client = FakeClient(FakeServices())
    inbox = client.services.fake_inbox
    await save_record(as_client(client), 0)
    claim = SessionRecord("client", v5=V5(nonce="other"))
    refused: list[str] = []

    def refuse(subject: str) -> None:
        if subject.startswith(PREFIX) and not refused:
            refused.append(subject)
            raise REFUSED
        if subject.startswith(PREFIX) and len(inbox.messages["$MQTT_sess"]) == 1:
            inbox.put(PREFIX + KEY, claim.encode())

    inbox.before = refuse
    with pytest.raises(Conflict):
        await save_record(as_client(client), client.epoch)
    assert (client.epoch, refused) == (1, [PREFIX + KEY])


@pytest.mark.parametrize("expected", [0, 7])
async def test_a_claim_while_another_one_is_on_its_way(expected: int) -> None:
    """It looks at the session anew."""
    client = FakeClient(FakeServices())

    def refuse(subject: str) -> None:
        if subject.startswith(PREFIX):
            raise REFUSED

    client.services.fake_inbox.before = refuse
    with pytest.raises(Conflict):
        await save_record(as_client(client), expected)


# -- what a session leaves ----------------------------------------------------------------------------


def known() -> SessionRecord:
    draining = [Draining(f"{KEY}_ended", "$MQTT.msgs.b", 1, 5)]
    shared = {"$share/g/t": SharedSubscription(1, False, None, 1)}
    return SessionRecord(
        "client", cons={"a": consumer(f"{KEY}_one")}, v5=V5(draining=draining, shared=shared, pos="p", q2=True)
    )


def test_leftovers_of_a_durable_session() -> None:
    assert [one.name for one in leftovers(known())] == [f"{KEY}_one", f"{KEY}_ended", PUBRELS]


def test_a_session_that_ended_with_its_connection_has_no_consumer_of_pubrels() -> None:
    assert leftovers(SessionRecord("client", clean=True, v5=V5())) == []


def test_a_record_that_still_names_the_consumers_of_the_session_before() -> None:
    assert unfinished(SessionRecord("client", v5=V5(draining=leftovers(known()))))
    assert not unfinished(SessionRecord("client", v5=V5()))
    assert not unfinished(SessionRecord("client"))


class Stored:
    """A session with everything that it may have stored, and the write that has ended it."""

    def __init__(self) -> None:
        self.services = FakeServices()
        js = self.js = self.services.fake_inbox
        for name in (f"{KEY}_one", f"{KEY}_ended"):
            js.consumers[MESSAGES][name] = {}
        js.consumers[OUT][PUBRELS] = {}
        self.put()
        group = group_hash("g", "t")
        js.put(members_subject(group, KEY))
        js.consumers[MESSAGES][f"MQTT_share_{group}"] = {}
        self.epoch = js.put(PREFIX + KEY, known().encode())

    def put(self) -> None:
        """What a session stores, also the next one of the client."""
        self.js.put(held_subject(held_token("client", KEY), 1))
        self.js.put(pubrel_subject(KEY))
        self.js.put(assigned_subject(KEY, "group", 1))
        self.js.put("$MQTT.pos." + KEY)

    @property
    def left(self) -> dict[str, int]:
        return {name: len(some) for name, some in self.js.messages.items() if some and name != "$MQTT_sess"}


async def test_all_of_it_goes() -> None:
    stored = Stored()
    await discard_session(as_services(stored.services), known(), stored.epoch)
    assert stored.services.stream.consumers == -2
    assert stored.left == {}
    assert stored.js.consumers[OUT] == {}
    assert not [name for name in stored.js.consumers[MESSAGES] if name.startswith(KEY)]


async def test_the_session_was_claimed_meanwhile() -> None:
    """Its consumers have names of their own, and go; the messages may be the next session's."""
    stored = Stored()
    before = stored.left
    stored.js.put(PREFIX + KEY, known().encode())
    await discard_session(as_services(stored.services), known(), stored.epoch)
    assert stored.left == before
    assert PUBRELS in stored.js.consumers[OUT]


async def test_what_comes_while_it_is_removed_is_the_next_sessions() -> None:
    """The last sequences were read before the record was found unchanged."""
    stored = Stored()
    purging: list[str] = []

    def put_once(subject: str) -> None:
        if ".STREAM.PURGE." in subject and not purging:
            purging.append(subject)
            stored.put()

    stored.js.before = put_once
    await discard_session(as_services(stored.services), known(), stored.epoch)
    assert stored.left == {HELD: 1, OUT: 1, SHARED: 1, "$MQTT_pos": 1}


async def test_only_what_is_older_than_the_claim() -> None:
    """A client has used the new session since it was claimed."""
    stored = Stored()
    until = stored.js.now
    stored.js.now += NS
    stored.put()
    await discard_session(as_services(stored.services), known(), stored.epoch, until)
    assert stored.left == {HELD: 1, OUT: 1, SHARED: 1, "$MQTT_pos": 1}
    assert PUBRELS in stored.js.consumers[OUT]


# -- what a session leaves whose deadline has passed --------------------------------------------------


async def expire(stored: Stored) -> None:
    """Remove the session as its deadline does: the last sequences are read before the record that ends it."""
    services = as_services(stored.services)
    exchanges = await list_exchanges(services)
    assert exchanges is not None
    ends = await last_sequences(services, known(), exchanges)
    epoch = stored.js.put(PREFIX + KEY, known().encode())
    await discard_expired(services, known(), epoch, ends, exchanges)


async def test_all_of_an_expired_session_goes() -> None:
    stored = Stored()
    await expire(stored)
    assert stored.services.stream.consumers == -2, "the choice between consumers and records counts those that are gone"
    assert stored.left == {}
    assert stored.js.consumers[OUT] == {}
    assert not [name for name in stored.js.consumers[MESSAGES] if name.startswith(KEY)]


async def test_nothing_is_asked_about_what_no_session_has() -> None:
    """A session with a position only: the position is read and removed, beside three requests for all sessions."""
    stored = FakeServices()
    js = stored.fake_inbox
    record = SessionRecord("client", v5=V5(pos="p", q2=True))
    js.put("$MQTT.pos." + KEY)
    js.put(held_subject(held_token("another", name_hash("another")), 1))
    js.put(pubrel_subject(name_hash("another")))
    js.put(assigned_subject(name_hash("another"), "group", 1))
    services = as_services(stored)
    exchanges = await list_exchanges(services)
    assert exchanges is not None
    assert len(js.asked) == 3
    ends = await last_sequences(services, record, exchanges)
    await discard_expired(services, record, js.put(PREFIX + KEY, record.encode()), ends, exchanges)
    assert js.asked[3:] == ["$JS.API.DIRECT.GET.$MQTT_pos", "$JS.API.STREAM.PURGE.$MQTT_pos"]
    assert js.messages["$MQTT_pos"] == []
    assert [len(js.messages[name]) for name in (HELD, OUT, SHARED)] == [1, 1, 1]


async def test_a_position_of_which_a_replica_knows_too_little() -> None:
    """What a replica that lags has named is replaced: the leader is asked for the last one."""
    stored = Stored()
    services = as_services(stored.services)
    exchanges = Exchanges(frozenset(), False)
    (position,) = stored.js.messages["$MQTT_pos"]
    stored.js.messages["$MQTT_pos"] = [position._replace(seq=position.seq + 1)]
    epoch = stored.js.put(PREFIX + KEY, known().encode())
    place = ("$MQTT_pos", "$MQTT.pos." + KEY)
    await discard_expired(services, known(), epoch, {place: position.seq}, exchanges)
    assert stored.left == {}


async def test_what_comes_after_the_end_is_the_next_sessions() -> None:
    stored = Stored()

    def put_once(subject: str) -> None:
        if ".STREAM.PURGE.$MQTT_pos" in subject:
            stored.js.before = lambda subject: None
            stored.put()
            stored.js.put(PREFIX + KEY, known().encode())

    stored.js.before = put_once
    await expire(stored)
    assert stored.left == {HELD: 1, OUT: 1, SHARED: 1, "$MQTT_pos": 1}
    assert PUBRELS in stored.js.consumers[OUT], "the next session's consumer has the same name"


async def test_so_many_exchanges_that_one_answer_does_not_name_them(monkeypatch: pytest.MonkeyPatch) -> None:
    services = FakeServices()
    info = services.fake_inbox._info

    def short(name: str, body: dict[str, object]) -> dict[str, object]:
        return info(name, body) | {"total": 100_001}

    monkeypatch.setattr(services.fake_inbox, "_info", short)
    assert await list_exchanges(as_services(services)) is None
