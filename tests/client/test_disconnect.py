# SPDX-License-Identifier: Apache-2.0
"""DISCONNECT of both sides, and what the end of a connection leaves of its session."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, cast

import pytest

from mqtt_nats.base import server_clock as natstime
from mqtt_nats.client.client import Client
from mqtt_nats.client.disconnect import fall_silent, goodbye, handle_disconnect, leave, renew_backstops
from mqtt_nats.codec import Disconnect, MqttError, NotAuthorized, ProtocolError, ReasonCode, UseAnotherServer, encode
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.delivery.states import DeliveryState
from mqtt_nats.ingress.qos2 import Inbound
from mqtt_nats.lifecycle.will import Done
from mqtt_nats.messages.terms import Terms
from mqtt_nats.protocol.transient_sender import TransientSender
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import BACKSTOP_S, ConsumerRef
from mqtt_streams.error_codes import CONSUMER_ALREADY_EXISTS, CONSUMER_NAME_EXISTS
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.timers import EXPIRY, timer_subject
from mqtt_streams.wills import StoredWill
from tests.client.fakes import FakeLeaver, FakeLeftSide
from tests.delivery.fakes import FakeReceiver
from tests.harness.waiting import aeventually
from tests.protocol.recorder import source
from tests.sessions.fakes import as_client, v5_of

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.sources

LIMITS = Terms()
REMOVE = b"$JS.API.STREAM.PURGE.$MQTT_sess"
PURGE = b"$JS.API.STREAM.PURGE.$MQTT_qos2in"
WILL = StoredWill("gateway0", "client", 7, 1, 0, 1, False, "will", b"", b"gone")


def disconnect(reason: int = 0, **properties: Any) -> Disconnect:
    return Disconnect(reason, cast("Any", properties) or None)


def hear(client: FakeLeaver, packet: Disconnect) -> None:
    handle_disconnect(cast("Client", client), packet)


# -- DISCONNECT from the gateway --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MqttError("x", ReasonCode.KEEP_ALIVE_TIMEOUT), ReasonCode.KEEP_ALIVE_TIMEOUT),
        (NotAuthorized("x"), ReasonCode.NOT_AUTHORIZED),
        (MqttError("x", ReasonCode.SERVER_UNAVAILABLE), ReasonCode.SERVER_BUSY),
        (MqttError("x", ReasonCode.BANNED), ReasonCode.NOT_AUTHORIZED),
        (MqttError("x", ReasonCode.BAD_USER_NAME_OR_PASSWORD), ReasonCode.NOT_AUTHORIZED),
        (MqttError("x", ReasonCode.UNSUPPORTED_PROTOCOL_VERSION), ReasonCode.PROTOCOL_ERROR),
        (MqttError("x", ReasonCode.CLIENT_IDENTIFIER_NOT_VALID), ReasonCode.PROTOCOL_ERROR),
        (MqttError("x", ReasonCode.PACKET_IDENTIFIER_IN_USE), ReasonCode.PROTOCOL_ERROR),
        (MqttError("x", ReasonCode.PACKET_IDENTIFIER_NOT_FOUND), ReasonCode.PROTOCOL_ERROR),
    ],
)
def test_the_reason_is_one_that_disconnect_has(error: MqttError, reason: ReasonCode) -> None:
    """[MQTT-3.14.2-1] (5.0): the table of section 3.14.2.1."""
    assert goodbye(error, LIMITS) == encode(Disconnect(reason, {"reason_string": "x"}), 5)


def test_a_client_that_is_to_go_elsewhere_is_told_where() -> None:
    found = goodbye(UseAnotherServer("full", "other:1883"), LIMITS)
    assert found == encode(
        Disconnect(ReasonCode.USE_ANOTHER_SERVER, {"server_reference": "other:1883", "reason_string": "full"}), 5
    )


@pytest.mark.parametrize(
    ("most", "found"),
    [
        (40, {"server_reference": "other:1883", "reason_string": "full"}),
        (20, {"server_reference": "other:1883"}),
        (10, None),
    ],
)
def test_a_packet_that_is_too_large_is_shortened_or_not_sent(most: int, found: Any) -> None:
    """[MQTT-3.14.2-3] (5.0)"""
    data = goodbye(UseAnotherServer("full", "other:1883"), Terms(maximum_packet_size=most))
    assert len(data) <= most
    assert data == (b"" if found is None else encode(Disconnect(ReasonCode.USE_ANOTHER_SERVER, found), 5))


def test_a_long_reason_is_cut() -> None:
    assert len(goodbye(ProtocolError("x" * 100_000), LIMITS)) < 1100


# -- DISCONNECT from the client ---------------------------------------------------------------------------


def test_disconnect_closes_the_connection() -> None:
    """[MQTT-3.14.4-1] [MQTT-3.14.4-2] (3.1.1, 5.0)"""
    client = FakeLeaver()
    hear(client, disconnect())
    assert (client.sent_disconnect, client.fake_ended, client.fake_jobs) == (True, ["close"], [])


async def test_jobs_of_earlier_packets_come_first() -> None:
    client = FakeLeaver()
    client.busy = True
    hear(client, disconnect())
    assert client.fake_ended == []
    await client.fake_work()
    assert client.fake_ended == ["close"]


@pytest.mark.parametrize(("reason", "dropped"), [(0x00, True), (0x04, False), (0x80, False)])
async def test_the_will_is_removed_before_the_connection_is_closed(reason: int, dropped: bool) -> None:
    """[MQTT-3.14.4-3] (3.1.1, 5.0): the next connection must not find it. With 0x04 it is to be published."""
    client = FakeLeaver()
    client.will = WILL
    hear(client, disconnect(reason))
    assert (client.will is None) is dropped
    removal = b'{"filter":"$MQTT.wills.gateway0.client","seq":8}'
    assert [body for _, body in client.fake_called] == ([removal] if dropped else [])
    assert client.fake_ended == ([] if dropped else ["close"])
    for *_, operation in client.services.fake_store.fake_called:
        operation.stored(b"")
    await client.fake_work()
    assert client.fake_ended == ["close"]


def test_a_session_of_one_connection_cannot_be_made_to_last() -> None:
    """[MQTT-3.14.2-2] (5.0)"""
    client = FakeLeaver(durable=False)
    client.expiry = 0
    with pytest.raises(ProtocolError, match="sets a session expiry interval"):
        hear(client, disconnect(session_expiry_interval=1))
    assert not client.sent_disconnect
    hear(client, disconnect(session_expiry_interval=0))
    assert client.fake_ended == ["close"]


@pytest.mark.parametrize(
    ("before", "asked", "most", "found"),
    [
        (60, 10, None, 10),
        (60, 10_000, 100, 100),
        (60, 0, None, 0),
        (60, 0xFFFFFFFF, None, None),
        (None, 5, None, 5),
    ],
)
async def test_the_session_expiry_interval_is_changed(
    before: int | None, asked: int, most: int | None, found: int | None
) -> None:
    client = FakeLeaver()
    client.expiry = before
    client.connection.settings.max_session_expiry_interval = most
    await client.fake_save()
    hear(client, disconnect(session_expiry_interval=asked))
    assert client.fake_ended == []
    await client.fake_work()
    assert client.fake_ended == ["close"]
    stored = await client.services.streams.sessions.load(client.hash, client.client_id)
    assert stored is not None
    assert stored[0].v5 is not None
    assert (client.expiry, stored[0].v5.expiry) == (found, found)


def test_where_sessions_are_not_durable_no_interval_is_changed() -> None:
    """CONNACK has told the client that its session ends with the connection."""
    client = FakeLeaver(durable=False)
    client.expiry = 0
    client.connection.settings.durable_sessions = False
    hear(client, disconnect(session_expiry_interval=10))
    assert (client.expiry, client.fake_ended) == (0, ["close"])


async def test_a_session_that_has_moved_keeps_its_interval() -> None:
    client = FakeLeaver()
    await client.fake_save()
    assert client.record is not None
    await client.services.streams.sessions.save(client.record, expected=None)
    hear(client, disconnect(session_expiry_interval=10))
    await client.fake_work()
    assert client.fake_ended == ["taken over"]


async def test_an_interval_that_is_not_stored_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeLeaver()
    await client.fake_save()

    def refuse(subject: str) -> None:
        raise ApiError(503, 10077, "no space left on device")

    client.services.fake_inbox.before = refuse
    hear(client, disconnect(session_expiry_interval=10))
    await client.fake_work()
    assert client.fake_ended == ["close"]
    assert "its session expiry interval was not stored: no space left" in caplog.text


def bind(client: FakeLeaver, names: Iterable[str], *, removed: Iterable[str] = ()) -> FakeLeftSide:
    """Give the session consumers, and those that are removed only a place in the record."""
    side, js = FakeLeftSide(client), client.services.fake_inbox
    assert client.record is not None
    for name in names:
        one = ConsumerBinding(name, ConsumerRef(name, "$MQTT.sub.deliver", "$MQTT.msgs.a", 10), source(qos=1))
        client.record.cons[name] = one.consumer
        side.bindings[name] = one
        if name in removed:
            one.remove()
        else:
            js.consumers[MESSAGES][name] = {"config": {}}
    return side


async def test_consumers_live_as_long_as_the_session() -> None:
    client = FakeLeaver()
    side = bind(client, ["one", "two"], removed=["two"])
    v5_of(client).expire_after(100)
    await renew_backstops(cast("DurableDelivery", side))
    threshold = (100 + BACKSTOP_S) * 1_000_000_000
    assert client.record is not None
    assert {one.inactive_threshold for one in client.record.cons.values()} == {threshold}
    found = {name: one["config"] for name, one in client.services.fake_inbox.consumers[MESSAGES].items()}
    assert list(found) == ["one"], "one that does not exist is not made"
    assert found["one"]["inactive_threshold"] == threshold


@pytest.mark.parametrize(
    "error",
    [
        NoResponders("a test"),
        RequestTimeout("a test"),
        ApiError(503, 10008, "a test"),
        ApiError(400, CONSUMER_NAME_EXISTS, "its deliver subject is busy"),
        ApiError(400, CONSUMER_ALREADY_EXISTS, "a test"),
        None,
    ],
)
async def test_a_consumer_that_is_not_changed_does_not_concern_the_client(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is gone neither: the session's expiry is stored, and the other consumers get it."""
    client = FakeLeaver()
    await client.fake_save()
    one, two = (f"{client.hash}_{name}" for name in ("one", "two"))
    client.durable_side = bind(client, [one, two])
    inbox = client.services.fake_inbox

    def fail(subject: str) -> None:
        if error is not None and subject.endswith(one):
            raise error

    inbox.before = fail
    if error is None:
        del inbox.consumers[MESSAGES][one]
    hear(client, disconnect(session_expiry_interval=100))
    await client.fake_work()
    stored = await client.services.streams.sessions.load(client.hash, client.client_id)
    assert stored is not None
    assert stored[0].v5 is not None
    assert (client.fake_ended, stored[0].v5.expiry, caplog.text) == (["close"], 100, "")
    assert inbox.consumers[MESSAGES][two]["config"]["inactive_threshold"] == (100 + BACKSTOP_S) * 1_000_000_000


