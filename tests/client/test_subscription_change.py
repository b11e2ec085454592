# SPDX-License-Identifier: Apache-2.0
"""Another QoS of a subscription, and its end: no message is lost, none comes twice."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import Any, cast

import pytest

from mqtt_nats.backbone import retry
from mqtt_nats.backbone.pending_stores import PendingStore
from mqtt_nats.client import subscription_change as changing
from mqtt_nats.client.client import Client
from mqtt_nats.client.grant import grant
from mqtt_nats.client.subscription_change import (
    CoreCopies,
    Lowering,
    Raising,
    Wish,
    begin_lowering,
    finish_lowering,
    is_lowered,
    lowerings,
    part,
    raises,
)
from mqtt_nats.messages.ids import MessageIds
from mqtt_nats.messages.message import Message, Stored
from mqtt_nats.protocol.overlap import PAIRS_MOST
from mqtt_nats.pubsub.interest_propagation import Nodes
from mqtt_nats.pubsub.routing_table import PLAIN, Choice, Filter, Member, Options
from mqtt_nats.sessions.message_stream import Mark
from mqtt_streams.api import ApiError
from mqtt_streams.sessions import Conflict, SubscriptionOptions
from mqtt_streams.subjects import filter_to_subjects
from tests.client.fakes import FakeMark, FakeSubscriber
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeNodes, FakeStore, as_link, v5_of

pytestmark = pytest.mark.sources

OWN, OTHER = 1, 2
"""Gateways: this one, and another one."""


class FakeMarks(FakeStore):
    """A stream that names its last sequence for each mark."""

    def __init__(self) -> None:
        super().__init__()
        self.fake_last = 30

    def put(self, target: bytes, headers: bytes, payload: bytes, operation: PendingStore) -> None:
        super().put(target, headers, payload, operation)
        error = ApiError(400, 10071, f"wrong last sequence: {self.fake_last}")
        asyncio.get_running_loop().call_soon(operation.failed, error)


@stands_for(Nodes)
class FakeLoggingNodes(FakeNodes):
    """Stands for `Nodes`: notes when a client waits for what is under way in core NATS."""

    def __init__(self, log: list[object]) -> None:
        super().__init__()
        self._log = log

    async def fence_filters(self, filters: object) -> None:
        await super().fence_filters(())
        self._log.append("fence")


@stands_for(Client)
class FakeChanging(FakeSubscriber, Member):  # type: ignore[misc]  # fakes of a member's attributes
    """Stands for `Client`, which is in the routing table."""

    def __init__(self, *, durable: bool = True) -> None:
        super().__init__(durable=durable)
        self.options = None  # type: ignore[assignment]
        self._ranks = self._overlaps = None
        self.fake_log: list[object] = []
        self.services.nodes = FakeLoggingNodes(self.fake_log)
        self.fake_marks = self.services.fake_store = FakeMarks()
        self.services.nats.store = self.fake_marks  # type: ignore[assignment]
        self.path.ids = MessageIds(OWN)  # type: ignore[attr-defined]

    def join(self, text: str, qos: int, options: Options = PLAIN) -> Filter:
        link = as_link(self.services.fake_link)
        self.fake_log.append(f"join {text} {qos}")
        subjects = filter_to_subjects(text)
        return self.path.table.subscribe(self, text, qos, subjects, link, lambda found: lambda *message: None, options)

    def deliver(self, choice: Choice, message: Message) -> None:
        self.fake_log.append(message.payload)

    async def fake_subscribe(self, text: str, qos: int, options: Options = PLAIN) -> None:
        """Have a subscription, in the record and in the table."""
        wanted = {text: wish(text, qos, options)}
        await grant(as_changing(self), wanted, {}, cast("Mark", FakeMark(7)))
        self.join(text, qos, options)
        self.fake_log.clear()


def as_changing(client: FakeChanging) -> Client:
    """The fake, for a function that wants a `Client`."""
    return cast("Client", client)


def wish(text: str, qos: int, options: Options = PLAIN, *, replay: bool = False) -> Wish:
    return Wish(qos, filter_to_subjects(text), options, 0, replay)


def stored(topic: str, identity: bytes, gateway: int = OTHER) -> Stored:
    """A message of the stream that a gateway has published."""
    made = MessageIds(gateway).next()[:28] + identity
    headers = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:%b\r\n\r\n" % made
    encoded = topic.encode()
    key = len(encoded).to_bytes(2) + encoded
    return Stored(topic.replace("/", "."), key, b"x", 1, 1, False, b"", headers)


# -- what is wanted -----------------------------------------------------------------------------------------


def test_options_are_as_the_record_has_them() -> None:
    wanted = Wish(1, ("a",), Options(True, True, 7), 2, replay=False)
    assert wanted.described("a") == SubscriptionOptions("a", True, True, 2, 7)


async def test_a_subscription_with_consumers_is_lowered_to_qos_0() -> None:
    client = FakeChanging()
    await client.fake_subscribe("a", 1)
    await client.fake_subscribe("b", 0)
    found = {text: is_lowered(as_changing(client), wish(text, 0)) for text in ("a", "b", "c")}
    assert found == {"a": True, "b": False, "c": False}
    assert not is_lowered(as_changing(client), wish("a", 1))
    assert [one.filter for one in lowerings(as_changing(client), {text: wish(text, 0) for text in "abc"})] == ["a"]
    client.record = None
    assert not is_lowered(as_changing(client), wish("a", 0))


@pytest.mark.parametrize(
    ("has", "wanted", "both"),
    [
        (("a/+", 0), ("a/b", 1), True),
        (("a/b", 0), ("a/#", 2), True),
        (("a/b", 0), ("a/b", 1), True),
        (("a/+", 1), ("a/b", 1), False),  # consumers bring both
        (("a/+", 0), ("a/b", 0), False),
        (("a/+", 0), ("b/c", 1), False),
    ],
)
def test_messages_may_come_by_both_ways(has: tuple[str, int], wanted: tuple[str, int], both: bool) -> None:
    client = FakeChanging()
    client.join(*has)
    assert raises(as_changing(client), {wanted[0]: wish(*wanted)}) is both
    client.durable = False
    assert not raises(as_changing(client), {wanted[0]: wish(*wanted)}), "a regular session has no consumers"


def test_many_pairs_of_filters_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would hold up other clients."""
    client = FakeChanging()
    for number in range(101):
        client.join(f"a/{number}", 0)
    wanted = {f"b/{number}": wish(f"b/{number}", 1) for number in range(PAIRS_MOST // 100)}
    monkeypatch.setattr(changing, "patterns_meet", lambda one, other: pytest.fail("compared"))
    assert raises(as_changing(client), wanted)


# -- from QoS 0 to QoS 1 or 2 -------------------------------------------------------------------------------


def test_ids_that_core_nats_has_brought() -> None:
    """Those of filters that meet the new subscription, of the present and the former span of time."""
    client = FakeChanging()
    meeting, other = client.join("a/+", 0), client.join("b", 0)
    meeting.seen[b"late"] = other.seen[b"other"] = "a.b"
    meeting.rotate()
    meeting.seen[b"later"] = "a.b"
    assert CoreCopies(as_changing(client), ["a.b"]).before() == {b"late", b"later"}


@pytest.mark.parametrize(
    ("first", "topic", "gateway", "local"),
    [
        ("a/+", "a/b", OWN, True),
        ("a/+", "a/b", OTHER, False),
        ("+/b", "a/b", OWN, False),  # comes through NATS: it begins with a wildcard
        ("a/+", "b/b", OWN, False),
    ],
)
def test_what_this_gateway_has_delivered_itself(first: str, topic: str, gateway: int, local: bool) -> None:
    client = FakeChanging()
    client.join(first, 0)
    client.join("a/#", 0)
    copies = CoreCopies(as_changing(client), ["a.*"])
    assert copies.is_local(stored(topic, b"0000", gateway)) is local


async def test_what_has_come_by_core_nats_does_not_come_from_the_stream() -> None:
    """[MQTT-3.8.4-4] (5.0): own messages up to the moment at which the client joins, others by their ids."""
    client = FakeChanging()
    found = client.join("a", 0)
    client.fake_log.clear()
    raising = Raising(as_changing(client), {"a": wish("a", 1)})
    assert len(client.fake_marks.fake_put) == 1, "the first mark is set before anything else"
    await raising.drain()
    assert client.fake_log == ["fence"]
    assert await raising.place.position(client.services.nats.inbox) == 30
    before, after = stored("a", b"0001"), stored("a", b"0002")
    found.seen[before.headers.partition(b"Nmqtt-Id:")[2][:32]] = "a"
    client.fake_marks.fake_last = 40
    raising.change()
    found.seen[after.headers.partition(b"Nmqtt-Id:")[2][:32]] = "a"
    await raising.read_second_mark()
    assert [raising.has_come(one, 50) for one in (before, after)] == [True, False]
    own = stored("a", b"0003", OWN)
    assert [raising.has_come(own, sequence) for sequence in (40, 41)] == [True, False]


# -- from QoS 1 or 2 to QoS 0 -------------------------------------------------------------------------------


async def lowered(client: FakeChanging, text: str = "a", *, replay: bool = False) -> Lowering:
    (found,) = lowerings(as_changing(client), {text: wish(text, 0, replay=replay)})
    return found


async def test_a_subscription_is_lowered_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """[MQTT-3.8.4-4] (5.0)"""
    client = FakeChanging()
    await client.fake_subscribe("a/#", 2)
    sources = [one.source for one in client.fake_side.bindings.values()]
    watched: list[object] = []
    monkeypatch.setattr(changing, "watch", lambda side, binding: watched.append(binding))
    one = await lowered(client, "a/#")
    assert [source.held for source in sources] == [1, 1]
    await begin_lowering(as_changing(client), [one])
    assert client.fake_log == ["fence"]
    (gate,) = (client.gates or {}).values()
    client.join("a/#", 0)
    client.fake_marks.fake_last = 35
    client.fake_log.clear()
    sources[0].last = 33
    await finish_lowering(as_changing(client), [one])
    assert client.fake_log == ["fence"], "then core NATS has brought the messages up to the last sequence"
    assert [(source.end, source.held) for source in sources] == [(35, 0), (35, 0)]
    assert len(watched) == 2
    record = await client.fake_stored()
    assert (set(record.subs.values()), record.cons) == ({0}, {})
    assert record.v5 is not None
    assert sorted((each.end, each.qos) for each in record.v5.draining) == [(35, 2), (35, 2)]
    assert gate.users == 2, "messages of core NATS wait for both consumers"


async def test_a_lowered_subscription_is_watched_although_its_record_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gates and later subscriptions wait until it has no message left."""
    client = FakeChanging()
    await client.fake_subscribe("a/#", 2)
    bindings = list(client.fake_side.bindings.values())
    watched: list[object] = []
    monkeypatch.setattr(changing, "watch", lambda side, binding: watched.append(binding))
    one = await lowered(client, "a/#")
    await begin_lowering(as_changing(client), [one])
    client.join("a/#", 0)

    def refuse(subject: str) -> None:
        if subject.startswith("$MQTT.sess."):
            raise ApiError(503, 10077, "no space left on device")

    client.services.fake_inbox.before = refuse
    with pytest.raises(ApiError, match="no space left"):
        await finish_lowering(as_changing(client), [one])
    assert len(bindings) == 2
    assert watched == bindings


async def test_without_a_subscription_to_lower_nothing_is_asked() -> None:
    client = FakeChanging()
    await begin_lowering(as_changing(client), [])
    await finish_lowering(as_changing(client), [])
    assert (client.fake_log, client.fake_marks.fake_put) == ([], [])


async def test_a_lowering_that_fails_leaves_the_subscription_as_it_was() -> None:
    client = FakeChanging()
    options = Options(retain_as_published=True)
    await client.fake_subscribe("a", 2, options)
    (source,) = [one.source for one in client.fake_side.bindings.values()]
    one = await lowered(client)
    one.open()
    (gate,) = (client.gates or {}).values()
    message = Message(b"\0\1a", b"core", 1, "")
    gate.keep_back(Choice(gate.found, 0, b"", kept=False), message, b"id")
    found = client.path.table.filters["a"]
    client.path.table.subscribe(client, "a", 0, ("a",), found.link, lambda each: lambda *_: None, options)
    one.give_up()
    assert client.filters[found] == 2
    assert cast("Any", client.options) == {found: options}
    assert (source.held, client.gates) == (0, None)
    assert b"core" not in client.fake_log, "the consumer brings every stored message"
    assert client.fake_record.subs == {"a": 2}


async def test_what_a_takeover_finds_is_as_before() -> None:
    client = FakeChanging()
    await client.fake_subscribe("a", 1)
    one = await lowered(client)
    one.open()
    client.epoch = 99
    with pytest.raises(Conflict):
        await finish_lowering(as_changing(client), [one])
    assert (await client.fake_stored()).subs == {"a": 1}


async def test_a_session_that_has_ended_meanwhile_is_not_lowered() -> None:
    client = FakeChanging()
    await client.fake_subscribe("a", 1)
    one = await lowered(client)
    v5_of(client)
    client.durable_side = None
    assert one.apply(9) == []
    one.let_go()
    await finish_lowering(as_changing(client), [one])
    assert client.fake_record.subs == {"a": 1}


# -- the end of subscriptions of a regular session --------------------------------------------------------------


class Ending:
    """Ends subscriptions, and notes when."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    async def __call__(self, client: Client, filters: Set[str]) -> None:
        fake = cast("FakeChanging", client)
        fake.fake_log.append(sorted(filters))
        assert self._error is None or fake.path.table.partings
        if self._error is not None:
            raise self._error
        for text in filters:
            fake.path.table.unsubscribe(fake, text)


def regular(*subscriptions: tuple[str, int]) -> FakeChanging:
    client = FakeChanging(durable=False)
    for text, qos in subscriptions:
        client.join(text, qos)
    client.fake_log.clear()
    return client


@pytest.mark.parametrize(
    ("subscriptions", "overlapped"),
    [
        ([("a/b", 1), ("a/+", 1)], True),
        ([("a/b", 0), ("a/+", 1)], True),
        ([("a/b", 1), ("a/+", 0)], True),
        ([("a/b", 0), ("a/+", 0)], False),  # at QoS 0 a message may be lost
        ([("a/b", 1), ("a/c", 1)], False),
        ([("a/b", 1), ("b/+", 1)], False),
        ([("a/+", 1), ("a/b", 1)], False),  # the first one serves the client, before and after
        ([("a/b", 1)], False),
    ],
)
async def test_another_filter_takes_over_in_steps(subscriptions: list[tuple[str, int]], overlapped: bool) -> None:
    """[MQTT-3.3.5-1] (3.1.1): one copy of each message, from the one filter or the other."""
    client = regular(*subscriptions)
    ending = "a/b"
    await part(as_changing(client), {ending}, Ending())
    assert client.fake_log == (["fence", "fence", [ending], "fence"] if overlapped else [[ending]])
    assert client.path.table.partings == {}
    assert ending not in {found.text for found in client.filters}


async def test_consumers_of_a_durable_session_need_no_steps() -> None:
    client = regular(("a/b", 1), ("a/+", 1))
    client.durable = True
    await part(as_changing(client), {"a/b"}, Ending())
    assert client.fake_log == [["a/b"]]


async def test_an_end_that_fails_leaves_the_client_where_it_was() -> None:
    client = regular(("a/b", 1), ("a/+", 1))
    with pytest.raises(Conflict):
        await part(as_changing(client), {"a/b"}, Ending(Conflict()))
    assert client.path.table.partings == {}
    assert {found.text for found in client.filters} == {"a/b", "a/+"}


async def test_missed_messages_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a connection to NATS that was lost are still being read."""
    monkeypatch.setattr(retry, "RETRY_PAUSE_S", 0.0)
    client = regular(("a/b", 1), ("a/+", 1))
    found = client.path.table.filters["a/+"]
    found.backlog = cast("Any", object())
    fences = 0

    async def fence(filters: object) -> None:
        nonlocal fences
        fences += 1
        if fences == 3:
            found.backlog = None

    monkeypatch.setattr(client.services.nodes, "fence_filters", fence)
    await part(as_changing(client), {"a/b"}, Ending())
    assert fences == 5
    assert client.fake_log == [["a/b"]]
