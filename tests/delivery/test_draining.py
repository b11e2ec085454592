# SPDX-License-Identifier: Apache-2.0
"""Ended and lowered subscriptions: what they still bring to the client, who waits for them, and that they go."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import nats
import orjson
import pytest

from mqtt_nats.delivery import draining
from mqtt_nats.delivery.draining import (
    drain,
    finish,
    lower,
    may_have,
    meeting,
    note_exhausted,
    note_read,
    release_waiting,
    release_waiting_for,
    stand_behind,
    still_bringing,
    still_draining,
    unmatch,
    watch,
)
from mqtt_nats.messages.message import Message, Stored
from mqtt_nats.protocol.durable_sender import packet_id
from mqtt_nats.protocol.inflight import Delivery, SubscriptionState
from mqtt_nats.pubsub.backlog import Gate
from mqtt_nats.pubsub.routing_table import Filter
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.api import NoResponders
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.hashing import name_hash
from mqtt_streams.sessions import Conflict, Draining
from tests.delivery.fakes import FakeDeliveryServices, FakeReceiver, Side
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually
from tests.protocol.recorder import PUBACK, session
from tests.sessions.fakes import v5_of


class Session:
    """A session with subscriptions of subjects, which readers serve."""

    def __init__(self, *subjects: str, limit: int = 10, qos: int = 1) -> None:
        self.services = FakeDeliveryServices()
        self.machine, self.ports = session(limit=limit)
        self.client: Any = FakeReceiver(self.services, "me")
        self.client.options = 0
        self.reached = 0
        self.removed: list[str] = []
        self.side: Any = Side(self.machine, client=self.client, settle=self._settle, remove=self._remove)
        self.client.durable_side = self.side
        for subject in subjects:
            self.add(subject, qos)

    def _settle(self) -> None:
        for one in self.side.bindings.values():
            one.source.deliver_to(max(one.source.last, self.reached))

    async def _remove(self, names: list[str]) -> None:
        self.removed += names

    def add(self, subject: str, qos: int = 1, start: int = 1) -> ConsumerBinding:
        source = SubscriptionState(qos, start)
        consumer = ConsumerRef(f"of {subject}", "", f"$MQTT.msgs.{subject}", 100)
        binding = ConsumerBinding(subject, consumer, source)
        binding.begin_after(start - 1, removed=True)
        self.machine.drop_hold(source, SubscriptionState.RETURNING)
        self.machine.sources.append(source)
        self.side.bindings[consumer.durable_name] = binding
        self.side.overlap.add(subject, binding, source)
        self.client.record.cons[subject] = consumer
        return binding

    def message(self, sequence: int, subject: str = "t", sender: str = "somebody", qos: int = 1) -> Stored:
        headers = f"NATS/1.0\r\nNmqtt-Pub:{qos}\r\nNmqtt-Client:{sender}\r\n\r\n".encode()
        return self.services.path.recent.message(sequence, b"1", f"$MQTT.msgs.{subject}".encode(), headers, b"")

    def bring(self, binding: ConsumerBinding, sequence: int, subject: str = "t", sender: str = "somebody") -> None:
        self.machine.arrived(binding.source, sequence, 1, b"%d" % sequence, self.message(sequence, subject, sender), 1)

    def sent(self) -> list[object]:
        """Sequences of the messages that were sent."""
        return [call[1] for call in self.ports.calls if call[0] == "publish"]


def gate_of(*subjects: bytes) -> Gate:
    """A closed gate of a filter with these subjects."""
    found = cast("Filter", type("Found", (), {"subjects": subjects, "text": "t"})())
    return Gate(found, 1 << 20)


# -- ended subscriptions ------------------------------------------------------------------------------


async def test_an_ended_subscription_leaves_the_record() -> None:
    """Its consumer can go: its messages in flight are in the position."""
    one = Session("t", "u")
    v5 = v5_of(one.client)
    v5.start, v5.replay, v5.was = {"t": 3, "u": 4}, {"t": 3, "u": 4}, {"t": (2, 3), "u": (2, 4)}
    one.reached = 20
    binding = one.side.bindings["of t"]
    assert drain(one.side, "t") == "of t"
    assert list(one.client.record.cons) == ["u"]
    assert [list(part) for part in (v5.start, v5.replay, v5.was)] == [["u"]] * 3
    assert v5.draining == [Draining("of t", "$MQTT.msgs.t", 0, 20, 1)]
    assert (binding.key, binding.source.ended, binding.source.end) == ("", True, 20)
    assert one.side.overlap.matching("t", 5, False) == []


@pytest.mark.parametrize(
    ("subject", "qos", "no_local", "kept"), [("t", 1, False, True), ("*", 2, True, False), ("u", 1, False, False)]
)
async def test_a_waiting_message_goes_with_its_ended_subscription(
    subject: str, qos: int, no_local: bool, kept: bool
) -> None:
    """Unless a remaining subscription has left it to that one; an own message is nothing for No Local."""
    one = Session(">", limit=1)
    ended = one.side.bindings["of >"]
    other = one.add(subject, qos)
    other.source.no_local = no_local
    one.bring(ended, 4)
    one.bring(ended, 5, sender="me")
    assert one.sent() == [4]
    drain(one.side, ">")
    one.machine.acknowledged(PUBACK, [packet_id(4)])
    assert one.sent() == ([4, 5] if kept else [4])


async def test_a_waiting_message_goes_at_the_qos_of_the_remaining_subscription() -> None:
    one = Session(">", limit=1, qos=2)
    ended = one.side.bindings["of >"]
    one.add("t", 1)
    one.bring(ended, 4)
    one.machine.arrived(ended.source, 5, 1, b"5", one.message(5, qos=2), 2)
    drain(one.side, ">")
    one.machine.acknowledged(PUBACK, [packet_id(4)])
    assert [call[1:3] for call in one.ports.calls if call[0] == "publish"] == [(4, 1), (5, 1)]


@pytest.mark.parametrize(("reached", "kept"), [(5, 2), (0, 1)])
async def test_a_waiting_message_that_a_remaining_subscription_matches_keeps_its_qos(reached: int, kept: int) -> None:
    """As every message so far, which may have been sent at the QoS of the ended one; else that of the remaining one."""
    one = Session(limit=1)
    ended = one.add(">", 2)
    one.add("t", 1, 2)
    for sequence in (4, 5):
        message = one.message(sequence, qos=2)
        one.machine.arrived(ended.source, sequence, 1, b"%d" % sequence, message, 2)
    one.reached = reached
    drain(one.side, ">")
    assert [(found.sequence, found.qos) for found in one.machine.on_their_way()] == [(4, 2), (5, kept)]


@pytest.mark.parametrize(("perhaps", "suspects"), [(9, [(6, 9)]), (5, []), (0, [])])
async def test_identifiers_of_what_was_perhaps_sent_are_suspect(
    monkeypatch: pytest.MonkeyPatch, perhaps: int, suspects: list[tuple[int, int]]
) -> None:
    """A dead gateway may have sent messages that readers have not brought, and that come no more."""
    one = Session("t")
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(one.machine, "suspect", lambda low, high: found.extend([(low, high)] if low <= high else []))
    one.machine.sent_perhaps(perhaps)
    one.machine.read_to(5)
    drain(one.side, "t")
    assert found == suspects


async def test_what_was_perhaps_sent_is_completed() -> None:
    """Also when it waits, and its subscription has ended [MQTT-3.10.4-3] (3.1.1)."""
    one = Session("t", limit=1)
    one.machine.sent_perhaps(5)
    for sequence in (4, 5, 6):
        one.bring(one.side.bindings["of t"], sequence)
    drain(one.side, "t")
    for sequence in (4, 5):
        one.machine.acknowledged(PUBACK, [packet_id(sequence)])
    assert one.sent() == [4, 5]


async def test_the_record_notes_the_higher_qos_that_is_left_to_others() -> None:
    """Messages so far may have been sent at it: they are sent again at no lower one."""
    one = Session()
    higher, lower_one = one.add(">", 2), one.add("t", 1)
    lower_one.source.deliver_to(9)
    unmatch(one.side, higher)
    assert v5_of(one.client).was == {"t": (2, 9)}


# -- lowered subscriptions ----------------------------------------------------------------------------


@pytest.mark.parametrize(("end", "qos"), [(30, 1), (0, 0)])
async def test_a_lowered_subscription_is_served_up_to_its_end(end: int, qos: int) -> None:
    """[MQTT-3.8.4-4] (5.0)"""
    one = Session("t")
    gate = gate_of(b"t")
    binding = lower(one.side, "t", end, [gate], False)
    assert v5_of(one.client).draining == [Draining("of t", "$MQTT.msgs.t", qos, end, 1, True)]
    assert (binding.key, binding.drained, binding.gates, gate.users) == ("", False, [gate], 1)
    assert binding.source.is_served
    assert one.client.record.cons == {}
    assert [one.side.overlap.owner("t", sequence)[0] for sequence in (end, end + 1)] == [binding if end else None, None]


async def test_a_lowered_subscription_of_a_resumed_session() -> None:
    one = Session("t")
    gate = gate_of(b"t")
    still_draining(one.side.bindings["of t"], [gate])
    binding = one.side.bindings["of t"]
    assert (binding.drained, binding.gates, gate.users) == (False, [gate], 1)
    assert still_bringing(one.side) == [], "it was not lowered"
    binding.source.end_at(9, whole=True)
    assert still_bringing(one.side) == [binding]


async def test_core_nats_copies_of_what_readers_bring_are_dropped() -> None:
    one = Session("t")
    gate = gate_of(b"t")
    binding = lower(one.side, "t", 30, [gate], False)
    message = one.message(5)
    found = Stored("t", b"\0\1t", b"", 1, 1, False, b"", b"NATS/1.0\r\nNmqtt-Id:known\r\n\r\n")
    waiting = cast("Message", message)
    known = b"known"
    gate.waiting = {known: (cast("Any", None), waiting)}
    note_read(one.side, message, 5)
    assert list(gate.waiting) == [known], "another message"
    note_read(one.side, found, 31)
    assert list(gate.waiting) == [known], "it is none of the lowered subscription"
    note_read(one.side, found, 6)
    assert (gate.waiting, binding.gates) == ({}, [gate])


async def test_all_messages_of_a_lowered_subscription_were_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those at QoS 0 go after them, then those of new subscriptions; then the consumer goes."""
    closed: list[object] = []
    saved: list[object] = []

    async def save(client: object) -> None:
        saved.append(client)

    monkeypatch.setattr(draining, "close_gate", lambda client, gate: closed.append(gate))
    monkeypatch.setattr(draining, "save_when_room", save)
    one = Session("t", limit=1)
    gate = gate_of(b"t")
    binding = lower(one.side, "t", 30, [gate], False)
    behind = SubscriptionState(1, 31)
    stand_behind(one.side, [binding], behind, "t")
    one.bring(binding, 5)
    one.bring(binding, 6)
    note_exhausted(one.side, binding)
    assert (closed, behind.held, one.client.fake_jobs) == ([], SubscriptionState.BEHIND, []), "one waits"
    one.machine.acknowledged(PUBACK, [packet_id(5)])
    release_waiting_for(one.side, SubscriptionState(1, 1))
    assert closed == [], "a message of another subscription was sent"
    release_waiting_for(one.side, binding.source)
    assert (closed, behind.held, binding.gates) == ([gate], 0, [])
    assert one.client.fake_jobs == [], "one is in flight"
    one.machine.acknowledged(PUBACK, [packet_id(6)])
    finish(one.side, binding)
    await one.client.fake_work()
    assert (one.removed, saved) == (["of t"], [one.client])


