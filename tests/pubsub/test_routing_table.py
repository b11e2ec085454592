# SPDX-License-Identifier: Apache-2.0
"""Subscribers of a topic, with the filter and the QoS of each."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.codec import NotAuthorized, TopicNameInvalid
from mqtt_nats.codec.topics import matches
from mqtt_nats.messages.message import Message, Rich
from mqtt_nats.pubsub import routing_table as module
from mqtt_nats.pubsub.backlog import ENTRY_BYTES, Gate
from mqtt_nats.pubsub.routing_table import Choice, Filter, Route
from mqtt_streams.subjects import ReservedSubject, topic_to_subject, wire_topic
from tests.pubsub.support import Bench, Subscriber, key_of


def test_a_route_has_what_the_message_path_needs() -> None:
    bench = Bench()
    route = bench.route("a/b c")
    assert route.subject == "a.b/_c"
    assert route.pub == b"PUB a.b/_c "
    assert route.hpub == b"HPUB a.b/_c "
    assert route.msgs == b"HPUB $MQTT.msgs.a.b/_c "
    assert bench.table.by_subject[b"a.b/_c"] is route
    assert bench.route("a/b c") is route


@pytest.mark.parametrize("topic", ["$MQTT/x", "$JS/API", "$SYS/x", "_INBOX/x"])
def test_reserved(topic: str) -> None:
    with pytest.raises(NotAuthorized):
        Bench().route(topic)


@pytest.mark.parametrize("topic", ["a" * 3801, "a/+", "a#", ""])
def test_topics_that_are_no_names(topic: str) -> None:
    with pytest.raises(TopicNameInvalid):
        Bench().route(topic)


def test_one_nats_subscription_per_filter() -> None:
    bench = Bench()
    one, two = Subscriber(bench, "one"), Subscriber(bench, "two")
    bench.subscribe(one, "a/#", 0)
    bench.subscribe(two, "a/#", 1)
    bench.subscribe(two, "b", 1)
    assert bench.main.subjects == [b"a.>", b"a", b"b"]
    assert bench.table.unsubscribe(one, "a/#")
    assert not bench.table.unsubscribe(one, "a/#")
    assert not bench.table.unsubscribe(one, "c")
    assert bench.main.subjects == [b"a.>", b"a", b"b"]
    bench.table.leave(two)
    bench.table.leave(two)
    assert bench.main.subjects == []
    assert not bench.table.filters
    assert not two.filters
    assert not bench.route("a/b").local


def test_renew_is_for_one_link() -> None:
    bench = Bench()
    one = Subscriber(bench, "one")
    for text in ("a/#", "#", "+/b"):
        bench.subscribe(one, text, 0)
    assert bench.wild.subjects == [b">", b"*.b"]
    bench.table.renew(bench.wild)  # type: ignore[arg-type]
    assert bench.wild.renewed == [b">", b"*.b"]
    assert bench.main.renewed == []


def test_wildcards_at_the_start_are_not_served_locally() -> None:
    """Their connection gets what this gateway publishes: they would be served twice."""
    bench = Bench()
    near, far = Subscriber(bench, "near"), Subscriber(bench, "far")
    assert bench.subscribe(near, "a/+", 0).local
    assert not bench.subscribe(far, "+/b", 0).local
    assert bench.route("a/b").local.zero == [near.write_buffer]
    bench = Bench(local_dispatch=False)
    assert not bench.subscribe(near, "a/+", 0).local
    assert not bench.route("a/b").local


def serving(route: Route) -> list[Filter]:
    """The filters through which members are served; the others note which messages have come."""
    return [found for found, group in route.groups.items() if group]


def test_first_confirmed_filter_and_highest_qos() -> None:
    bench = Bench()
    one = Subscriber(bench, "one")
    first = bench.subscribe(one, "a/+", 0)
    second = bench.subscribe(one, "a/b", 2)
    bench.subscribe(one, "a/#", 1)
    route = bench.route("a/b")
    assert serving(route) == [first]
    assert route.groups[first].high == [(one, 2)]
    assert route.groups[first].zero == [one.write_buffer]
    assert route.groups[first].low == []
    bench.subscribe(one, "a/+", 1)
    assert serving(bench.route("a/b")) == [first], "a change of QoS keeps the place"
    bench.table.unsubscribe(one, "a/+")
    assert serving(bench.route("a/b")) == [second]
    bench.table.unsubscribe(one, "a/b")
    assert [found.text for found in serving(bench.route("a/b"))] == ["a/#"]
    assert bench.route("a/b").local.high == [(one, 1)]


def test_a_durable_member_gets_qos_1_from_the_stream() -> None:
    bench = Bench()
    one = Subscriber(bench, "one", durable=True)
    two = Subscriber(bench, "two", durable=True)
    bench.subscribe(one, "a", 1)
    bench.subscribe(two, "a", 0)
    group = bench.route("a").local
    assert group.zero == [one.write_buffer, two.write_buffer]
    assert group.low == [two.write_buffer]
    assert group.high == []


def test_every_change_is_seen() -> None:
    bench = Bench()
    one, two = Subscriber(bench, "one"), Subscriber(bench, "two")
    assert not bench.route("a").local
    found = bench.subscribe(one, "a", 0)
    assert bench.route("a").local.low == [one.write_buffer]
    groups = bench.route("a").groups
    bench.subscribe(one, "a", 0)
    assert bench.route("a").groups is groups, "nothing has changed"
    bench.subscribe(one, "a", 1)
    assert bench.route("a").local.high == [(one, 1)]
    bench.subscribe(two, "+", 0)
    assert len(bench.route("a").groups) == 2
    one.close_gate(found)
    bench.table.changed(found)
    assert [(member, choice.found, choice.qos) for member, choice in bench.route("a").local.guarded] == [
        (one, found, 1)
    ]
    assert bench.route("a").local.zero == []
    one.gates = None
    bench.table.changed(found)
    bench.table.leave(two)
    assert bench.route("a").local.high == [(one, 1)]
    assert len(bench.route("a").groups) == 1


def test_a_filter_without_wildcards_concerns_its_topic_only() -> None:
    bench = Bench()
    one, two = Subscriber(bench, "one"), Subscriber(bench, "two")
    bench.subscribe(one, "a", 0)
    bench.subscribe(one, "b/c", 0)
    groups = bench.route("a").groups, bench.route("b/c").groups
    alias = bench.table.route_of_subject(b"b.c/")
    bench.subscribe(two, "b/c", 0)
    assert bench.route("a").groups is groups[0]
    assert bench.route("b/c").groups is not groups[1]
    assert alias is bench.table.route_of_subject(b"b.c/")
    assert alias is not None
    assert alias.local.zero == [one.write_buffer, two.write_buffer]
    bench.table.leave(two)
    assert bench.route("a").groups is groups[0]
    assert bench.route("b/c").local.zero == [one.write_buffer]
    bench.subscribe(two, "+", 0)
    assert bench.route("a").groups is not groups[0]


STEP = st.tuples(
    st.sampled_from("sul"), st.integers(0, 2), st.sampled_from(["a", "a/b", "b", "é", "+", "a/#", "#", "+/b", "$SYS/x"])
)


@given(st.lists(STEP, max_size=30), st.integers(2, 20))
def test_routes_are_never_out_of_date(steps: list[tuple[str, int, str]], most: int) -> None:
    """However subscriptions come and go, and routes are dropped and named by subject, each names who should get it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_ROUTES", most)
        bench = Bench()
        members = [Subscriber(bench, str(number)) for number in range(3)]
        for number, (kind, who, text) in enumerate(steps):
            member = members[who]
            if kind == "s":
                bench.subscribe(member, text, 0)
            elif kind == "u":
                bench.table.unsubscribe(member, text)
            else:
                bench.table.leave(member)
            bench.table.route_of_subject(b"other.%d" % number)
            beside = bench.table.route_of_subject(b"$MQTT_SYS.x")
            assert beside is not None
            assert {each for group in beside.groups.values() for each in group.zero} == {
                each.write_buffer for each in members if any(found.text == "$SYS/x" for found in each.filters)
            }
            for topic, subject in (("a", b"a/"), ("a/b", b"a.b/"), ("b", b"b"), ("é", "é".encode())):
                expected = [
                    each.write_buffer for each in members if any(matches(found.text, topic) for found in each.filters)
                ]
                for route in (bench.route(topic), bench.table.route_of_subject(subject)):
                    assert route is not None
                    found = [write_buffer for group in route.groups.values() for write_buffer in group.zero]
                    assert sorted(map(id, found)) == sorted(map(id, expected))


