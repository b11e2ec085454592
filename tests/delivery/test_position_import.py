# SPDX-License-Identifier: Apache-2.0
"""The position of a session whose consumers nats-server's listener, or an older gateway, has moved on."""

from __future__ import annotations

from typing import Any

import pytest

from mqtt_nats.delivery import position_import
from mqtt_nats.delivery.position_import import import_position
from mqtt_nats.delivery.position_writer import PositionWriter
from mqtt_nats.protocol.position import Content
from mqtt_nats.sessions.record import claimed
from mqtt_streams.api import RequestTimeout
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.positions import Position
from mqtt_streams.sessions import Conflict, Draining, SubscriptionOptions
from tests.delivery.fakes import FakeDeliveryServices, FakeReceiver, Side
from tests.sessions.fakes import as_client

QOS1 = b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n"
QOS2 = b"NATS/1.0\r\nNmqtt-Pub:2\r\n\r\n"
OWN = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Client:me\r\n\r\n"


class WriterInMemory(PositionWriter):
    """A writer whose position is stored at once, unless the test says otherwise."""

    stores = True

    def __init__(self, client: Any, expected: int) -> None:
        super().__init__(client, expected)
        self.expected = expected
        self.written: list[Content] = []
        self.was_strict = False

    async def flush(self) -> bool:
        self.was_strict = self.strict
        self.written.append(self.ledger.begin())
        self.moved = not self.stores
        return self.stores


