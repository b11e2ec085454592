# SPDX-License-Identifier: Apache-2.0
"""Stores of retained messages: what is stored, who may, and what becomes of their end."""

from __future__ import annotations

import pytest

from mqtt_nats.backbone.pending_stores import ANYBODY, OVERTAKEN
from mqtt_nats.codec import QuotaExceeded
from mqtt_nats.ingress.publish_properties import extras
from mqtt_nats.ingress.retained import store as retained_store
from mqtt_nats.ingress.retained.ops import RetainedOp
from mqtt_nats.ingress.retained.store import ORPHANED, is_retained, may_retain, retain, store_retained
from mqtt_nats.pubsub.routing_table import Route
from mqtt_streams.api import ApiError
from mqtt_streams.error_codes import MAXIMUM_MESSAGES_TEXT, STORE_FAILED
from tests.ingress.fakes import FakePublisher, FakePublishingServices, Parent, as_publisher

pytestmark = pytest.mark.sources

TOMBSTONE = "$MQTT.rmsgs.a"
ROUTE = Route(b"\x00\x01a", "a", "a")
FULL = ApiError(503, STORE_FAILED, MAXIMUM_MESSAGES_TEXT)


@pytest.fixture
def client() -> FakePublisher:
    return FakePublisher(FakePublishingServices())


def operation(client: FakePublisher, parent: Parent | None = None, *, tombstone: bool = False) -> RetainedOp:
    return RetainedOp(client.ingress.retained, parent, TOMBSTONE if tombstone else "", as_publisher(client))


# -- what is stored -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("qos", "flags"), [(0, b"1"), (1, b"3"), (2, b"5")])
def test_a_message_is_stored_under_its_topic(client: FakePublisher, qos: int, flags: bytes) -> None:
    """[MQTT-3.3.1-5] (3.1.1, 5.0)"""
    store_retained(as_publisher(client), ROUTE, b"text", qos, Parent(), b"")
    ((target, headers, payload, _),) = client.services.fake_store.fake_put
    assert (target, payload) == (b"HPUB $MQTT.rmsgs.a ", b"text")
    assert b"Nmqtt-RTopic:a\r\nNmqtt-RFlags:%b\r\n" % flags in headers
    assert b"Nmqtt-Client:client\r\n" in headers
    assert b"Nats-Msg-Id" not in headers


def test_an_empty_message_is_a_tombstone(client: FakePublisher) -> None:
    """It ends by itself, in case that its gateway dies."""
    store_retained(as_publisher(client), ROUTE, b"", 1, Parent(), b"Nats-Msg-Id:q2-7\r\n")
    ((_, headers, payload, _),) = client.services.fake_store.fake_put
    assert payload == b""
    assert b"Nmqtt-RFlags:-1\r\n" in headers
    assert ORPHANED in headers
    assert b"Nats-Msg-Id:q2-7\r\n" in headers  # else a late repetition would remove a newer message


def test_properties_and_expiry_are_stored_with_it(client: FakePublisher) -> None:
    more = extras({"message_expiry_interval": 60, "content_type": "text"})
    store_retained(as_publisher(client), ROUTE, b"text", 1, Parent(), b"", more)
    ((_, headers, _, _),) = client.services.fake_store.fake_put
    assert b"Nmqtt-Expiry:60\r\n" in headers
    assert b"Nats-TTL:60s\r\n" in headers
    assert b"Content-Type:text\r\n" in headers


