# SPDX-License-Identifier: Apache-2.0
"""The consumer of PUBREL records: attached so that all records come again, created, and made to send again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mqtt_nats.sessions import pubrel_consumer
from mqtt_nats.sessions.pubrel_consumer import (
    attach_pubrels,
    create_again,
    move,
    outdated,
    send_again,
    try_to_attach_pubrels,
)
from mqtt_streams.api import ApiError, RequestTimeout
from mqtt_streams.consumers import ConsumerInfo, ConsumerNotFound, ConsumerRef, DeliverSubjectBusy
from mqtt_streams.error_codes import CONSUMER_CREATE_FAILED, CONSUMER_NAME_EXISTS, MAXIMUM_CONSUMERS
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import CONSUMER_PREFIX
from mqtt_streams.pubrel import STREAM as OUT
from tests.sessions.fakes import FakeClient, FakeServices, FakeSide, as_client, as_services, as_side, consumer_state

NAME = "hash_name"
CONSUMER = ConsumerRef(NAME, "$MQTT.sub.new", "$MQTT.msgs.a", 10, start_seq=3)
CREATE = f"$JS.API.CONSUMER.DURABLE.CREATE.{MESSAGES}.{NAME}"


class Setup:
    """A session, and a consumer that exists unless a test removes it."""

    def __init__(self) -> None:
        self.services = FakeServices()
        self.client = FakeClient(self.services)
        assert self.client.record is not None
        self.record = self.client.record
        self.side = self.client.durable_side = FakeSide(self.client)
        self.inbox = self.services.nats.inbox
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

    def refuse_pubrels(self, error: BaseException) -> None:
        """The consumer of PUBRELs is not created; there was none to move."""
        create = f"$JS.API.CONSUMER.DURABLE.CREATE.{OUT}.{CONSUMER_PREFIX}{self.client.hash}"

        def refuse(subject: str) -> None:
            if subject == create and self.side.has_pubrels:
                raise error

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


# -- a consumer of a name that was in use ---------------------------------------------------------------


async def test_created_while_files_of_the_former_one_are_removed(setup: Setup) -> None:
    setup.consumers.clear()
    left = [True] * 3

    def fail(subject: str) -> None:
        if subject == CREATE and left:
            left.pop()
            raise ApiError(500, CONSUMER_CREATE_FAILED, "open meta.inf.tmp: no such file or directory")

    setup.services.fake_inbox.before = fail
    await create_again(setup.inbox, MESSAGES, CONSUMER)
    assert list(setup.consumers) == [NAME]


async def test_created_while_a_server_takes_it_for_a_change_of_the_former_one(setup: Setup) -> None:
    """Such an assignment stays until the name is deleted."""
    setup.consumers.clear()
    asked: list[str] = []

    def refuse(subject: str) -> None:
        asked.append(subject)
        if subject == CREATE and f"$JS.API.CONSUMER.DELETE.{MESSAGES}.{NAME}" not in asked:
            raise ApiError(500, CONSUMER_NAME_EXISTS, "consumer name already in use")

    setup.services.fake_inbox.before = refuse
    await create_again(setup.inbox, MESSAGES, CONSUMER)
    assert list(setup.consumers) == [NAME]
    assert asked.count(CREATE) == 2


async def test_a_name_that_stays_in_use_is_an_error_of_jetstream(setup: Setup) -> None:
    """Not one of a deliver subject: the client is told that the server is not available."""
    setup.consumers.clear()
    setup.busy(10**6)
    with pytest.raises(ApiError) as raised:
        await create_again(setup.inbox, MESSAGES, CONSUMER)
    assert raised.value.err_code == CONSUMER_NAME_EXISTS


# -- pending messages that are sent again --------------------------------------------------------------


class Server:
    """Answers to changes of a consumer, the first of them with what it was before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[ConsumerRef] = []
        monkeypatch.setattr(pubrel_consumer, "update_consumer", self._update)

    async def _update(self, js: object, stream: str, consumer: ConsumerRef) -> ConsumerInfo:
        self.asked.append(consumer)
        if len(self.asked) == 1:
            return consumer_state(consumer, ack_wait=1)
        return consumer_state(consumer, num_ack_pending=5)


async def test_what_is_pending_is_not_taken_from_an_outdated_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    info = await send_again(as_services(FakeServices()), "stream", CONSUMER, lambda: 5)
    assert info.num_ack_pending == 5
    assert [one.ack_wait for one in server.asked] == [pubrel_consumer.EXPIRE_NS] * 2 + [CONSUMER.ack_wait]


@pytest.mark.parametrize(("deliver_subject", "ack_wait", "old"), [("", 0, False), ("old", 0, True), ("", 7, True)])
def test_answers_from_before_the_change(deliver_subject: str, ack_wait: int, old: bool) -> None:
    assert outdated(consumer_state(CONSUMER, deliver_subject=deliver_subject, ack_wait=ack_wait), CONSUMER) is old


