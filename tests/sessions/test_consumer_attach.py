# SPDX-License-Identifier: Apache-2.0
"""Attaching consumers: deliver subjects that are in use, consumers that are gone, and the consumer of PUBRELs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mqtt_nats.codec import MqttError
from mqtt_nats.protocol.durable_sender import packet_id
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions import pubrel_consumer
from mqtt_nats.sessions.pubrel_consumer import (
    attach_in_place,
    attach_moved,
    attach_pubrels,
    make_anew,
    move,
    outstanding,
)
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.api import ApiError
from mqtt_streams.consumers import ConsumerInfo, ConsumerNotFound, ConsumerRef, DeliverSubjectBusy
from mqtt_streams.error_codes import CONSUMER_CREATE_FAILED, CONSUMER_NAME_EXISTS
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import CONSUMER_PREFIX
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.sessions import V5
from tests.sessions.fakes import FakeClient, FakeServices, FakeSide, as_client, as_services, as_side, v5_of

NAME = "hash_name"
CONSUMER = ConsumerRef(NAME, "$MQTT.sub.new", "$MQTT.msgs.a", 10, start_seq=3)
CREATE = f"$JS.API.CONSUMER.DURABLE.CREATE.{MESSAGES}.{NAME}"


class Setup:
    """A session with one consumer, which exists unless a test removes it."""

    def __init__(self) -> None:
        self.services = FakeServices()
        self.client = FakeClient(self.services, v5=V5(start={"key": 3}, was={"key": (2, 9)}))
        assert self.client.record is not None
        self.record = self.client.record
        self.record.cons["key"] = CONSUMER
        self.side = self.client.durable_side = FakeSide(self.client)
        self.source = SubscriptionState(1, 3, 10)
        self.binding = ConsumerBinding("key", CONSUMER, self.source)
        self.consumers = self.services.fake_inbox.consumers[MESSAGES]
        self.consumers[NAME] = {"config": replace(CONSUMER, deliver_subject="$MQTT.sub.old").to_config()}

    def busy(self, times: int) -> None:
        """The present deliver subject has interest for so many attempts to change it."""
        left = [True] * times

        def refuse(subject: str) -> None:
            if subject.startswith("$JS.API.CONSUMER.DURABLE.CREATE.") and left:
                left.pop()
                raise ApiError(400, CONSUMER_NAME_EXISTS, "consumer name already in use")

        self.services.fake_inbox.before = refuse


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(pubrel_consumer, "ATTACH_POLL_S", 0.001)
    monkeypatch.setattr(pubrel_consumer, "CREATE_PAUSES_S", (0.001,) * 10)
    return Setup()


# -- the deliver subject ------------------------------------------------------------------------------


async def test_the_former_owner_lets_go_after_a_while(setup: Setup) -> None:
    setup.busy(3)
    info = await move(as_services(setup.services), MESSAGES, CONSUMER)
    assert info.config["deliver_subject"] == "$MQTT.sub.new"
    assert setup.services.nats.crowded_until == 0


async def test_a_client_that_listens_to_everything_is_not_waited_for_again(setup: Setup) -> None:
    """For the next minute other deliver subjects are waited for only shortly."""
    setup.busy(10**6)
    setup.services.nats.crowded_until = asyncio.get_running_loop().time() + 10
    began = asyncio.get_running_loop().time()
    with pytest.raises(DeliverSubjectBusy):
        await move(as_services(setup.services), MESSAGES, CONSUMER)
    assert asyncio.get_running_loop().time() - began < pubrel_consumer.LET_GO_WAIT_S
    assert setup.services.nats.crowded_until > began + pubrel_consumer.CROWDED_S - 1


async def test_there_is_no_such_consumer(setup: Setup) -> None:
    with pytest.raises(ConsumerNotFound):
        await move(as_services(setup.services), MESSAGES, replace(CONSUMER, durable_name="other"))


async def test_attached_with_a_deliver_subject_of_its_own(setup: Setup) -> None:
    info, late = await attach_moved(as_side(setup.side), setup.binding)
    assert (info.config["deliver_subject"], late) == ("$MQTT.sub.new", False)


@pytest.mark.sources
async def test_attached_in_place(setup: Setup) -> None:
    """It keeps the subject that somebody listens to, and its pending messages are made to expire."""
    setup.consumers[NAME]["num_ack_pending"] = 1
    setup.source.again = 1
    waits: list[int] = []

    def change(subject: str) -> None:
        if subject == CREATE:
            waits.append(setup.consumers[NAME]["config"]["ack_wait"])

    setup.services.fake_inbox.after = change
    info = await attach_in_place(as_side(setup.side), setup.binding)
    assert info.num_ack_pending == 1
    assert waits == [pubrel_consumer.EXPIRE_NS, CONSUMER.ack_wait]
    assert setup.record.cons["key"].deliver_subject == "$MQTT.sub.old"
    assert setup.side.kept
    assert setup.services.fake_link.fake_subjects[setup.binding.sid] == b"$MQTT.sub.old"
    assert not setup.source.held


async def test_deleted_while_it_was_being_attached(setup: Setup) -> None:
    setup.consumers.clear()
    with pytest.raises(MqttError):
        await attach_in_place(as_side(setup.side), setup.binding)


# -- a consumer that is gone --------------------------------------------------------------------------


@pytest.mark.sources
async def test_made_anew_behind_what_the_client_has(setup: Setup) -> None:
    setup.consumers.clear()
    setup.services.fake_inbox.last[MESSAGES] = 50
    setup.source.last = 30
    _, late = await attach_moved(as_side(setup.side), setup.binding)
    assert not late
    assert setup.consumers[NAME]["config"]["opt_start_seq"] == 31
    assert setup.record.cons["key"].start_seq == 31
    assert setup.side.kept
    assert setup.services.stream.fake_checks == 1


@pytest.mark.sources
async def test_made_anew_from_what_the_client_has_yet_to_acknowledge(setup: Setup) -> None:
    """The next connection has it sent again, though this one ends before the client has acknowledged it."""
    setup.consumers.clear()
    setup.services.fake_inbox.last[MESSAGES] = 50
    machine = setup.side.machine
    machine.sources.append(setup.source)
    setup.source.created()
    machine.start()
    for sequence in (28, 29, 30):
        machine.arrived(setup.source, sequence, 1, b"$JS.ACK.%d" % sequence, None, 1)
    machine.acknowledged(4, [packet_id(28)])
    await attach_moved(as_side(setup.side), setup.binding)
    assert setup.consumers[NAME]["config"]["opt_start_seq"] == 29
    sent = len(setup.side.fake_ports.calls)
    machine.arrived(setup.source, 29, 1, b"$JS.ACK.again", None, 1)
    assert len(setup.side.fake_ports.calls) == sent
    machine.acknowledged(4, [packet_id(29)])
    assert ("ack", b"$JS.ACK.again") in setup.side.fake_ports.calls


@pytest.mark.sources
async def test_made_anew_when_nothing_is_known(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    """What was stored since it was removed is lost."""
    setup.consumers.clear()
    for _ in range(3):
        setup.services.fake_inbox.put("$MQTT.msgs.a")
    await make_anew(as_side(setup.side), setup.binding)
    assert setup.consumers[NAME]["config"]["deliver_policy"] == "new"
    assert "messages since then are lost" in caplog.text


@pytest.mark.sources
async def test_made_from_the_subscription_on_where_nothing_of_it_is_stored(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a gateway was killed in SUBSCRIBE: the record names a consumer that was never created."""
    caplog.set_level("INFO")
    setup.consumers.clear()
    setup.services.fake_inbox.put("$MQTT.msgs.a")
    for _ in range(3):
        setup.services.fake_inbox.put("$MQTT.msgs.other")
    await make_anew(as_side(setup.side), setup.binding)
    assert setup.consumers[NAME]["config"]["opt_start_seq"] == 3
    assert [one.levelname for one in caplog.records] == ["INFO"]