# -- the end of a connection ------------------------------------------------------------------------------


def test_a_session_without_deliveries_falls_silent() -> None:
    fall_silent(cast("Client", FakeLeaver()))


def test_messages_for_a_closed_connection_do_not_count_as_sent() -> None:
    client = FakeLeaver()
    client.durable_side = side = bind(client, ["one"])
    side.machine.start()
    fall_silent(cast("Client", client))
    assert not side.machine.open


def test_a_resume_that_has_not_sent_anything_goes_on() -> None:
    client = FakeLeaver()
    client.durable_side = side = FakeLeftSide(client)
    side.machine.open = True
    fall_silent(cast("Client", client))
    assert side.machine.open


@pytest.mark.parametrize("owes", [False, True])
async def test_the_deliveries_of_a_durable_session_end(owes: bool) -> None:
    """The sender stays where records of answered PUBRELs have yet to be acknowledged."""
    client = FakeLeaver()
    client.durable_side = side = FakeLeftSide(client)
    side.fake_owes = owes
    leave(cast("Client", client))
    assert side.fake_done == ["detach", DeliveryState.ENDED]
    assert (client.durable_side is side) is owes


async def test_a_connection_that_has_ended_leaves_nothing_here() -> None:
    client = FakeLeaver()
    services = client.services
    client.account.wills.last[as_client(client)] = Done()
    services.registry.enter(client)
    services.registry.sharing.add(client)
    services.registry.unchecked.add(client)
    leave(cast("Client", client))
    registry = services.registry
    assert (registry.connections, registry.unchecked, registry.sharing, registry.clients) == (set(), set(), set(), {})
    assert client.account.claims.fake_left == [client]
    assert client.account.wills.last == {}
    assert services.quotas.fake_left == [client.hash]
    assert (client.receipts, client.fake_ended) == ([], ["memory"])