def test_subjects_of_nats_clients() -> None:
    bench = Bench()
    one = Subscriber(bench, "one")
    bench.subscribe(one, "a/b", 0)
    route = bench.table.route_of_subject(b"a.b")
    assert route is not None
    assert route is bench.route("a/b")
    assert bench.table.route_of_subject(b"a.b/") is route, "a lone slash leads to the same topic"
    assert bench.table.route_of_subject(b"a.\xff") is None
    assert bench.table.route_of_subject(b"a.+") is None
    bench.table.leave(one)
    again = bench.table.route_of_subject(b"a.b/")
    assert again is not None
    assert not again.local


@pytest.mark.parametrize(
    ("topic", "subject"),
    [
        ("$SYS/broker/uptime", b"$MQTT_SYS.broker.uptime"),
        ("$JS/API/x", b"/$JS.API.x"),
        ("_INBOX/x", b"_INBOX.x"),
        ("a" * 3801, b"a" * 3801),
        ("a/" * 128 + "a", b"a." * 128 + b"a"),
    ],
)
def test_what_arrives_may_not_be_published_for_that(topic: str, subject: bytes) -> None:
    """A gateway and NATS clients publish on what is denied to clients, or is too much for them."""
    bench = Bench()
    one = Subscriber(bench, "one")
    bench.subscribe(one, topic, 0, subjects=(subject.decode(),))
    arrived = bench.table.route_of_subject(subject)
    assert arrived is not None
    assert [write_buffer for group in arrived.groups.values() for write_buffer in group.zero] == [one.write_buffer]
    with pytest.raises((NotAuthorized, TopicNameInvalid)):
        bench.route(topic)
    bench.table.leave(one)
    assert bench.table.route_of_subject(subject) is arrived
    assert not arrived.groups
    bench.subscribe(one, topic, 0, subjects=(subject.decode(),))
    bench.table.version += 1
    bench.table.release()
    assert not arrived.groups, "nobody is kept in memory by it"