async def test_what_an_earlier_connection_has_taken_comes_first() -> None:
    """It may be of the lowered subscription: nobody knows which."""
    one = Session("t", limit=1)
    binding = lower(one.side, "t", 30, [], False)
    one.side.add_past()
    for sequence in (5, 6):
        one.machine.arrived(one.side.past, sequence, 2, b"%d" % sequence, one.message(sequence), 1)
    note_exhausted(one.side, binding)
    assert still_bringing(one.side) == [binding]
    one.machine.acknowledged(PUBACK, [packet_id(5)])
    release_waiting_for(one.side, one.side.past)
    assert (still_bringing(one.side), len(one.client.fake_jobs)) == ([], 1)
    one.client.fake_jobs.pop().close()


async def test_nothing_goes_on_while_the_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has not read is given up, and fetched again: until then nobody knows that nothing is left."""
    closed: list[object] = []
    monkeypatch.setattr(draining, "close_gate", lambda client, gate: closed.append(gate))
    one = Session("t")
    gate = gate_of(b"t")
    binding = lower(one.side, "t", 30, [gate], False)
    behind = SubscriptionState(1, 31)
    stand_behind(one.side, [binding], behind, "t")
    one.side.begin_stall(object())
    note_exhausted(one.side, binding)
    assert (closed, behind.held, still_bringing(one.side)) == ([], SubscriptionState.BEHIND, [binding])
    assert one.client.fake_jobs == []
    one.side.end_stall()
    release_waiting(one.side, binding)
    assert (closed, behind.held, still_bringing(one.side)) == ([gate], 0, [])
    one.client.fake_jobs.pop().close()


async def test_nothing_is_known_before_the_session_begins() -> None:
    one = Session("t")
    one.machine.begun = False
    binding = lower(one.side, "t", 30, [], False)
    binding.exhaust()
    release_waiting(one.side, binding)
    assert (still_bringing(one.side), one.client.fake_jobs) == ([binding], [])


async def test_a_session_that_has_moved_when_its_lowered_subscription_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def save(client: object) -> None:
        raise Conflict("me")

    monkeypatch.setattr(draining, "save_when_room", save)
    one = Session("t")
    binding = lower(one.side, "t", 30, [], False)
    binding.exhaust()
    finish(one.side, binding)
    await one.client.fake_work()
    assert one.client.fake_ended == ["taken over"]


@pytest.mark.parametrize("why", ["removed meanwhile", "a message came"])
async def test_a_lowered_subscription_that_is_not_removed(why: str) -> None:
    one = Session("t")
    binding = lower(one.side, "t", 30, [], False)
    binding.exhaust()
    finish(one.side, binding)
    if why == "removed meanwhile":
        del one.side.bindings["of t"]
    else:
        one.bring(binding, 5)
    await one.client.fake_work()
    assert one.removed == []


# -- who waits for lowered subscriptions --------------------------------------------------------------


def test_filters_that_may_bring_the_same_messages() -> None:
    filters = {name: gate_of(*subjects).found for name, subjects in {"a": [b"a"], "b": [b"b", b"b.>"]}.items()}
    member: Any = type("Member", (), {"filters": filters.values()})()
    assert meeting(member, ["b.*"]) == [filters["b"]]
    assert meeting(member, ["a", "c"]) == [filters["a"]]
    assert meeting(member, []) == []


async def test_a_new_subscription_stands_behind_older_messages() -> None:
    """Behind each lowered one that it meets, and behind what waits at QoS 0."""
    one = Session("t", "u")
    older = [lower(one.side, name, 30, [], False) for name in ("t", "u")]
    gate, empty = gate_of(b"t"), gate_of(b"t")
    gate.waiting = {1: (cast("Any", None), cast("Any", None))}
    one.client.gates = {gate.found: gate, empty.found: empty}
    one.client.filters = {gate.found: 0, empty.found: 0}
    source = SubscriptionState(1, 31)
    stand_behind(one.side, older, source, "t")
    assert source.held == 2 * SubscriptionState.BEHIND
    assert [binding.behind for binding in older] == [[source], []]
    assert (len(gate.after), len(empty.after)) == (1, 0)
    gate.let_go()
    assert source.held == SubscriptionState.BEHIND
    release_waiting(one.side, older[0])
    assert source.held == SubscriptionState.BEHIND, "it has messages left"
    note_exhausted(one.side, older[0])
    assert source.held == 0
    for job in one.client.fake_jobs:
        job.close()


# -- the look for the rest ----------------------------------------------------------------------------


async def test_the_rest_of_a_lowered_subscription_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for when the reader has come further, and again when JetStream does not answer."""
    monkeypatch.setattr(draining, "READ_CHECK_S", 0.0)
    one = Session("t")
    binding = lower(one.side, "t", 30, [], False)
    asked: list[tuple[list[str], int, int]] = []
    answers: list[bool | Exception] = [False, NoResponders("no leader"), False, True]

    async def nothing_left(subjects: list[str], reached: int, end: int) -> bool:
        asked.append((subjects, reached, end))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(one.services.head, "nothing_left", nothing_left)
    watch(one.side, binding)
    for reached, number in ((10, 1), (20, 3), (30, 4)):
        one.reached = reached
        for _ in range(20):
            await asyncio.sleep(0)
        assert [found[1] for found in asked] == [10, 20, 20, 30][:number]
        assert binding.drained is (number == 4)
    assert asked[0] == (["$MQTT.msgs.t"], 10, 30)
    await one.services.tasks.fake_settle()
    for job in one.client.fake_jobs:
        job.close()