class Setup:
    """A session with subscriptions at QoS 1 on ``a`` and at QoS 2 on ``b``; messages alternate between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.services = FakeDeliveryServices()
        self.client = FakeReceiver(self.services, "me")
        self.side: Any = Side()
        self.saved: list[tuple[str, dict[str, int]]] = []
        self.refuses = False
        monkeypatch.setattr(position_import, "save_record", self._save)
        monkeypatch.setattr(position_import, "PositionWriter", WriterInMemory)
        monkeypatch.setattr(position_import, "REDELIVERY_MOST_S", 0.01)
        self.record, self.v5 = claimed(self.client.record)
        self.inbox = self.services.fake_inbox
        for qos, subject in enumerate("ab", 1):
            self.subscribe(subject, qos)
        for number in range(10):
            self.inbox.put(f"$MQTT.msgs.{'ab'[number % 2]}", b"x", QOS1)

    async def _save(self, client: object, epoch: int) -> int:
        assert self.side.position_writer.written
        if self.refuses:
            raise Conflict("me")
        self.saved.append((self.v5.pos, dict(self.v5.start)))
        return epoch

    def subscribe(self, subject: str, qos: int = 1, start: int = 0) -> None:
        self.record.subs[subject] = qos
        self.record.cons[subject] = self.ref(subject)
        if start:
            self.v5.start[subject] = start

    def ref(self, subject: str) -> ConsumerRef:
        nuid = subject.replace(".", "-").replace("*", "star").replace(">", "rest")
        return subscription_consumer(self.client.hash, subject, name_nuid=nuid, deliver_nuid=nuid, max_ack_pending=10)

    def end(self, subject: str, qos: int, end: int, start: int = 0, *, whole: bool = False) -> str:
        one = self.ref(subject)
        self.v5.draining.append(Draining(one.durable_name, one.filter_subject, qos, end, start, whole))
        return one.durable_name

    def consumer(self, subject: str, delivered: int, floor: int | None = None, pending: int = 0, **more: Any) -> str:
        consumer = self.record.cons.get(subject) or self.ref(subject)
        self.inbox.consumers[MESSAGES][consumer.durable_name] = {
            "name": consumer.durable_name,
            "config": consumer.to_config(),
            "delivered": {"consumer_seq": 1, "stream_seq": delivered},
            "ack_floor": {"consumer_seq": 1, "stream_seq": delivered if floor is None else floor},
            "num_ack_pending": pending,
            "num_pending": 0,
            **more,
        }
        return consumer.durable_name

    def redelivers(self, name: str, *replies: tuple[int, int]) -> list[str]:
        """Have a consumer deliver so: number of the delivery, and sequence; returns the subjects that it had."""
        subjects: list[str] = []

        def changed(subject: str) -> None:
            if not subject.endswith(f"CONSUMER.DURABLE.CREATE.{MESSAGES}.{name}"):
                return
            subjects.append(self.inbox.consumers[MESSAGES][name]["config"]["deliver_subject"])
            for times, sequence in replies if len(subjects) == 1 else ():
                reply = f"$JS.ACK.{MESSAGES}.{name}.{times}.{sequence}.9.1.0".encode()
                self.services.fake_link.fake_bring(subjects[0].encode(), b"x", QOS1, reply)

        self.inbox.after = changed
        return subjects

    async def imported(self, found: Position | None = None) -> set[str]:
        return await import_position(as_client(self.client), self.side, 7, found)

    @property
    def writer(self) -> Any:
        return self.side.position_writer

    @property
    def result(self) -> tuple[int, dict[int, int], dict[str, int]]:
        """The sequence that is reached, the pending messages, and where subscriptions begin."""
        return self.writer.ledger.reached, self.writer.ledger.pending, self.v5.start

    @property
    def unsent(self) -> set[int]:
        return set(self.side.machine.unsent())


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(monkeypatch)


# -- what consumers say ------------------------------------------------------------------------------


async def test_nothing_is_pending(setup: Setup) -> None:
    """Each subscription begins after what its consumer has delivered, and the session at the first of them."""
    names = {setup.consumer("a", 9), setup.consumer("b", 4)}
    assert await setup.imported() == names
    assert setup.result == (4, {}, {"a": 10})
    assert (setup.writer.live, setup.writer.expected, setup.side.resumed_from) == (names, 7, 4)
    assert setup.saved == [(setup.v5.pos, {"a": 10})]
    assert setup.v5.pos
    assert not setup.writer.was_strict
    assert not setup.side.take_record_change()


async def test_nothing_to_import(setup: Setup) -> None:
    """A session without consumers gets no position."""
    setup.record.cons.clear()
    setup.v5.draining.append(Draining("other", "$MQTT.msgs.c", 0, 9))
    assert await setup.imported() == set()
    assert (setup.saved, setup.writer, setup.v5.pos) == ([], None, "")


async def test_what_is_pending(setup: Setup) -> None:
    """All messages of the subscription behind the acknowledgement floor, at the QoS of both; other topics are not."""
    setup.consumer("a", 10, 3, 3)
    setup.consumer("b", 10, 8, 1)
    await setup.imported()
    assert setup.result == (10, {5: 1, 7: 1, 9: 1, 10: 1}, {})
    assert setup.unsent == set()


async def test_pending_of_a_subscription_that_is_ahead(setup: Setup) -> None:
    """Its messages are pending by themselves, although it begins behind them."""
    setup.consumer("a", 9, 5, 2)
    setup.consumer("b", 4)
    await setup.imported()
    assert setup.result == (4, {7: 1, 9: 1}, {"a": 10})


async def test_the_former_qos(setup: Setup) -> None:
    """A message from before a change of QoS is pending at the QoS from before."""
    for _ in range(2):
        setup.inbox.put("$MQTT.msgs.a", b"x", QOS2)
    setup.v5.was["a"] = (2, 11)
    setup.consumer("a", 12, 10, 2)
    setup.consumer("b", 12)
    await setup.imported()
    assert setup.writer.ledger.pending == {11: 2, 12: 1}


async def test_later_ones_were_acknowledged_first(setup: Setup) -> None:
    """Of three messages behind the floor two are pending, and nobody says which: all are."""
    setup.consumer("a", 9, 3, 2)
    setup.consumer("b", 9)
    await setup.imported()
    assert setup.writer.ledger.pending == {5: 1, 7: 1, 9: 1}


async def test_a_consumer_that_delivers_what_is_pending(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three messages behind the floor it delivers two once more: exactly these are pending, with DUP."""
    monkeypatch.setattr(position_import, "REDELIVERY_MOST_S", 60.0)
    name = setup.consumer("a", 9, 3, 2)
    setup.consumer("b", 9)
    subjects = setup.redelivers(name, (2, 5), (3, 9))
    await setup.imported()
    assert setup.result == (9, {5: 1, 9: 1}, {})
    assert setup.unsent == set()
    assert len(set(subjects)) == 2, "it delivers to nobody afterwards"
    assert setup.inbox.consumers[MESSAGES][name]["config"]["deliver_subject"] == subjects[1]
    assert setup.record.cons["a"].deliver_subject == subjects[1]
    assert setup.services.fake_link.handlers == {}