SUBJECT = st.lists(
    st.sampled_from(["a", "b", "/", "_", "$", "*", ">", "$SYS", "$MQTT_SYS", "_INBOX", "é"]), min_size=1, max_size=4
)


@given(st.lists(st.lists(SUBJECT, min_size=1, max_size=3), min_size=1, max_size=4))
def test_nothing_that_arrives_changes_where_a_topic_is_published(subjects: list[list[list[str]]]) -> None:
    """Whatever subjects NATS clients use."""
    bench = Bench()
    for tokens in subjects:
        subject = ".".join(map("".join, tokens)).encode()
        bench.table.route_of_subject(subject)
        topic = wire_topic(subject)
        if topic is None:
            continue
        try:
            expected = topic_to_subject(topic)
        except ReservedSubject:
            with pytest.raises(NotAuthorized):
                bench.route(topic)
        else:
            assert bench.route(topic).pub == b"PUB %b " % expected.encode()
            assert bench.route(topic).msgs == b"HPUB $MQTT.msgs.%b " % expected.encode()


def test_the_routes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROUTES", 10)
    bench = Bench()
    one = Subscriber(bench, "one")
    bench.subscribe(one, "#", 0)
    for number in range(35):
        assert bench.route(f"t/{number}").groups
    assert len(bench.table.routes) <= 10
    assert len(bench.table.by_subject) <= 10


def test_the_memory_of_routes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROUTE_BYTES", 1024 * 1024)
    bench = Bench()
    for number in range(100):
        bench.route(f"{number}/" + "x" * 3000)
    assert 10 < len(bench.table.routes) < 60
    for number in range(500):
        bench.subscribe(Subscriber(bench, f"{number}"), "#", 1)
    for number in range(100):
        assert len(next(iter(bench.route(f"t/{number}").groups.values())).zero) == 500
        assert len(bench.table.routes) < 60


def test_routes_that_are_not_used_let_go_of_members() -> None:
    bench = Bench()
    one, other = Subscriber(bench, "one"), Subscriber(bench, "other")
    bench.subscribe(one, "a/+", 1)
    bench.subscribe(other, "a/#", 1)
    idle, busy = bench.route("a/idle"), bench.route("a/busy")
    bench.table.leave(one)
    bench.route("a/busy")
    bench.table.release()
    assert not idle.groups
    assert not idle.local
    assert len(busy.groups) == 1
    assert len(bench.route("a/idle").groups) == 1


def test_gate() -> None:
    bench = Bench()
    found = bench.subscribe(Subscriber(bench, "one"), "a", 1)
    held: list[int] = []
    gate = Gate(found, 200, hold=held.append)
    small = Message(key_of("a"), b"x" * 50, 1)
    zero, one, two = (Choice(found, qos, b"", False) for qos in range(3))
    assert gate.keep_back(one, small)
    assert gate.keep_back(one, Message(key_of("a"), b"x" * 80, 0))
    assert not gate.keep_back(one, small), "a message at QoS 1 must not be dropped unseen"
    assert gate.keep_back(zero, small), "one at QoS 0 may be"
    assert gate.keep_back(two, Message(key_of("a"), b"x" * 50, 0))
    assert held == [50 + 3 + ENTRY_BYTES, 80 + 3 + ENTRY_BYTES]
    assert [len(message.payload) for _, message in gate.close()] == [50, 80]
    assert sum(held) == gate.waiting_bytes == 0