@pytest.mark.sources
async def test_made_anew_in_a_stream_that_begins_anew(setup: Setup) -> None:
    setup.consumers.clear()
    setup.services.fake_inbox.last[MESSAGES] = 5
    setup.source.last = 30
    setup.side.machine.sources.append(setup.source)
    setup.side.overlap.add("a", setup.binding, setup.source)
    assert setup.side.overlap.owner("a", 1)[0] is None
    await make_anew(as_side(setup.side), setup.binding)
    assert setup.consumers[NAME]["config"]["opt_start_seq"] == 1
    assert (setup.source.start, v5_of(setup.client).was, v5_of(setup.client).start) == (1, {}, {"key": 1})
    assert setup.side.overlap.owner("a", 1)[0] is setup.binding


@pytest.mark.sources
@pytest.mark.parametrize(("end", "policy"), [(None, 21), (0, None), (9, None)])
async def test_made_anew_in_a_stream_that_was_replaced(setup: Setup, end: int | None, policy: int | None) -> None:
    """Behind the messages of the backup; a subscription that had ended gets nothing new."""
    setup.consumers.clear()
    setup.side.replaced = 20
    if end is not None:
        setup.source.end_at(end)
    await make_anew(as_side(setup.side), setup.binding)
    assert setup.consumers[NAME]["config"].get("opt_start_seq") == policy


