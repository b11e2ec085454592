# SPDX-License-Identifier: Apache-2.0
"""Limits that refuse filters of a SUBSCRIBE packet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from mqtt_nats.client import subscription_room
from mqtt_nats.client.client import Client
from mqtt_nats.client.subscription_room import LEVELS_EACH, OVERLAPS, RECORD_SPARE, Room, known_room, room_for
from mqtt_nats.codec import Subscribe, Subscription
from mqtt_nats.pubsub.filter_index import OverlapLimit
from mqtt_nats.pubsub.shared_filters import plain_filter
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.record_size import subscription_bytes
from mqtt_streams.subjects import filter_to_subjects
from tests.client.fakes import FakeGrantSettings, FakeSubscriber

pytestmark = pytest.mark.sources


def packet(*texts: str, qos: int = 1) -> Subscribe:
    return Subscribe(1, tuple(Subscription(text, qos) for text in texts))


def room(client: FakeSubscriber, consumers: int = 1000) -> Room:
    return Room(cast("Client", client), consumers)


def take(found: Room, text: str, qos: int = 1) -> bool:
    return found.reserve(Subscription(text, qos), filter_to_subjects(plain_filter(text)))


def refusals(client: FakeSubscriber, found: Room) -> Mapping[str, int]:
    """The limits that have refused filters."""
    found.tell()
    return client.fake_refused[-1][0] if client.fake_refused else {}


@pytest.mark.parametrize("durable", [False, True])
def test_a_session_has_so_many_subscriptions(durable: bool) -> None:
    client = FakeSubscriber(durable=durable)
    client.connection.settings.max_subscriptions = 2
    found = room(client)
    assert [take(found, text) for text in ("a", "$share/g/b", "a")] == [True, True, True]
    assert refusals(client, found) == {}
    assert [take(found, text) for text in ("c", "a", "d")] == [False, True, False]
    assert refusals(client, found) == {"max_subscriptions": 2}


def test_levels_of_filters_are_bounded() -> None:
    """On the average: each level takes memory, and a single filter may have `max_topic_levels`."""
    client = FakeSubscriber()
    client.connection.settings.max_subscriptions = 3
    found = room(client)
    most = 3 * LEVELS_EACH + FakeGrantSettings.max_topic_levels
    assert take(found, "/".join("1" * most))
    assert not take(found, "a")
    assert refusals(client, found) == {"filter_levels": 1}


def test_the_gateway_has_so_many_subscriptions() -> None:
    """Shared ones do not count: they are not in the routing table."""
    client = FakeSubscriber()
    client.services.settings.max_subscriptions_per_gateway = client.path.table.subscriptions + 1
    found = room(client)
    assert [take(found, text) for text in ("a", "b", "$share/g/b", "a")] == [True, False, True, True]
    assert refusals(client, found) == {"max_subscriptions_per_gateway": 1}


def test_the_record_of_a_session_is_one_message() -> None:
    client = FakeSubscriber()
    size = subscription_bytes("a", ("a",))
    client.services.fake_store.max_payload = len(client.fake_record.encode()) + RECORD_SPARE + 2 * size
    found = room(client)
    assert [take(found, text) for text in ("a", "b", "c", "a")] == [True, True, False, True]
    assert refusals(client, found) == {"max_payload": 1}
    assert take(room(FakeSubscriber(durable=False)), "c"), "a regular session is not stored with its filters"


def test_consumers_are_bounded() -> None:
    """A filter with ``#`` behind a level needs two, one at QoS 0 or of a group none, and so does one that is known."""
    client = FakeSubscriber()
    found = room(client, 3)
    wanted = [("a/#", 1), ("b/#", 1), ("c", 0), ("$share/g/d", 1), ("e", 2), ("f", 1)]
    assert [take(found, *one) for one in wanted] == [True, False, True, True, True, False]
    assert refusals(client, found) == {"consumers": 2}
    client.fake_record.cons["f"] = ConsumerRef("f", "deliver", "$MQTT.msgs.f", 10)
    assert take(room(client, 0), "f")


def test_filters_that_match_one_topic_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would bring every message of the topic; a filter without a wildcard matches no other's topics."""

    class Two(OverlapLimit):
        def __init__(self) -> None:
            super().__init__(2)

    monkeypatch.setattr(subscription_room, "OverlapLimit", Two)
    client = FakeSubscriber()
    found = room(client)
    wanted = ["a/+", "a/#", "+/b", "b/+", "a/b", "$share/g/+/b"]
    assert [take(found, text) for text in wanted] == [True, True, False, True, True, False]
    assert take(found, "+/b", 0), "core NATS brings one copy at QoS 0"
    assert not take(found, "+/b", 1), "as one that gets a consumer"
    assert refusals(client, found) == {OVERLAPS: 3}


async def test_the_quota_says_how_many_consumers_a_packet_may_create() -> None:
    client = FakeSubscriber()
    client.user = "u"
    client.services.quotas.fake_most = 2
    found = await room_for(cast("Client", client), packet("a/#", "b", "$share/g/c", "#"))
    assert client.services.quotas.fake_reserved == [("q", "user 'u'", 4)]
    assert [take(found, text) for text in ("a/#", "b")] == [True, False]


@pytest.mark.parametrize("why", ["regular", "qos 0", "shared", "no quota"])
async def test_without_consumers_the_quota_is_not_asked(why: str) -> None:
    client = FakeSubscriber(durable=why != "regular", quota="" if why == "no quota" else "q")
    asked = packet("$share/g/a" if why == "shared" else "a", qos=0 if why == "qos 0" else 1)
    client.services.quotas.fake_known = False
    found = known_room(cast("Client", client), asked)
    assert found is not None
    assert isinstance(await room_for(cast("Client", client), asked), Room)
    assert client.services.quotas.fake_reserved == []
    assert take(found, "a") is (why != "qos 0" and why != "shared")


def test_a_quota_that_is_not_known_is_asked_for_later() -> None:
    client = FakeSubscriber()
    client.services.quotas.fake_most = 1
    found = known_room(cast("Client", client), packet("a", "b"))
    assert found is not None
    assert [take(found, text) for text in ("a", "b")] == [True, False]
    client.services.quotas.fake_known = False
    assert known_room(cast("Client", client), packet("a")) is None


async def test_subscriptions_that_the_session_has_need_no_further_consumers() -> None:
    client = FakeSubscriber()
    client.filters = {client.path.table.filters.setdefault("a", cast("Any", FakeFilter("a"))): 1}
    await room_for(cast("Client", client), packet("a", "b"))
    assert client.services.quotas.fake_reserved == [("q", "anonymous clients of 192.0.2.1", 1)]


class FakeFilter:
    """In place of a `Filter`: its text."""

    def __init__(self, text: str) -> None:
        self.text = text
