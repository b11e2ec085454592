# SPDX-License-Identifier: Apache-2.0
"""New and changed subscriptions of a durable session: record, consumers, where they begin, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from mqtt_nats.backbone import retry
from mqtt_nats.client import grant as granting
from mqtt_nats.client.client import Client
from mqtt_nats.client.grant import LEVELS_EACH, OVERLAPS, RECORD_SPARE, Room, known_room, replays_of, room_for
from mqtt_nats.client.subscription_change import Wish
from mqtt_nats.codec import Subscribe, Subscription
from mqtt_nats.delivery.receiver import SharedFeed
from mqtt_nats.pubsub.filter_index import OverlapLimit
from mqtt_nats.pubsub.routing_table import PLAIN, Options
from mqtt_nats.pubsub.shared_filters import plain_filter
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_nats.sessions.record import claimed
from mqtt_streams.api import ApiError, RequestTimeout
from mqtt_streams.consumers import BACKSTOP_S, ConsumerRef
from mqtt_streams.record_size import subscription_bytes
from mqtt_streams.sessions import PREFIX, Conflict, SubscriptionOptions, second_sid
from mqtt_streams.subjects import filter_to_subjects
from tests.client.fakes import FakeGrantSettings, FakeSubscriber
from tests.sessions.fakes import v5_of

pytestmark = pytest.mark.sources


def wish(text: str, qos: int = 1, options: Options = PLAIN, handling: int = 0, *, replay: bool = False) -> Wish:
    return Wish(qos, filter_to_subjects(text), options, handling, replay)


def wishes(*texts: str, qos: int = 1) -> dict[str, Wish]:
    return {text: wish(text, qos) for text in texts}


def packet(*texts: str, qos: int = 1) -> Subscribe:
    return Subscribe(1, tuple(Subscription(text, qos) for text in texts))


# -- record and consumers ---------------------------------------------------------------------------------


async def test_the_record_names_a_subscription_before_its_consumer_is_created() -> None:
    """A gateway that dies in between leaves a consumer that the next one creates."""
    client = FakeSubscriber()
    assert await client.fake_grant({"a/b": wish("a/b", 2, Options(no_local=True, identifier=5), 1)}) == set()
    asked = client.services.fake_inbox.asked
    record = next(at for at, one in enumerate(asked) if one.startswith(PREFIX))
    assert record < next(at for at, one in enumerate(asked) if ".CONSUMER.DURABLE.CREATE.$MQTT_msgs." in one)
    stored = await client.fake_stored()
    assert stored.subs == {"a.b": 2}
    assert stored.v5 is not None
    assert stored.v5.options == {"a.b": SubscriptionOptions("a/b", True, False, 1, 5)}
    assert stored.v5.start == {"a.b": 8}
    (config,) = client.fake_created.values()
    assert config["durable_name"] == stored.cons["a.b"].durable_name
    assert config["filter_subject"] == "$MQTT.msgs.a.b"
    assert config["opt_start_seq"] == 8
    assert config["inactive_threshold"] == (100 + BACKSTOP_S) * 1_000_000_000


async def test_a_filter_that_ends_in_a_wildcard_has_two_consumers() -> None:
    """One for the level itself [MQTT-4.7.1-2] (3.1.1): NATS has no pattern for both."""
    client = FakeSubscriber()
    await client.fake_grant(wishes("a/#"))
    assert set(client.fake_created) == {"$MQTT.msgs.a", "$MQTT.msgs.a.>"}
    first, second = filter_to_subjects("a/#")
    assert set(client.fake_record.cons) == {first, second_sid(second)}


async def test_a_subscription_at_qos_0_has_no_consumer() -> None:
    client = FakeSubscriber()
    await client.fake_grant(wishes("a", qos=0))
    assert client.fake_created == {}
    assert (await client.fake_stored()).subs == {"a": 0}
    assert client.services.fake_inbox.asked[0].startswith(PREFIX)


async def test_owed_pubrels_are_listened_for_before_a_subscription_at_qos_2() -> None:
    client = FakeSubscriber()
    await client.fake_grant(wishes("a", qos=1))
    assert not client.fake_side.has_pubrels
    await client.fake_grant(wishes("b", qos=2))
    assert client.fake_side.has_pubrels


async def test_a_repeated_subscription_keeps_its_consumer_and_gets_the_new_options() -> None:
    """[MQTT-3.8.4-3] (3.1.1, 5.0): the messages of the first one are not lost."""
    client = FakeSubscriber()
    await client.fake_grant(wishes("a"))
    name = client.fake_record.cons["a"].durable_name
    created = len([one for one in client.services.fake_inbox.asked if ".CONSUMER.DURABLE.CREATE." in one])
    await client.fake_grant({"a": wish("a", 1, Options(identifier=9))}, place=20)
    assert client.fake_record.cons["a"].durable_name == name
    assert len([one for one in client.services.fake_inbox.asked if ".CONSUMER.DURABLE.CREATE." in one]) == created
    assert v5_of(client).options["a"] == SubscriptionOptions("a", False, False, 0, 9)
    assert client.fake_side.bindings[name].source.identifier == 9
    assert v5_of(client).start["a"] == 8


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
async def test_another_qos_holds_for_later_messages(before: int, after: int) -> None:
    """[MQTT-3.8.4-6] (3.1.1): the record notes the former QoS, and the last message that has it."""
    client = FakeSubscriber()
    await client.fake_grant(wishes("a", qos=before))
    (binding,) = client.fake_side.bindings.values()
    binding.source.last = 30
    await client.fake_grant(wishes("a", qos=after), place=20)
    assert binding.source.qos == after
    assert v5_of(client).was["a"] == (before, 30)
    assert (await client.fake_stored()).subs == {"a": after}


async def test_a_consumer_that_jetstream_does_not_create_refuses_its_filter() -> None:
    """[MQTT-3.9.3-2] (3.1.1), [MQTT-3.8.4-5] (5.0): the other filters of the packet are granted."""
    client = FakeSubscriber()

    def refuse(subject: str) -> None:
        if ".CONSUMER.DURABLE.CREATE." in subject and len(client.fake_created) == 1:
            raise ApiError(400, 10026, "maximum consumers limit reached")

    client.services.fake_inbox.before = refuse
    assert await client.fake_grant(wishes("a", "b")) == {"b"}
    ((limits, why),) = client.fake_refused
    assert limits == {"jetstream": 1}
    assert "maximum consumers limit reached" in why
    assert client.services.quotas.fake_paced == [client.hash]


async def test_a_session_that_has_moved_gets_no_consumers() -> None:
    client = FakeSubscriber()
    client.epoch = 99
    with pytest.raises(Conflict):
        await client.fake_grant(wishes("a"))
    assert client.fake_created == {}


async def test_a_request_without_an_answer_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_PAUSE_S", 0.001)
    client = FakeSubscriber()
    left = [RequestTimeout("a test")]

    def silent(subject: str) -> None:
        if ".CONSUMER.DURABLE.CREATE." in subject and left:
            raise left.pop()

    client.services.fake_inbox.before = silent
    assert await client.fake_grant(wishes("a")) == set()
    assert len(client.fake_created) == 1


# -- where a subscription begins ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "last", "end", "start"),
    [
        ("a", 20, None, 21),  # `a/#` has brought its messages up to 20
        ("a/b", 5, None, 8),  # the place of SUBSCRIBE is later
        ("b", 20, None, 8),  # no topic matches both
        ("+", 20, 15, 16),  # it has ended, and brings nothing after 15
    ],
)
async def test_a_message_that_an_overlapping_consumer_has_brought_does_not_come_again(
    text: str, last: int, end: int | None, start: int
) -> None:
    client = FakeSubscriber()
    await client.fake_grant(wishes("a/#"))
    for one in client.fake_side.bindings.values():
        one.source.last = last
        if end is not None:
            one.source.end_at(end)
    await client.fake_grant(wishes(text))
    assert v5_of(client).start[filter_to_subjects(text)[0]] == start


async def test_messages_wait_for_retained_ones() -> None:
    """[MQTT-3.3.1-6] (3.1.1): the newest message on a topic comes last."""
    client = FakeSubscriber()
    wanted = {"a/#": wish("a/#", replay=True), "b": wish("b")}
    replays = replays_of(cast("Client", client), wanted)
    assert [(one.filter, one.key, one.qos) for one in replays] == [
        ("a/#", key, 1) for key in (wanted["a/#"].subjects[0], second_sid(wanted["a/#"].subjects[1]))
    ]
    await client.fake_grant(wanted, replays={one.key: one for one in replays})
    bindings = client.fake_side.bindings
    held = {key: bindings[one.durable_name].source.held for key, one in client.fake_record.cons.items()}
    assert {key for key, why in held.items() if why} == {one.key for one in replays}


# -- the shared reader ----------------------------------------------------------------------------------------


class FakeFeed(SharedFeed):
    """A shared reader that takes sessions, or does not."""

    def __init__(self, *, taking: bool, in_records: bool = True) -> None:
        super().__init__()
        self._taking, self._in_records = taking, in_records
        self.fake_places: list[int] = []

    def takes(self, client: object, side: object) -> bool:
        return self._taking

    def without_consumers(self, client: object) -> bool:
        return self._in_records

    async def subscribe(
        self, client: object, place: int, put: Callable[[], list[ConsumerBinding]]
    ) -> list[ConsumerBinding]:
        self.fake_places.append(place)
        return put()


@pytest.mark.parametrize("taking", [False, True])
async def test_the_shared_reader_serves_new_subscriptions_without_consumers(taking: bool) -> None:
    """If it takes the session."""
    client = FakeSubscriber()
    client.delivery.feed = feed = FakeFeed(taking=taking)
    assert await client.fake_grant(wishes("a")) == set()
    assert (len(client.fake_created), feed.fake_places) == ((0, [7]) if taking else (1, []))
    assert client.fake_record.subs == {"a": 1}
    assert (client.fake_side.position_writer is not None) is taking
    assert client.services.stream.consumers == (not taking)
    assert client.fake_side.bindings[client.fake_record.cons["a"].durable_name].removed is taking


async def test_the_shared_reader_serves_new_subscriptions_with_consumers() -> None:
    """The consumers are created, and lie dormant."""
    client = FakeSubscriber()
    client.delivery.feed = feed = FakeFeed(taking=True, in_records=False)
    assert await client.fake_grant(wishes("a")) == set()
    assert (len(client.fake_created), feed.fake_places) == (1, [7])
    assert client.services.stream.consumers == 1
    assert not client.fake_side.bindings[client.fake_record.cons["a"].durable_name].removed
    assert not claimed(cast("Any", client.fake_record))[1].consumerless


@pytest.mark.parametrize("why", ["known", "qos 0", "raised"])
async def test_what_the_shared_reader_need_not_serve(why: str) -> None:
    """No new subscription with a consumer, or one of which core NATS has brought messages already."""
    client = FakeSubscriber()
    await client.fake_grant(wishes("a"))
    client.delivery.feed = feed = FakeFeed(taking=True)
    more: dict[str, Any] = {"came": lambda message, sequence: False} if why == "raised" else {}
    await client.fake_grant(wishes("b" if why != "known" else "a", qos=0 if why == "qos 0" else 1), **more)
    assert feed.fake_places == []


# -- room -------------------------------------------------------------------------------------------------------


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

    monkeypatch.setattr(granting, "OverlapLimit", Two)
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