@pytest.mark.parametrize("doubted", [True, False])
def test_what_a_moved_session_might_retain_is_withheld(
    client: FakePublisher, doubted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    considered: list[object] = []
    monkeypatch.setattr(retained_store, "consider", lambda services, operation: considered.append(operation))
    if doubted:
        client.services.registry.unchecked.add(client)
    part = operation(client, Parent())
    retain(client.ingress.retained, ROUTE, b"text", 1, part, b"")
    assert considered == ([part] if doubted else [])
    assert client.ingress.retained.storing == {part}


# -- its size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "size", "may"), [(None, 10**6, True), (10, 10, True), (10, 11, False)])
def test_how_large_it_may_be(client: FakePublisher, most: int | None, size: int, may: bool) -> None:
    """A 3.1.1 client cannot be told: its message is published and not retained."""
    client.version = 4
    client.services.settings.max_retained_size = most
    assert may_retain(as_publisher(client), size, 1) is may
    assert client.services.counters.not_retained == (not may)


@pytest.mark.parametrize(("qos", "told"), [(0, False), (1, True), (2, True)])
def test_a_client_of_5_0_is_told(client: FakePublisher, qos: int, told: bool) -> None:
    """In the acknowledgement, where there is one."""
    client.services.settings.max_retained_size = 10
    if told:
        with pytest.raises(QuotaExceeded, match="at most 10 bytes"):
            may_retain(as_publisher(client), 11, qos)
    else:
        assert not may_retain(as_publisher(client), 11, qos)


# -- the end of a store -------------------------------------------------------------------------------


def test_a_stored_message_completes_its_publish(client: FakePublisher) -> None:
    parent = Parent()
    part = operation(client, parent)
    client.ingress.retained.storing.add(part)
    part.stored(b'{"seq":7}')
    assert parent.fake_stored == [b'{"seq":7}']
    assert client.ingress.retained.storing == set()
    assert client.ingress.fake_tombstones.fake_added == []


def test_a_stored_tombstone_completes_its_publish_when_it_is_removed(client: FakePublisher) -> None:
    parent = Parent()
    operation(client, parent, tombstone=True).stored(b'{"seq":7}')
    assert parent.fake_stored == []
    assert client.ingress.fake_tombstones.fake_added == [(TOMBSTONE, 7, parent, b'{"seq":7}')]


def test_nobody_waits_for_a_message_at_qos_0(client: FakePublisher) -> None:
    operation(client).stored(b'{"seq":7}')
    assert not operation(client).waits()


@pytest.mark.parametrize("waits", [True, False])
def test_it_waits_for_room_as_its_publish_does(client: FakePublisher, waits: bool) -> None:
    assert operation(client, Parent(waits=waits)).waits() is waits


def test_a_message_that_a_newer_one_has_overtaken_is_replaced(client: FakePublisher) -> None:
    """Whoever has published the newer one, and whoever waits for the older one: it is not stored any more."""
    parent = Parent(waits=True)
    for part in (operation(client, parent), operation(client, parent, tombstone=True), operation(client)):
        assert part.publisher() is ANYBODY
        client.ingress.retained.storing.add(part)
        part.failed(OVERTAKEN)
    assert (parent.fake_stored, parent.fake_failed) == ([b"", b""], [])
    assert client.ingress.retained.storing == set()
    assert client.ingress.fake_tombstones.fake_added == []


def test_too_many_retained_messages_fail_a_publish_that_can_say_so(client: FakePublisher) -> None:
    parent = Parent(explains=True)
    operation(client, parent).failed(FULL)
    assert (parent.fake_failed, client.services.counters.not_retained) == ([MAXIMUM_MESSAGES_TEXT], 0)


def test_too_many_retained_messages_leave_any_other_publish_as_it_is(client: FakePublisher) -> None:
    """It has gone to its subscribers, and its client would repeat it for ever."""
    parent = Parent()
    operation(client, parent).failed(FULL)
    operation(client).failed(FULL)
    assert (parent.fake_stored, parent.fake_failed, client.services.counters.not_retained) == ([b""], [], 2)


def test_any_other_error_fails_the_publish(client: FakePublisher, caplog: pytest.LogCaptureFixture) -> None:
    parent = Parent()
    error = ApiError(500, 0, "on purpose")
    operation(client, parent).failed(error)
    assert (parent.fake_failed, caplog.text) == (["on purpose"], "")
    operation(client).failed(error)  # at QoS 0 only the log can say so
    assert "a retained message was not stored: on purpose" in caplog.text


# -- whether it is there ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "payload", "since", "there"),
    [
        (False, b"text", 0, False),
        (False, b"", 0, True),  # nothing is retained, as the message wants it
        (True, b"text", 0, True),
        (True, b"text", 10**18, False),  # it is older
    ],
)
async def test_whether_a_message_or_a_newer_one_is_retained(
    client: FakePublisher, stored: bool, payload: bytes, since: int, there: bool
) -> None:
    if stored:
        retain(client.ingress.retained, ROUTE, b"text", 1, Parent(), b"")
        ((_, headers, body, _),) = client.services.fake_store.fake_put
        client.services.fake_inbox.put("$MQTT.rmsgs.a", body, headers)
    assert await is_retained(client.services.streams, "a", payload, since) is there