async def test_a_later_connection_of_the_client_stays() -> None:
    """What the gateway knows of the session's consumers concerns that one, too."""
    client = FakeLeaver()
    client.account.claims.fake_others = True
    other = FakeReceiver(client.services)
    leave(cast("Client", client))
    assert list(client.services.registry.clients.values()) == [other]
    assert client.services.quotas.fake_left == []


@pytest.mark.parametrize(("expiry", "timed"), [(100, True), (None, False)])
async def test_a_durable_session_gets_its_deadline(
    expiry: int | None, timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[MQTT-4.1.0-2] (5.0); one that does not expire gets a mark that the connection has ended."""
    client = FakeLeaver()
    client.expiry = expiry
    monkeypatch.setattr(natstime, "now", lambda: 2e9 - 100)
    leave(cast("Client", client))
    ((target, headers, _, _),) = client.services.fake_store.fake_put
    assert target == b"HPUB %b " % timer_subject(EXPIRY, client.hash).encode()
    assert (b"Nats-Schedule:@at 2033-05-18T03:33:20" in headers) is timed
    assert client.fake_called == []


@pytest.mark.parametrize("why", ["taken", "not claimed"])
async def test_who_does_not_own_the_session_changes_nothing_that_is_stored(why: str) -> None:
    client = FakeLeaver()
    client.taken = why == "taken"
    client.epoch = 9 if client.taken else 0
    leave(cast("Client", client))
    assert (client.fake_called, client.services.fake_store.fake_put) == ([], [])


async def test_the_record_of_a_regular_session_is_removed_by_its_sequence() -> None:
    """[MQTT-3.1.2-6] (3.1.1): a record that another connection has written meanwhile stays."""
    client = FakeLeaver(durable=False)
    leave(cast("Client", client))
    assert client.fake_called == [(REMOVE, b'{"filter":"$MQTT.sess.%b","seq":10}' % client.hash.encode())]
    assert client.services.tasks.fake_spawned == []


async def test_the_record_goes_after_the_will_and_the_held_publishes() -> None:
    """Another gateway finds both by the record, if this one dies meanwhile."""
    client = FakeLeaver(durable=False)
    client.qos2 = Inbound()
    client.qos2.newest = 31
    will = client.account.wills.last[as_client(client)] = Done()
    leave(cast("Client", client))
    (task,) = client.services.tasks.fake_last
    assert client.fake_called == []
    will.stored(b"")
    await aeventually(lambda: bool(client.fake_called))
    ((subject, body),) = client.fake_called
    assert subject == PURGE
    assert body == b'{"filter":"$MQTT.qos2.in.%b.*","seq":32}' % client.token.encode()
    client.services.fake_store.fake_called[0][2].stored(b"")
    await cast("Coroutine[Any, Any, None]", task)
    assert client.fake_called[1:] == [(REMOVE, b'{"filter":"$MQTT.sess.%b","seq":10}' % client.hash.encode())]


async def test_queued_messages_end_with_a_regular_session(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mqtt_nats.broker")
    client = FakeLeaver(durable=False)
    client.regular_side = TransientSender(1, 10, lambda data: None)
    for _ in range(3):
        client.regular_side.publish(1, b"\0\1a", b"x")
    leave(cast("Client", client))
    assert "its session has ended, and 2 queued messages with it" in caplog.text
    assert client.services.counters.dropped["session ended"] == 2
    assert client.regular_side.waiting == 0
