# SPDX-License-Identifier: Apache-2.0
"""New and changed subscriptions of a durable session: record, consumers, and where they begin."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from mqtt_nats.client.client import Client
from mqtt_nats.client.grant import replays_of
from mqtt_nats.client.subscription_change import Wish
from mqtt_nats.messages.message import Stored
from mqtt_nats.pubsub.routing_table import PLAIN, Options
from mqtt_nats.sessions.record import claimed
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import BACKSTOP_S
from mqtt_streams.sessions import PREFIX, Conflict, SubscriptionOptions, second_sid
from mqtt_streams.subjects import filter_to_subjects
from tests.client.fakes import FakeFeed, FakeSubscriber
from tests.sessions.fakes import v5_of

pytestmark = pytest.mark.sources


def wish(text: str, qos: int = 1, options: Options = PLAIN, handling: int = 0, *, replay: bool = False) -> Wish:
    return Wish(qos, filter_to_subjects(text), options, handling, replay)


def wishes(*texts: str, qos: int = 1) -> dict[str, Wish]:
    return {text: wish(text, qos) for text in texts}


async def test_the_record_names_a_subscription_before_its_consumer_is_created() -> None:
    """A gateway that dies in between leaves a consumer that the next one creates."""
    client = FakeSubscriber()
    await client.fake_grant({"a/b": wish("a/b", 2, Options(no_local=True, identifier=5), 1)})
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
    client: Any = FakeSubscriber()
    await client.fake_grant(wishes("a", qos=1))
    before = client.fake_side.has_pubrels
    await client.fake_grant(wishes("b", qos=2))
    assert (before, client.fake_side.has_pubrels) == (False, True)
    stored = await client.fake_stored()
    assert stored.pubrel is not None, "nats-server's listener looks for the consumer there"
    assert stored.pubrel.durable_name == f"$MQTT_PUBREL_{client.hash}"


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
    client.fake_feed.fake_reached = 30
    await client.fake_grant(wishes("a", qos=after), place=20)
    assert binding.source.qos == after
    assert v5_of(client).was["a"] == (before, 30)
    assert (await client.fake_stored()).subs == {"a": after}


@pytest.mark.parametrize(("perhaps", "until"), [(50, 50), (20, 30)])
async def test_what_a_dead_gateway_may_have_sent_keeps_its_qos(perhaps: int, until: int) -> None:
    """It comes again with DUP; what readers have brought here keeps its QoS anyway."""
    client = FakeSubscriber()
    await client.fake_grant(wishes("a", qos=2))
    (binding,) = client.fake_side.bindings.values()
    client.fake_feed.fake_reached = 30
    client.fake_side.machine.sent_perhaps(perhaps)
    await client.fake_grant(wishes("a", qos=1), place=20)
    assert v5_of(client).was["a"] == (2, until)
    assert [binding.source.granted(sequence) for sequence in (until, until + 1)] == [2, 1]


async def test_a_consumer_that_jetstream_refuses() -> None:
    """The filter is granted all the same: readers serve it. The consumer is created at a later resume."""
    client = FakeSubscriber()

    def refuse(subject: str) -> None:
        if ".CONSUMER.DURABLE.CREATE." in subject and len(client.fake_created) == 1:
            raise ApiError(400, 10026, "maximum consumers limit reached")

    client.services.fake_inbox.before = refuse
    await client.fake_grant(wishes("a", "b"))
    assert client.fake_refused == []
    assert {
        key: client.fake_side.bindings[one.durable_name].removed for key, one in client.fake_record.cons.items()
    } == {
        "a": False,
        "b": True,
    }
    assert client.services.stream.consumers == 1
    assert (await client.fake_stored()).subs == {"a": 1, "b": 1}
    assert client.services.quotas.fake_paced == [client.hash]


async def test_a_session_that_has_moved_gets_no_consumers() -> None:
    client = FakeSubscriber()
    client.epoch = 99
    with pytest.raises(Conflict):
        await client.fake_grant(wishes("a"))
    assert client.fake_created == {}


@pytest.mark.parametrize("error", [RequestTimeout("a test"), NoResponders("a test")])
async def test_a_consumer_that_jetstream_does_not_answer_for(error: Exception) -> None:
    """The client need not wait for it: readers bring the messages."""
    client = FakeSubscriber()

    def silent(subject: str) -> None:
        if ".CONSUMER.DURABLE.CREATE." in subject:
            raise error

    client.services.fake_inbox.before = silent
    async with asyncio.timeout(10):
        await client.fake_grant(wishes("a"))
    assert [one.removed for one in client.fake_side.bindings.values()] == [True]
    assert (client.services.stream.consumers, client.fake_refused) == (0, [])
    assert (await client.fake_stored()).subs == {"a": 1}


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
async def test_a_message_that_an_overlapping_subscription_has_brought_does_not_come_again(
    text: str, last: int, end: int | None, start: int
) -> None:
    client = FakeSubscriber()
    await client.fake_grant(wishes("a/#"))
    client.fake_feed.fake_reached = last
    for one in client.fake_side.bindings.values():
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


@pytest.mark.parametrize("in_records", [False, True])
async def test_the_shared_reader_serves_new_subscriptions(in_records: bool) -> None:
    """Their consumers are created, and lie dormant; of a session without consumers none is."""
    client = FakeSubscriber()
    client.delivery.feed = feed = FakeFeed(in_records=in_records)
    await client.fake_grant(wishes("a", qos=2))
    assert (len(client.fake_created), feed.fake_places) == (0 if in_records else 1, [7])
    assert client.fake_record.subs == {"a": 2}
    assert client.fake_side.position_writer is not None
    assert client.services.stream.consumers == (not in_records)
    assert client.fake_side.bindings[client.fake_record.cons["a"].durable_name].removed is in_records
    assert claimed(client.fake_record)[1].consumerless is in_records
    assert client.fake_side.has_pubrels is not in_records


async def test_a_further_subscription_has_the_same_position() -> None:
    client = FakeSubscriber()
    await client.fake_grant(wishes("a"))
    writer = client.fake_side.position_writer
    await client.fake_grant(wishes("b"))
    assert client.fake_side.position_writer is writer


@pytest.mark.parametrize("why", ["known", "qos 0"])
async def test_what_the_shared_reader_need_not_serve(why: str) -> None:
    """No new subscription at QoS 1 or 2."""
    client = FakeSubscriber()
    await client.fake_grant(wishes("a"))
    client.delivery.feed = feed = FakeFeed()
    await client.fake_grant(wishes("b" if why != "known" else "a", qos=0 if why == "qos 0" else 1))
    assert feed.fake_places == []
    assert client.services.stream.consumers == 1


async def test_a_subscription_raised_from_qos_0() -> None:
    """It passes over what core NATS has brought."""
    client = FakeSubscriber()
    await client.fake_grant(wishes("a"), came=came)
    assert [one.came for one in client.fake_side.bindings.values()] == [came]


def came(message: Stored, sequence: int) -> bool:
    return sequence < 9