async def test_not_made_in_a_stream_in_which_the_session_does_not_count(setup: Setup) -> None:
    setup.consumers.clear()

    async def check() -> None:
        setup.client.alive = False

    setup.services.stream.check = check  # type: ignore[method-assign]
    with pytest.raises(MqttError):
        await make_anew(as_side(setup.side), setup.binding)
    assert setup.consumers == {}


@pytest.mark.sources
async def test_made_while_files_of_the_former_one_are_removed(setup: Setup) -> None:
    setup.consumers.clear()
    left = [True] * 3

    def fail(subject: str) -> None:
        if subject == CREATE and left:
            left.pop()
            raise ApiError(500, CONSUMER_CREATE_FAILED, "open meta.inf.tmp: no such file or directory")

    setup.services.fake_inbox.before = fail
    await make_anew(as_side(setup.side), setup.binding)
    assert list(setup.consumers) == [NAME]


@pytest.mark.sources
async def test_made_while_a_server_takes_it_for_a_change_of_the_former_one(setup: Setup) -> None:
    """Such an assignment stays until the name is deleted."""
    setup.consumers.clear()
    asked: list[str] = []

    def refuse(subject: str) -> None:
        asked.append(subject)
        if subject == CREATE and f"$JS.API.CONSUMER.DELETE.{MESSAGES}.{NAME}" not in asked:
            raise ApiError(500, CONSUMER_NAME_EXISTS, "consumer name already in use")

    setup.services.fake_inbox.before = refuse
    await make_anew(as_side(setup.side), setup.binding)
    assert list(setup.consumers) == [NAME]
    assert asked.count(CREATE) == 2


async def test_a_name_that_stays_in_use_is_an_error_of_jetstream(setup: Setup) -> None:
    """Not one of a deliver subject: the client is told that the server is not available."""
    setup.consumers.clear()
    setup.busy(10**6)
    with pytest.raises(ApiError) as raised:
        await make_anew(as_side(setup.side), setup.binding)
    assert raised.value.err_code == CONSUMER_NAME_EXISTS


# -- what is on its way -------------------------------------------------------------------------------


def test_what_counts_as_on_its_way(setup: Setup) -> None:
    """In flight, or waiting; of this consumer, and delivered before it told its state."""
    machine, other = setup.side.machine, SubscriptionState(1, 0, 10)
    machine.sources += [setup.source, other]
    machine.start()
    for sequence in (5, 6):
        machine.arrived(setup.source, sequence, 1, b"reply", None, 1)
    machine.arrived(other, 7, 1, b"reply", None, 1)

    def info(last: int) -> ConsumerInfo:
        return ConsumerInfo({}, True, last, last, 0, 0, 0)

    assert [outstanding(machine, one, info(7)) for one in (setup.source, other)] == [2, 1]
    assert [outstanding(machine, setup.source, info(last)) for last in (4, 5)] == [0, 1]