def test_properties_and_topic_of_a_message_at_a_gate_count() -> None:
    bench = Bench()
    found = bench.subscribe(Subscriber(bench, "one"), "a", 1)
    gate = Gate(found, 10_000)
    zero = Choice(found, 0, b"", False)
    for _ in range(3):
        assert gate.keep_back(zero, Rich(key_of("a" * 1000), b"", 0, body=b"x" * 3000))
    assert (len(gate.waiting), gate.dropped) == (2, 1)
    assert gate.waiting_bytes == 2 * (1002 + 3000 + ENTRY_BYTES)


def test_what_comes_in_another_way_is_discarded_from_a_gate() -> None:
    """By its id; the room that it took is there again, and a later gate of the same subscription has no more."""
    bench = Bench()
    found = bench.subscribe(Subscriber(bench, "one"), "a", 1)
    gate = Gate(found, 330)
    zero = Choice(found, 0, b"", False)
    for known in (b"1", b"", b"2", b""):
        assert gate.keep_back(zero, Message(key_of("a"), known, 1), known)
    room = gate.room
    gate.discard(b"3")
    gate.discard(b"")
    assert gate.room == room
    gate.discard(b"1")
    assert gate.room == room + 1 + 3 + ENTRY_BYTES
    later = Gate(found, gate.room, gate)
    assert later.keep_back(zero, Message(key_of("a"), b"x" * 140, 1), b"4")
    assert (later.dropped, list(later.waiting)) == (1, [])
    gate.discard_stored()
    assert [message.payload for _, message in gate.close()] == [b"", b""]


def test_a_gate_opens_when_all_that_it_waits_for_is_over() -> None:
    """Then those go that stand behind it."""
    bench = Bench()
    found = bench.subscribe(Subscriber(bench, "one"), "a", 1)
    former = Gate(found, 300)
    gate = Gate(found, 300, former)
    gone: list[str] = []
    gate.after.append(partial(gone.append, "after"))
    gate.hold()
    gate.hold()
    assert (gate.unhold(), gate.former) == (False, former)
    former.close()
    assert (gate.unhold(), gate.former) == (True, None), "what has gone is not remembered"
    gate.let_go()
    gate.let_go()
    assert gone == ["after"]


FILTERS = st.sampled_from(["a", "a/b", "a/+", "a/#", "#", "+", "+/b", "b/#"])
TOPICS = st.sampled_from(["a", "a/b", "a/c", "b", "b/b", "$x/b"])
STEPS = st.lists(
    st.tuples(st.sampled_from(["subscribe", "unsubscribe", "leave"]), st.integers(0, 2), FILTERS, st.integers(0, 2)),
    max_size=20,
)


@given(STEPS, st.lists(TOPICS, min_size=1, max_size=3), st.booleans(), st.integers(0, 2))
def test_each_member_gets_a_message_once(
    steps: list[tuple[str, int, str, int]], topics: list[str], foreign: bool, qos: int
) -> None:
    """Whatever was subscribed in which order: one copy per member, at the QoS it is due, by either way."""
    bench = Bench()
    members = [Subscriber(bench, "one"), Subscriber(bench, "two"), Subscriber(bench, "durable", durable=True)]
    granted: list[dict[str, int]] = [{}, {}, {}]
    for step, number, text, high in steps:
        for topic in topics:
            bench.route(topic)
        if step == "subscribe":
            bench.subscribe(members[number], text, high)
            granted[number][text] = high
        elif step == "unsubscribe":
            assert bench.table.unsubscribe(members[number], text) == (granted[number].pop(text, None) is not None)
        else:
            bench.table.leave(members[number])
            granted[number].clear()
    for sequence, topic in enumerate(topics):
        for member in members:
            member.bytes.clear()
            member.taken.clear()
        route = bench.route(topic)
        headers = b"NATS/1.0\r\nNmqtt-Pub:%d\r\nNmqtt-Id:%032d\r\n\r\n" % (qos, sequence)
        if foreign:
            bench.from_nats(route.subject.encode(), headers)
        else:
            bench.fanout.local(route, Message(route.key, b"x", qos))
            for pattern, handler in list(bench.wild.subscribed.values()):  # no_echo holds for the main link only
                if any(
                    pattern in found.subjects and matches(found.text, topic) for found in bench.table.filters.values()
                ):
                    handler(route.subject.encode(), b"", headers, b"x")
            bench.turn()
        for member, subscriptions in zip(members, granted, strict=True):
            due = [high for text, high in subscriptions.items() if matches(text, topic)]
            expected = min(max(due, default=0), qos)
            packet = bytes((0x30, len(route.key) + 1)) + route.key + b"x"
            if not due or (expected and member.durable):
                assert (member.bytes, member.taken) == ([], [])
            elif expected:
                assert (member.bytes, member.taken) == ([], [(b"x", expected)])
            else:
                assert (b"".join(member.bytes), member.taken) == (packet, [])
