# SPDX-License-Identifier: Apache-2.0
"""Subscription options of MQTT 5.0, and members of both versions on one topic."""

import pytest

from mqtt_nats.codec import ClientDecoder, Limits, PublishRun
from mqtt_nats.messages.message import Message, Rich
from mqtt_nats.pubsub.routing_table import Choice, Options, Route
from tests.pubsub.support import Bench, Subscriber, key_of

LIMITS = Limits(
    max_packet_size=1 << 20, connect_packet_size=1 << 16, max_topic_levels=128, max_filters=100, max_user_properties=64
)
FOUR, FIVE = b"\x30\x04\0\x01ax", b"\x30\x05\0\x01a\0x"


def choice_of(route: Route, member: Subscriber) -> Choice:
    """The one choice of a member."""
    found = [choice for group in route.groups.values() for who, choice in group.guarded if who is member]
    assert len(found) == 1
    return found[0]


def test_each_version_gets_its_own_encoding() -> None:
    bench = Bench()
    four, five = Subscriber(bench, "four"), Subscriber(bench, "five", version=5)
    bench.subscribe(four, "a", 0)
    bench.subscribe(five, "a", 1)
    bench.fanout.local(bench.route("a"), Message(key_of("a"), b"x", 0))
    bench.turn()
    bench.from_nats(b"a", payload=b"x")
    assert four.bytes == [FOUR, FOUR]
    assert five.bytes == [FIVE, FIVE]


def test_qos_1_to_members_granted_0() -> None:
    bench = Bench()
    four, five = Subscriber(bench, "four"), Subscriber(bench, "five", version=5)
    bench.subscribe(four, "a", 0)
    bench.subscribe(five, "a", 0)
    bench.fanout.local(bench.route("a"), Message(key_of("a"), b"x", 1))
    bench.turn()
    assert (four.bytes, five.bytes) == ([FOUR], [FIVE])


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_run_is_converted_for_the_other_version(version: int, count: int) -> None:
    bench = Bench()
    members = {4: Subscriber(bench, "four"), 5: Subscriber(bench, "five", version=5)}
    sender = Subscriber(bench, "sender", version=version)
    for member in members.values():
        bench.subscribe(member, "a", 0)
    raw = {4: FOUR, 5: FIVE}[version] * count
    run = PublishRun(key_of("a"), raw, count, len(raw) // count, len(raw) // count - 1)
    bench.fanout.run(bench.route("a"), run, sender)
    bench.round.start()
    bench.turn()
    assert b"".join(members[4].bytes) == FOUR * count
    assert b"".join(members[5].bytes) == FIVE * count
    assert bench.fanout.sent == [2 * count, 0, 0]


def test_properties_reach_5_only() -> None:
    bench = Bench()
    four, five = Subscriber(bench, "four"), Subscriber(bench, "five", version=5)
    bench.subscribe(four, "a", 0)
    bench.subscribe(five, "a", 0)
    bench.fanout.local(bench.route("a"), Rich(key_of("a"), b"x", 0, body=b"\x01\x01", expiry=9, born=0.0))
    bench.turn()
    assert four.bytes == [FOUR]
    (packet,) = ClientDecoder(LIMITS, 5).feed(bytes(five.bytes[0]))
    assert getattr(packet, "properties", None) == {"payload_format_indicator": 1, "message_expiry_interval": 9}


def test_options_of_matching_subscriptions_are_added_up() -> None:
    bench = Bench()
    one = Subscriber(bench, "one", version=5)
    bench.subscribe(one, "a", 0, Options(identifier=7))
    bench.subscribe(one, "+", 2)
    bench.subscribe(one, "#", 1, Options(retain_as_published=True, identifier=300))
    choice = choice_of(bench.route("a"), one)
    assert (choice.found.text, choice.qos, choice.ids, choice.kept) == ("a", 2, b"\x0b\x07\x0b\xac\x02", True)
    assert choice.own is choice


def test_no_local_is_of_the_subscription_not_of_the_session() -> None:
    bench = Bench()
    one = Subscriber(bench, "one", version=5)
    bench.subscribe(one, "a", 2, Options(no_local=True, identifier=1))
    assert choice_of(bench.route("a"), one).own is None
    bench.subscribe(one, "+", 1, Options(identifier=2))
    own = choice_of(bench.route("a"), one).own
    assert own is not None
    assert (own.qos, own.ids) == (1, b"\x0b\x02")
    bench.subscribe(one, "a", 2, Options(identifier=1))
    assert choice_of(bench.route("a"), one).own is choice_of(bench.route("a"), one)


def test_options_end_with_the_subscription() -> None:
    bench = Bench()
    one = Subscriber(bench, "one", version=5)
    bench.subscribe(one, "a", 0, Options(identifier=1))
    bench.subscribe(one, "a", 0)
    assert not bench.route("a").local.guarded
    bench.subscribe(one, "a", 0, Options(identifier=1))
    assert bench.route("a").local.guarded
    bench.table.unsubscribe(one, "a")
    bench.subscribe(one, "a", 0)
    assert not bench.route("a").local.guarded


def test_an_old_session_knows_no_identifiers() -> None:
    """A session that a 5.0 client has made goes on with 3.1.1."""
    bench = Bench()
    one = Subscriber(bench, "one")
    bench.subscribe(one, "a", 1, Options(retain_as_published=True, identifier=1))
    assert not bench.route("a").local.guarded
    bench.subscribe(one, "a", 1, Options(no_local=True))
    assert choice_of(bench.route("a"), one).own is None