# -- the consumer of PUBRELs --------------------------------------------------------------------------


async def test_the_consumer_of_pubrels_is_made_once(setup: Setup) -> None:
    before = setup.side.has_pubrels
    await attach_pubrels(as_side(setup.side))
    name = CONSUMER_PREFIX + setup.client.hash
    assert (before, setup.side.has_pubrels) == (False, True)
    assert list(setup.services.fake_inbox.consumers[OUT]) == [name]
    assert setup.services.registry.attached[name] is as_client(setup.client)
    assert setup.record.pubrel is not None
    subject = setup.record.pubrel.deliver_subject.encode()
    assert setup.services.fake_link.fake_subjects[setup.side.pubrel_sid] == subject


@pytest.mark.sources
async def test_the_consumer_of_pubrels_is_made_while_a_server_has_the_former_session_s(setup: Setup) -> None:
    name = CONSUMER_PREFIX + setup.client.hash
    asked: list[str] = []

    def refuse(subject: str) -> None:
        asked.append(subject)
        creates = subject.endswith(f"CREATE.{OUT}.{name}") and setup.side.has_pubrels  # there was none to move
        if creates and f"$JS.API.CONSUMER.DELETE.{OUT}.{name}" not in asked:
            raise ApiError(500, CONSUMER_NAME_EXISTS, "consumer name already in use")

    setup.services.fake_inbox.before = refuse
    await attach_pubrels(as_side(setup.side))
    assert list(setup.services.fake_inbox.consumers[OUT]) == [name]
    assert f"$JS.API.CONSUMER.DELETE.{OUT}.{name}" in asked


async def test_the_consumer_of_pubrels_is_moved_aside_and_back(setup: Setup) -> None:
    """So that it sends everything again, on the subject that nats-server's listener uses."""
    await attach_pubrels(as_side(setup.side))
    former = setup.side.pubrel_sid
    subjects: list[str] = []
    name = CONSUMER_PREFIX + setup.client.hash

    def note(subject: str) -> None:
        if ".CREATE." in subject:
            subjects.append(setup.services.fake_inbox.consumers[OUT][name]["config"]["deliver_subject"])

    setup.services.fake_inbox.after = note
    await attach_pubrels(as_side(setup.side))
    assert setup.record.pubrel is not None
    own = setup.record.pubrel.deliver_subject
    assert (len(subjects), subjects[0].startswith(f"{own}."), subjects[1]) == (2, True, own)
    assert former not in setup.services.fake_link.handlers


async def test_somebody_listens_to_the_subject_of_pubrels(setup: Setup) -> None:
    """The consumer keeps it, and what is pending is made to expire."""
    await attach_pubrels(as_side(setup.side))
    setup.services.nats.crowded_until = asyncio.get_running_loop().time() + 60
    former, waits = setup.side.pubrel_sid, list[int]()
    configs = setup.services.fake_inbox.consumers[OUT]

    def refuse(subject: str) -> None:
        if ".DURABLE.CREATE." in subject and setup.side.pubrel_sid == former:
            raise ApiError(400, CONSUMER_NAME_EXISTS, "consumer name already in use")

    def note(subject: str) -> None:
        if ".DURABLE.CREATE." in subject:
            waits.extend(one["config"]["ack_wait"] for one in configs.values())

    setup.services.fake_inbox.before, setup.services.fake_inbox.after = refuse, note
    await attach_pubrels(as_side(setup.side))
    assert len(waits) == 2
    assert waits[0] == pubrel_consumer.EXPIRE_NS
    assert waits[1] > pubrel_consumer.EXPIRE_NS