async def test_what_was_acknowledged_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are made to expire, and the client acknowledges one of them before it is sent again."""
    looks: list[str] = []

    async def update(js: object, stream: str, consumer: ConsumerRef) -> ConsumerInfo:
        return consumer_state(consumer, num_ack_pending=3)

    async def info(js: object, stream: str, name: str) -> ConsumerInfo:
        looks.append(name)
        return consumer_state(num_ack_pending=2)

    monkeypatch.setattr(pubrel_consumer, "update_consumer", update)
    monkeypatch.setattr(pubrel_consumer, "consumer_info", info)
    monkeypatch.setattr(pubrel_consumer, "ATTACH_POLL_S", 0.001)
    monkeypatch.setattr(pubrel_consumer, "EXPIRED", 100.0)
    await send_again(as_services(FakeServices()), "stream", CONSUMER, lambda: 2)
    assert looks == [NAME]


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


@pytest.mark.sources
@pytest.mark.parametrize(
    "error",
    [
        ApiError(400, MAXIMUM_CONSUMERS, "maximum consumers limit reached"),
        RequestTimeout("a test"),
        asyncio.CancelledError(),
    ],
    ids=["refused", "not answered", "cancelled"],
)
async def test_the_consumer_of_pubrels_that_is_not_created_is_not_attached(setup: Setup, error: BaseException) -> None:
    """Whoever stores the first record tries again; JetStream keeps no record without the consumer."""
    setup.refuse_pubrels(error)
    with pytest.raises(type(error)):
        await attach_pubrels(as_side(setup.side))
    assert not setup.side.has_pubrels
    assert list(setup.services.fake_link.fake_subjects.values()) == [
        b"$MQTT.deliver.pubrel." + setup.client.hash.encode()
    ]
    assert setup.services.fake_link.handlers == {}, "nobody listens to its deliver subject"
    assert (setup.services.registry.attached, setup.record.pubrel) == ({}, None)
    setup.services.fake_inbox.before = lambda subject: None
    await attach_pubrels(as_side(setup.side))
    assert list(setup.services.fake_link.handlers) == [setup.side.pubrel_sid]
    assert list(setup.services.fake_inbox.consumers[OUT]) == [CONSUMER_PREFIX + setup.client.hash]


@pytest.mark.sources
async def test_a_session_goes_on_without_its_consumer_of_pubrels(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "mqtt_nats.broker")
    setup.refuse_pubrels(ApiError(400, MAXIMUM_CONSUMERS, "maximum consumers limit reached"))
    await try_to_attach_pubrels(as_side(setup.side))
    assert (setup.side.has_pubrels, setup.services.fake_link.handlers, setup.client.fake_ended) == (False, {}, [])
    assert "no consumer of PUBREL records: maximum consumers limit reached" in caplog.text


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


async def test_the_consumer_of_pubrels_that_is_not_moved_is_not_attached(setup: Setup) -> None:
    """Who stores the next record tries again."""
    await attach_pubrels(as_side(setup.side))

    def refuse(subject: str) -> None:
        if ".DURABLE.CREATE." in subject:
            raise ApiError(500, CONSUMER_CREATE_FAILED, "consumer create failed")

    setup.services.fake_inbox.before = refuse
    with pytest.raises(ApiError):
        await attach_pubrels(as_side(setup.side))
    assert not setup.side.has_pubrels
    assert not setup.services.fake_link.handlers


async def test_somebody_listens_to_the_subject_of_pubrels(setup: Setup) -> None:
    """The consumer keeps it, and what is pending is made to expire."""
    await attach_pubrels(as_side(setup.side))
    setup.services.nats.crowded_until = asyncio.get_running_loop().time() + 60
    former, waits = setup.side.pubrel_sid, list[int]()
    configs = setup.services.fake_inbox.consumers[OUT]

    def refuse(subject: str) -> None:
        if ".DURABLE.CREATE." in subject and setup.side.pubrel_sid in (former, b""):
            raise ApiError(400, CONSUMER_NAME_EXISTS, "consumer name already in use")

    def note(subject: str) -> None:
        if ".DURABLE.CREATE." in subject:
            waits.extend(one["config"]["ack_wait"] for one in configs.values())

    setup.services.fake_inbox.before, setup.services.fake_inbox.after = refuse, note
    await attach_pubrels(as_side(setup.side))
    assert len(waits) == 2
    assert waits[0] == pubrel_consumer.EXPIRE_NS
    assert waits[1] > pubrel_consumer.EXPIRE_NS


async def test_the_consumer_of_pubrels_has_another_subject_to_which_somebody_listens(setup: Setup) -> None:
    """It was moved aside, and its gateway died before it moved it back: the record gets that subject."""
    await attach_pubrels(as_side(setup.side))
    setup.services.nats.crowded_until = asyncio.get_running_loop().time() + 60
    (consumer,) = setup.services.fake_inbox.consumers[OUT].values()
    consumer["config"]["deliver_subject"] = "aside"
    first = setup.side.pubrel_sid

    def refuse(subject: str) -> None:
        if ".DURABLE.CREATE." in subject and setup.side.pubrel_sid in (first, b""):
            raise ApiError(400, CONSUMER_NAME_EXISTS, "consumer name already in use")

    setup.services.fake_inbox.before = refuse
    await attach_pubrels(as_side(setup.side))
    assert setup.services.fake_link.fake_subjects[setup.side.pubrel_sid] == b"aside"
    assert list(setup.services.fake_link.handlers) == [setup.side.pubrel_sid]
    assert setup.record.pubrel is not None
    assert setup.record.pubrel.deliver_subject == consumer["config"]["deliver_subject"] == "aside"