async def test_a_consumer_that_delivers_new_messages_meanwhile(setup: Setup) -> None:
    """They come again: the position does not reach so far. Without the rest of the pending ones nothing is known."""
    name = setup.consumer("a", 7, 1, 2)
    setup.consumer("b", 9)
    setup.redelivers(name, (2, 5), (1, 7), (1, 9), (2, 9))
    await setup.imported()
    assert setup.writer.ledger.pending == {3: 1, 5: 1, 7: 1}
    assert setup.services.fake_link.handlers == {}


async def test_a_consumer_that_delivers_what_another_subscription_brings(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is pending all the same: the consumer says so."""
    monkeypatch.setattr(position_import, "REDELIVERY_MOST_S", 60.0)
    setup.subscribe("a", 1, 1)
    setup.subscribe("b", 1, 9)
    setup.subscribe("*", 1, 2)
    for subject in "ab":
        setup.consumer(subject, 10)
    name = setup.consumer("*", 10, 3, 2)
    setup.redelivers(name, (2, 5), (2, 8))
    await setup.imported()
    assert setup.writer.ledger.pending == {5: 1, 8: 1}


async def test_a_consumer_that_goes_while_it_is_asked(setup: Setup) -> None:
    """All messages are pending that may be."""
    name = setup.consumer("a", 9, 3, 2)
    setup.consumer("b", 9)

    def remove(subject: str) -> None:
        if subject.endswith(f"CONSUMER.DURABLE.CREATE.{MESSAGES}.{name}"):
            del setup.inbox.consumers[MESSAGES][name]

    setup.inbox.before = remove
    await setup.imported()
    assert setup.writer.ledger.pending == {5: 1, 7: 1, 9: 1}
    assert setup.services.fake_link.handlers == {}


async def test_acknowledged_for_another_subscription(setup: Setup) -> None:
    """Behind the floor of ``*`` are messages that ``a`` delivers: they were acknowledged here, and are not pending."""
    setup.subscribe("a", 1, 1)
    setup.subscribe("b", 1, 9)
    setup.subscribe("*", 1, 2)
    for subject in "ab":
        setup.consumer(subject, 10)
    setup.consumer("*", 10, 3, 2)
    await setup.imported()
    assert setup.result == (10, {4: 1, 6: 1, 8: 1, 10: 1}, {"a": 1, "b": 9, "*": 2})


async def test_acknowledged_for_one_that_may_have_begun_later(setup: Setup) -> None:
    """Of a subscription of nats-server's listener nobody knows when it began: it may have had none of the messages."""
    setup.subscribe("*")
    for subject in "ab":
        setup.consumer(subject, 10)
    setup.consumer("*", 10, 6, 1)
    await setup.imported()
    assert setup.writer.ledger.pending == {7: 1, 8: 1, 9: 1, 10: 1}


async def test_pending_at_a_subscription_that_leaves_it_to_another(setup: Setup) -> None:
    """Where the number of messages says that all are pending, they are."""
    setup.subscribe("a", 1, 1)
    setup.subscribe("*", 1, 2)
    setup.consumer("a", 10)
    setup.consumer("b", 10)
    setup.consumer("*", 10, 7, 3)
    await setup.imported()
    assert setup.writer.ledger.pending == {8: 1, 9: 1, 10: 1}


async def test_pending_before_its_beginning(setup: Setup) -> None:
    """What a consumer says is pending is not left out, whatever the record says of its subscription's beginning."""
    setup.subscribe("a", 1, 10)
    setup.consumer("a", 9, 7, 1)
    setup.consumer("b", 9)
    await setup.imported()
    assert setup.writer.ledger.pending == {9: 1}


async def test_a_bridge(setup: Setup) -> None:
    """A bridge gets no message of its own."""
    setup.client.bridge = True
    setup.inbox.put("$MQTT.msgs.a", b"x", OWN)
    setup.consumer("a", 11, 7, 2)
    setup.consumer("b", 11)
    await setup.imported()
    assert setup.writer.ledger.pending == {9: 1}


async def test_pending_within_bounds(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the bound messages come again, and the session knows that they may have been sent."""
    monkeypatch.setattr(position_import, "PENDING_MOST", 2)
    setup.consumer("a", 9, 0, 1)
    setup.consumer("b", 9)
    await setup.imported()
    assert setup.result == (4, {1: 1, 3: 1}, {"b": 10})
    assert setup.writer.perhaps == setup.side.machine.perhaps_sent == 9


async def test_more_pending_than_the_bound(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound does not concern messages of which the consumer says that they are pending."""
    monkeypatch.setattr(position_import, "PENDING_MOST", 2)
    setup.consumer("a", 9, 0, 5)
    setup.consumer("b", 9)
    await setup.imported()
    assert setup.result == (9, {1: 1, 3: 1, 5: 1, 7: 1, 9: 1}, {})


async def test_pending_messages_that_are_gone(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client may know their packet identifiers."""
    suspected: list[tuple[int, int]] = []
    monkeypatch.setattr(setup.side.machine, "suspect", lambda low, high: suspected.append((low, high)))
    setup.inbox.messages[MESSAGES] = [one for one in setup.inbox.messages[MESSAGES] if one.seq != 6]
    setup.consumer("a", 10, 8, 1)
    setup.consumer("b", 10, 4, 3)
    await setup.imported()
    assert (setup.writer.ledger.pending, suspected) == ({8: 1, 9: 1, 10: 1}, [(5, 10)])


async def test_not_for_the_client(setup: Setup) -> None:
    """Pending are neither its own messages under No Local, nor hidden ones of a wildcard, nor those at QoS 0."""
    del setup.record.cons["b"]
    setup.subscribe("*")
    setup.v5.options["a"] = SubscriptionOptions("a", nl=True)
    setup.inbox.put("$MQTT.msgs.a", b"x", OWN)
    setup.inbox.put("$MQTT.msgs.$x", b"x", QOS1)
    setup.inbox.put("$MQTT.msgs.c", b"x")
    setup.inbox.put("$MQTT.msgs.c", b"x", QOS1)
    setup.consumer("a", 14, 10, 1)
    setup.consumer("*", 14, 11, 3)
    await setup.imported()
    assert setup.writer.ledger.pending == {14: 1}


async def test_paused(setup: Setup) -> None:
    """A paused consumer says where it is."""
    setup.consumer("a", 9, pause_remaining=1 << 40)
    setup.consumer("b", 4)
    await setup.imported()
    assert setup.result == (4, {}, {"a": 10})


async def test_somebody_listens(setup: Setup) -> None:
    """A consumer that delivers to somebody gets another subject before it is asked."""
    name = setup.consumer("a", 9, push_bound=True)
    setup.inbox.consumers[MESSAGES][name]["config"] |= {"opt_start_seq": 3, "deliver_policy": "by_start_sequence"}
    whole = setup.end("c", 1, 8, whole=True)
    setup.consumer("c", 5, push_bound=True)
    setup.consumer("b", 9)

    def moved(subject: str) -> None:
        if subject.endswith(f"CONSUMER.DURABLE.CREATE.{MESSAGES}.{name}"):
            setup.inbox.consumers[MESSAGES][name]["delivered"]["stream_seq"] = 10

    setup.inbox.after = moved
    former = {one: setup.inbox.consumers[MESSAGES][one]["config"]["deliver_subject"] for one in (name, whole)}
    await setup.imported()
    assert setup.result == (5, {}, {"a": 11, "b": 10})
    for one, subject in former.items():
        assert setup.inbox.consumers[MESSAGES][one]["config"]["deliver_subject"] != subject
    now = setup.inbox.consumers[MESSAGES][name]["config"]
    consumer = setup.record.cons["a"]
    assert (now["deliver_subject"], now["opt_start_seq"]) == (consumer.deliver_subject, consumer.start_seq)
    assert consumer.start_seq == 3


async def test_in_records(setup: Setup) -> None:
    """Of a session whose consumers are removed, the position names those that exist."""
    setup.v5.move_to_records()
    setup.v5.start |= {"a": 9, "b": 11}
    name = setup.consumer("a", 9)
    await setup.imported()
    assert setup.writer.present == {name}


# -- consumers that are gone, and streams that were replaced -----------------------------------------


async def test_gone_before_any_message(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    """No message is stored since the subscription began: nothing is lost."""
    setup.consumer("a", 9)
    setup.subscribe("b", 2, 11)
    await setup.imported()
    assert setup.result == (9, {}, {"b": 11})
    assert (setup.services.stream.fake_checks, caplog.text) == (1, "")


@pytest.mark.parametrize("start", [0, 9])
async def test_gone_with_messages(setup: Setup, caplog: pytest.LogCaptureFixture, start: int) -> None:
    setup.consumer("a", 9)
    setup.subscribe("b", 2, start)
    await setup.imported()
    assert setup.result == (9, {}, {"b": 11})
    assert "it was removed, or was not created" in caplog.text


async def test_gone_before_any_message_of_it(setup: Setup) -> None:
    """It begins where it did: what others have had meanwhile is not for it."""
    setup.subscribe("c", 1, 5)
    setup.consumer("a", 9)
    setup.consumer("b", 9)
    await setup.imported()
    assert setup.result == (4, {}, {"a": 10, "b": 10, "c": 5})


async def test_gone_and_nobody_knows_when_it_began(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    setup.subscribe("c")
    setup.consumer("a", 9)
    setup.consumer("b", 9)
    await setup.imported()
    assert setup.result == (9, {}, {"c": 11})
    assert "it was removed, or was not created" in caplog.text


async def test_an_ended_one_is_gone(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    """It has come to its end, without a word: others go on where they are."""
    setup.end("*", 1, 50, 2)
    setup.end("a.>", 1, 6, 2, whole=True)
    del setup.record.cons["b"]
    setup.subscribe("a.*")
    setup.inbox.put("$MQTT.msgs.a.x", b"x", QOS1)
    setup.consumer("a", 9)
    setup.consumer("a.*", 8)
    await setup.imported()
    assert setup.result == (8, {}, {"a": 10})
    assert caplog.text == ""


async def test_gone_with_a_stream_that_begins_anew(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    """The subscription begins with its first message, however late it began before."""
    setup.consumer("a", 9)
    setup.subscribe("b", 2, 50)
    setup.v5.was["b"] = (1, 60)
    await setup.imported()
    assert setup.result == (0, {}, {"a": 10, "b": 1})
    assert setup.v5.was == {}
    assert "the stream begins anew" in caplog.text


async def test_gone_while_the_connection_ends(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """No position is made in a stream in which the session does not count."""

    async def check() -> None:
        setup.client.alive = False

    monkeypatch.setattr(setup.services.stream, "check", check)
    with pytest.raises(RequestTimeout):
        await setup.imported()
    assert setup.writer is None


async def test_replaced(setup: Setup) -> None:
    """Consumers of the former stream say nothing."""
    setup.consumer("a", 9, 3, 3)
    setup.side.replace_stream(6)
    assert len(await setup.imported()) == 2
    assert setup.result == (6, {}, {})


# -- a position that replaces some consumers ---------------------------------------------------------


async def test_some_have_a_position(setup: Setup) -> None:
    """It goes on under its id, with what is pending, owed and allocated; a conflicting one stands meanwhile."""
    live, plain = setup.record.cons["a"].durable_name, setup.consumer("b", 8, 6, 1)
    setup.consumer("a", 1, 0, 1)
    setup.v5.name_position("known")
    found = Position("known", live=[live], reached=5, pending={3: 2}, released={9: 2}, identifiers={3: 4}, perhaps=7)
    found.unsent, found.present = [3], [live]
    assert await setup.imported(found) == {live, plain}
    assert setup.result == (5, {3: 2, 8: 1}, {"b": 9})
    ledger = setup.writer.ledger
    assert (ledger.released, ledger.identifiers, setup.unsent) == ({9: 2}, {3: 4}, {3})
    assert (setup.v5.pos, setup.writer.perhaps, setup.writer.present) == ("known", 7, {live})
    assert (setup.writer.was_strict, setup.writer.strict) == (True, False)


async def test_some_have_a_position_in_a_replaced_stream(setup: Setup) -> None:
    """The caller has limited it to the present stream, which it still tells about."""
    live = setup.record.cons["a"].durable_name
    setup.consumer("b", 9)
    setup.side.replace_stream(6)
    await setup.imported(Position("known", live=[live], reached=4, pending={3: 1}))
    assert setup.result == (4, {3: 1}, {"b": 7})


async def test_pending_in_the_position_and_at_a_consumer(setup: Setup) -> None:
    """The higher QoS counts, at which the message may have been sent."""
    live = setup.record.cons["b"].durable_name
    setup.consumer("a", 9, 7, 1)
    await setup.imported(Position("known", live=[live], reached=9, pending={9: 2}))
    assert setup.writer.ledger.pending == {9: 2}


async def test_perhaps_sent_by_the_owner_of_the_position(setup: Setup) -> None:
    """What an overlapping subscription has yet to bring may have been sent up to there: it gets DUP."""
    setup.subscribe("*", 1, 20)
    live = setup.record.cons["a"].durable_name
    for subject in "b*":
        setup.consumer(subject, 10)
    await setup.imported(Position("known", live=[live], reached=4, perhaps=7))
    assert setup.result == (10, {5: 1, 7: 1, 9: 1}, {"*": 20})
    assert setup.unsent == {9}


# -- ended subscriptions -----------------------------------------------------------------------------


async def test_lowered(setup: Setup) -> None:
    """A subscription that was lowered to QoS 0 goes on up to its end, behind what is delivered."""
    name = setup.end("c", 1, 12, 2, whole=True)
    setup.inbox.put("$MQTT.msgs.c", b"x", QOS2)
    setup.inbox.put("$MQTT.msgs.c", b"x", QOS2)
    names = {name, setup.consumer("a", 9), setup.consumer("b", 9), setup.consumer("c", 11, 10, 1)}
    assert await setup.imported() == names
    assert setup.result == (9, {11: 1}, {})
    assert [one.start for one in setup.v5.draining] == [12]


async def test_lowered_and_at_its_end(setup: Setup) -> None:
    """The session does not begin at the end of a subscription that has nothing left."""
    name = setup.end("c", 1, 3, 2, whole=True)
    setup.consumer("a", 9)
    setup.consumer("b", 8)
    setup.consumer("c", 3)
    assert name in await setup.imported()
    assert setup.result == (8, {}, {"a": 10})


async def test_ended(setup: Setup) -> None:
    """An ended subscription leaves what is pending, at most at its QoS; one at QoS 0 leaves nothing."""
    name = setup.end("c", 1, 12, 2)
    setup.end("d", 0, 13, whole=True)
    for subject in "ccd":
        setup.inbox.put(f"$MQTT.msgs.{subject}", b"x", QOS2)
    names = {setup.consumer("a", 9), setup.consumer("b", 9)}
    setup.consumer("c", 11, 10, 1)
    setup.consumer("d", 13, 12, 1)
    assert await setup.imported() == names
    assert setup.result == (9, {11: 1}, {})
    assert name not in setup.writer.live
    assert [one.start for one in setup.v5.draining] == [2, 0]


async def test_ended_where_later_ones_were_acknowledged_first(setup: Setup) -> None:
    """What others left to it while it went on may be pending there."""
    setup.end("*", 1, 10, 1)
    setup.v5.start |= {"a": 2, "b": 3}
    setup.consumer("*", 10, 6, 1)
    setup.consumer("a", 10)
    setup.consumer("b", 10)
    await setup.imported()
    assert setup.result == (10, {7: 1, 8: 1, 9: 1, 10: 1}, {"a": 2, "b": 3})


async def test_only_ended(setup: Setup) -> None:
    """What is pending gets a position, although no consumer is left that it replaces."""
    setup.record.cons.clear()
    setup.end("c", 1, 11, 2)
    setup.inbox.put("$MQTT.msgs.c", b"x", QOS1)
    setup.consumer("c", 11, 10, 1)
    assert await setup.imported() == set()
    assert setup.result == (11, {11: 1}, {})
    assert setup.saved[0][0] == setup.v5.pos


async def test_ended_with_what_others_have_passed_over(setup: Setup) -> None:
    """Up to its end, others have left messages to it: those that it has not had, and that they have passed."""
    setup.end("*", 1, 8, 1)
    setup.v5.start |= {"a": 2, "b": 3}
    setup.consumer("*", 2)
    setup.consumer("a", 10)
    setup.consumer("b", 5)
    await setup.imported()
    assert setup.result == (5, {3: 1, 4: 1, 5: 1, 7: 1}, {"a": 11, "b": 3})
    assert setup.unsent == {3, 4, 5, 7}


async def test_ended_at_a_lower_qos(setup: Setup) -> None:
    """What others have left to it comes at its own QoS; it began nobody knows when."""
    setup.end("b", 1, 12)
    setup.subscribe("*", 2)
    del setup.record.cons["b"]
    setup.inbox.put("$MQTT.msgs.b", b"x", QOS2)
    setup.consumer("b", 10)
    setup.consumer("a", 11)
    setup.consumer("*", 11)
    await setup.imported()
    assert setup.result == (11, {11: 1}, {})


async def test_ended_with_too_much(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(position_import, "PENDING_MOST", 2)
    setup.end("*", 1, 8, 1)
    setup.v5.start |= {"a": 2, "b": 3}
    for subject, delivered in {"*": 2, "a": 10, "b": 10}.items():
        setup.consumer(subject, delivered)
    await setup.imported()
    assert setup.writer.ledger.pending == {3: 1, 4: 1}
    assert "after 4 are lost" in caplog.text


async def test_ended_after_others(setup: Setup) -> None:
    """A subscription that began before it has left nothing to it."""
    setup.end("*", 1, 8, 4)
    setup.v5.start |= {"a": 2, "b": 5}
    setup.consumer("*", 4)
    setup.consumer("a", 10)
    setup.consumer("b", 10)
    await setup.imported()
    assert setup.writer.ledger.pending == {6: 1, 8: 1}


# -- subscriptions that overlap ----------------------------------------------------------------------


def overlapping(setup: Setup, starts: dict[str, int], delivered: dict[str, int]) -> None:
    for subject, start in starts.items():
        setup.subscribe(subject, 1, start)
        setup.consumer(subject, delivered[subject])


async def test_behind_with_its_own_messages(setup: Setup) -> None:
    """What it delivers, and has not had, is pending, and was not sent; all begin where the first one is."""
    overlapping(setup, {"a": 1, "b": 2, "*": 3}, {"a": 5, "b": 10, "*": 8})
    await setup.imported()
    assert setup.result == (10, {7: 1, 9: 1}, {"a": 1, "b": 2, "*": 3})
    assert setup.unsent == {7, 9}


async def test_behind_with_messages_of_others(setup: Setup) -> None:
    """What another one delivers is complete, or pending there: it does not come twice."""
    overlapping(setup, {"*": 1, "a": 2, "b": 3}, {"*": 8, "a": 4, "b": 10})
    setup.consumer("*", 8, 6, 2)
    await setup.imported()
    assert setup.result == (10, {7: 1, 8: 1, 9: 1, 10: 1}, {"*": 1, "a": 2, "b": 3})
    assert setup.unsent == {9, 10}


async def test_behind_its_own_beginning(setup: Setup) -> None:
    """What was stored before it began is not for it."""
    overlapping(setup, {"a": 7, "b": 8, "*": 9}, {"a": 2, "b": 10, "*": 10})
    await setup.imported()
    assert setup.result == (10, {7: 1, 9: 1}, {"a": 7, "b": 8, "*": 9})


async def test_behind_one_that_may_have_begun_later(setup: Setup) -> None:
    """Of a subscription of nats-server's listener nobody knows what it has had: messages may come twice, as from it.

    One that is pending there is not another message, and may have been sent.
    """
    overlapping(setup, {"a": 6, "b": 7}, {"a": 2, "b": 10})
    setup.subscribe("*")
    setup.consumer("*", 10, 8, 2)
    setup.end("a.>", 1, 7, 3, whole=True)
    setup.consumer("a.>", 2)
    setup.subscribe("a.*")
    setup.consumer("a.*", 12)
    for _ in range(2):
        setup.inbox.put("$MQTT.msgs.a.x", b"x", QOS1)
    await setup.imported()
    assert setup.result == (10, {7: 1, 9: 1, 10: 1}, {"a": 6, "b": 7, "a.*": 13})
    assert setup.unsent == {7}


async def test_overlapping_with_higher_qos(setup: Setup) -> None:
    """A message is pending at the highest QoS that was granted by any that it matches."""
    setup.inbox.put("$MQTT.msgs.a", b"x", QOS2)
    overlapping(setup, {"a": 1, "*": 2, "b": 3}, {"a": 10, "*": 11, "b": 11})
    setup.record.subs["*"] = 2
    await setup.imported()
    assert setup.writer.ledger.pending == {11: 2}


async def test_lowered_one_overlaps(setup: Setup) -> None:
    """A lowered subscription is brought along, and has no message after its end."""
    setup.end("*", 1, 7, 1, whole=True)
    setup.consumer("*", 4)
    overlapping(setup, {"a": 2, "b": 3}, {"a": 10, "b": 10})
    await setup.imported()
    assert setup.result == (10, {5: 1, 6: 1, 7: 1}, {"a": 2, "b": 3})


async def test_overlapping_and_far_behind(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """With too many messages it stays behind; what it has not had comes from there."""
    monkeypatch.setattr(position_import, "OVERLAPPING_MOST", 2)
    overlapping(setup, {"a": 1, "b": 2, "*": 3}, {"a": 2, "b": 10, "*": 10})
    await setup.imported()
    assert setup.result == (6, {3: 1, 5: 1}, {"a": 1, "b": 11, "*": 11})


async def test_too_many_to_compare(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as not overlapping: each begins where it is."""
    monkeypatch.setattr(position_import, "PAIRS_MOST", 2)
    overlapping(setup, {"a": 1, "b": 2, "*": 3}, {"a": 5, "b": 10, "*": 8})
    await setup.imported()
    assert setup.result == (5, {}, {"a": 1, "b": 11, "*": 9})


async def test_overlap_by_way_of_another(setup: Setup) -> None:
    """One that meets only a subscription that is brought along is brought along, too: else it would be behind that."""
    overlapping(setup, {"a": 1, "*": 2, "b": 3}, {"a": 10, "*": 6, "b": 6})
    await setup.imported()
    assert setup.result == (10, {8: 1, 10: 1}, {"a": 1, "*": 2, "b": 3})


# -- who has the session -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["record", "position"])
async def test_somebody_else_has_the_session(setup: Setup, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The record keeps the beginnings until the position is stored: another attempt needs them."""
    setup.consumer("a", 9)
    setup.consumer("b", 4)
    setup.refuses = where == "record"
    monkeypatch.setattr(WriterInMemory, "stores", where == "record")
    with pytest.raises(RequestTimeout):
        await setup.imported()
    assert setup.client.taken
    assert setup.v5.start == ({"a": 10} if setup.refuses else {})
    assert setup.side.take_record_change()


async def test_somebody_else_writes_a_position_of_the_session(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import is made again from what is stored then; whose session it is, nobody knows yet."""
    setup.consumer("b", 4)
    monkeypatch.setattr(WriterInMemory, "stores", False)
    live = setup.record.cons["a"].durable_name
    with pytest.raises(RequestTimeout):
        await setup.imported(Position("known", live=[live], reached=4))
    assert not setup.client.taken
    assert setup.saved == []