@pytest.mark.parametrize("why", ["left", "drained", "removed"])
async def test_nobody_looks_any_more(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    one = Session("t")
    binding = lower(one.side, "t", 30, [], False)
    monkeypatch.setattr(one.services.head, "nothing_left", None)
    if why == "left":
        one.client.alive = False
    elif why == "drained":
        binding.exhaust()
    else:
        del one.side.bindings["of t"]
    watch(one.side, binding)
    await asyncio.wait_for(one.services.tasks.fake_settle(), 5)


# -- what the rules allow -----------------------------------------------------------------------------


class Rules:
    """Rules of the client; what is sent against them is noted."""

    def __init__(self, *, at_delivery: bool = False, allowed: bool = False) -> None:
        self.at_delivery, self._allowed = at_delivery, allowed
        self.audited: list[str] = []

    def withholds(self, key: bytes, qos: int, identity: object) -> bool:
        return not self._allowed

    def allows(self, topic: str, qos: int) -> bool:
        return self._allowed

    def audit(self, what: str) -> None:
        self.audited.append(what)


def asks_for(
    one: Session, rules: Rules | None, source: SubscriptionState, *, dup: bool, qos: int = 2
) -> tuple[bool, list[int]]:
    """Whether a message may be sent, and the identifiers that the client is asked to give up."""
    asked: list[int] = []
    cast("Any", one.machine).ask = asked.append
    one.client.guarded = rules
    message = one.message(7, qos=qos)
    delivery = Delivery(source, 7, packet_id(7), qos, message, b"", dup)
    return may_have(one.side, delivery, message, dup), asked


@pytest.mark.parametrize("dup", [True, False])
@pytest.mark.parametrize("qos", [1, 2])
async def test_rules_are_looked_at_for_each_message(dup: bool, qos: int) -> None:
    one = Session("t")
    source = one.side.bindings["of t"].source
    assert asks_for(one, Rules(at_delivery=True, allowed=True), source, dup=dup, qos=qos) == (True, [])
    asked = [packet_id(7)] if dup and qos == 2 else []
    assert asks_for(one, Rules(at_delivery=True), source, dup=dup, qos=qos) == (False, asked)


@pytest.mark.parametrize("kind", ["new", "again", "ended", "past"])
async def test_rules_of_messages_that_no_present_subscription_matches(kind: str) -> None:
    """A new message comes from a subscription that was allowed."""
    one = Session()
    one.side.add_past()
    source = one.side.past if kind == "past" else SubscriptionState(1, 1, end=9 if kind == "ended" else None)
    rules = Rules()
    dup = kind == "again"
    assert asks_for(one, rules, source, dup=dup) == (kind == "new", [packet_id(7)] if dup else [])
    assert rules.audited == ([] if kind == "new" else ["sending 't' again"])
    assert asks_for(one, Rules(allowed=True), source, dup=dup) == (True, [])
    one.add("t")
    assert asks_for(one, Rules(), source, dup=dup) == (True, []), "a present subscription was allowed"


@pytest.mark.parametrize("what", ["shared", "at QoS 0"])
async def test_other_subscriptions_that_were_allowed(what: str) -> None:
    one = Session()
    source = SubscriptionState(1, 1)
    assert asks_for(one, Rules(), source, dup=True)[0] is False
    if what == "shared":
        one.client.shares = {"$share/g/t": type("Share", (), {"source": source})()}
    else:
        one.client.filters = {gate_of(b"t").found: 0}
    assert asks_for(one, Rules(), source, dup=True) == (True, [])


# -- with a gateway -----------------------------------------------------------------------------------


async def test_a_subscription_that_has_brought_nothing(gateway: Gateway, nats_server: NatsServer) -> None:
    """Another one, which matches the same, had brought all there was when it began."""
    control = await nats.connect(nats_server.url)

    async def consumers() -> int:
        answer = await control.request("$JS.API.CONSUMER.NAMES.$MQTT_msgs", timeout=10)
        names = orjson.loads(answer.data)["consumers"] or []
        return sum(name.startswith(f"{name_hash('drained')}_") for name in names)

    async def only_one() -> bool:
        return await consumers() == 1

    try:
        async with (
            await RawClient.connect(gateway.port, "drained", clean=False) as client,
            await RawClient.connect(gateway.port, "publisher") as publisher,
        ):
            await client.subscribe("drained/topic", qos=1)
            for number in range(3):
                await publisher.deliver("drained/topic", b"%d" % number, 1)
                await client.receive("drained/topic", b"%d" % number)
            await client.subscribe("drained/#", qos=1)
            assert await consumers() == 3
            await client.unsubscribe("drained/#")
            await aeventually(only_one, 30, what="one consumer")
    finally:
        await control.close()
