# SPDX-License-Identifier: Apache-2.0
"""How a consumer is attached anew when answers are outdated, or deliveries are lost once more."""

import asyncio

import pytest

from mqtt_nats.delivery import resume as resuming
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions import pubrel_consumer as attaching
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_nats.sessions.record import claimed
from mqtt_streams.api import ApiError
from mqtt_streams.consumers import ConsumerInfo, ConsumerRef
from mqtt_streams.error_codes import CONSUMER_CREATE_FAILED
from tests.delivery.fakes import FakeDeliveryServices, FakeReceiver
from tests.sessions.fakes import FakeClient, FakeServices, FakeSide, as_client, as_services, consumer_state

CONSUMER = ConsumerRef("name", "new", "filter", 10)


def bound(services: FakeServices) -> ConsumerBinding:
    """A consumer that delivers to this connection."""
    binding = ConsumerBinding("key", CONSUMER, SubscriptionState(1, 0, 10))
    services.fake_link.wire = None
    binding.listen(b"1", None)
    return binding


class Server:
    """Answers to changes of a consumer, the first of them with what it was before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[ConsumerRef] = []
        monkeypatch.setattr(attaching, "update_consumer", self._update)

    async def _update(self, js: object, stream: str, consumer: ConsumerRef) -> ConsumerInfo:
        self.asked.append(consumer)
        if len(self.asked) == 1:
            return consumer_state(consumer, ack_wait=1)
        return consumer_state(consumer, num_ack_pending=5)


async def test_what_is_pending_is_not_taken_from_an_outdated_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    info = await attaching.send_again(as_services(FakeServices()), "stream", CONSUMER, lambda: 5)
    assert info.num_ack_pending == 5
    assert [one.ack_wait for one in server.asked] == [attaching.EXPIRE_NS] * 2 + [CONSUMER.ack_wait]


@pytest.mark.parametrize("former", [True, False])
async def test_how_a_consumer_is_comes_from_after_the_change(monkeypatch: pytest.MonkeyPatch, former: bool) -> None:
    asked: list[str] = []

    async def update(js: object, stream: str, consumer: ConsumerRef) -> ConsumerInfo:
        return consumer_state(consumer, deliver_subject="old" if former else "", num_ack_pending=1)

    async def info(js: object, stream: str, name: str) -> ConsumerInfo:
        asked.append(name)
        return consumer_state(num_ack_pending=2)

    monkeypatch.setattr(attaching, "update_consumer", update)
    monkeypatch.setattr(attaching, "consumer_info", info)
    side = FakeSide(FakeClient(FakeServices()))
    found, late = await attaching.attach_moved(side, ConsumerBinding("key", CONSUMER, SubscriptionState(1, 0, 10)))
    assert (found.num_ack_pending, late, asked) == ((2, True, ["name"]) if former else (1, False, []))


@pytest.mark.parametrize(("late", "expected"), [(False, 3), (True, 4)])
def test_first_deliveries_before_the_answer_do_not_come_again(late: bool, expected: int) -> None:
    """Five were pending and have been sent again, two new ones have followed; then the answer was made."""
    source = SubscriptionState(1, 0, 10)
    source.attaching()
    source.began(16, True)
    source.attached(5, 17, late)
    assert (source.expected, source.follows(11), source.follows(18), source.follows(19)) == (
        expected + 1,
        True,
        True,
        False,
    )
    source.place = 17
    source.began(17, False)
    source.began(18, False)
    assert (source.expected, source.follows(11), source.follows(17)) == (expected, False, True)


async def test_what_was_acknowledged_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are made to expire, and the client acknowledges one of them before it is sent again."""
    looks: list[str] = []

    async def update(js: object, stream: str, consumer: ConsumerRef) -> ConsumerInfo:
        return consumer_state(consumer, num_ack_pending=3)

    async def info(js: object, stream: str, name: str) -> ConsumerInfo:
        looks.append(name)
        return consumer_state(num_ack_pending=2)

    monkeypatch.setattr(attaching, "update_consumer", update)
    monkeypatch.setattr(attaching, "consumer_info", info)
    monkeypatch.setattr(attaching, "ATTACH_POLL_S", 0.001)
    monkeypatch.setattr(attaching, "EXPIRED", 100.0)
    await attaching.send_again(as_services(FakeServices()), "stream", CONSUMER, lambda: 2)
    assert looks == ["name"]


@pytest.mark.parametrize("missed", [True, False])
async def test_nobody_waits_where_nothing_can_come(missed: bool) -> None:
    """The deliver subject was let go of, when a message was lost on its way, or with the connection to NATS."""
    services = FakeServices()
    binding = bound(services)
    binding.source.expected = 2
    if missed:
        binding.miss()
    else:
        services.fake_link.wire = object()
    assert not await attaching.bring_back(FakeSide(FakeClient(services)), binding)


@pytest.mark.parametrize("comes", [True, False], ids=["comes", "was acknowledged"])
async def test_nobody_waits_for_what_a_new_leader_took_for_pending(
    monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """Its first answer may count messages that were acknowledged; only two looks that agree tell that none comes."""
    services = FakeServices()
    binding = bound(services)
    source = binding.source
    source.expected = 1
    found = [0, 1, 0, 0]

    async def info(js: object, stream: str, name: str) -> ConsumerInfo:
        if comes and len(found) == 3:
            source.again = 1
        return consumer_state(num_ack_pending=found.pop(0))

    monkeypatch.setattr(attaching, "consumer_info", info)
    monkeypatch.setattr(attaching, "ATTACH_POLL_S", 0.001)
    assert await attaching.bring_back(FakeSide(FakeClient(services)), binding, patience=1000.0)
    assert len(found) == (2 if comes else 0)


@pytest.mark.parametrize("gone", [True, False], ids=["the consumer is gone", "nothing is pending"])
async def test_a_consumer_that_has_nothing_to_send_again_is_not_told_to(
    monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    services = FakeServices()
    binding = bound(services)
    binding.source.expected = 1

    async def send_again(services: object, stream: str, consumer: ConsumerRef, come: object) -> None:
        pytest.fail("it has nothing to send")

    async def info(js: object, stream: str, name: str) -> ConsumerInfo | None:
        return None if gone else consumer_state(num_ack_pending=0)

    monkeypatch.setattr(attaching, "send_again", send_again)
    monkeypatch.setattr(attaching, "consumer_info", info)
    assert await attaching.bring_back(FakeSide(FakeClient(services)), binding, patience=0.0, attempts=1)


@pytest.mark.parametrize("code", [CONSUMER_CREATE_FAILED, 10074])
async def test_a_consumer_made_again_whose_files_are_being_removed_is_told_once_more(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Those of the one before it, of the same name; also when all has come, or it would expire everything for ever.

    What else JetStream refuses is not for here.
    """
    told: list[str] = []
    services = FakeServices()
    binding = bound(services)
    source = binding.source
    source.expected = 1

    async def send_again(services: object, stream: str, consumer: ConsumerRef, come: object) -> None:
        told.append(consumer.durable_name)
        source.expected = 0
        if len(told) == 1:
            raise ApiError(500, code, "open meta.inf.tmp: no such file or directory")

    async def info(js: object, stream: str, name: str) -> ConsumerInfo:
        return consumer_state(num_ack_pending=1)

    monkeypatch.setattr(attaching, "send_again", send_again)
    monkeypatch.setattr(attaching, "consumer_info", info)
    side = FakeSide(FakeClient(services))
    if code == CONSUMER_CREATE_FAILED:
        assert await attaching.bring_back(side, binding, patience=0.0, attempts=3)
        assert told == ["name", "name"]
        told.clear()
        source.expected = 1
    with pytest.raises(ApiError):
        await attaching.bring_back(side, binding, patience=0.0, attempts=1)


@pytest.mark.sources
@pytest.mark.parametrize(
    ("consumerless", "wanted", "counted"), [(True, True, 0), (True, False, 1), (False, True, 0), (False, False, 0)]
)
async def test_consumers_that_a_session_gets_are_counted(
    monkeypatch: pytest.MonkeyPatch, consumerless: bool, wanted: bool, counted: int
) -> None:
    """Those that it has already were counted before."""
    client = FakeReceiver(FakeDeliveryServices())
    record, v5 = claimed(client.record)
    record.cons, v5.consumerless = {"key": CONSUMER}, consumerless
    monkeypatch.setattr(client.delivery.feed, "wants_records", lambda _: wanted)
    assert resuming._stays_in_records(as_client(client)) is (consumerless and wanted)
    assert client.services.stream.consumers == counted


@pytest.mark.sources
@pytest.mark.parametrize("leaderless", [True, False])
@pytest.mark.parametrize("back", [True, False])
async def test_what_is_new_waits_for_what_is_not_back(
    monkeypatch: pytest.MonkeyPatch, back: bool, leaderless: bool
) -> None:
    """A consumer that had no leader sends nothing again by itself, so it is told to at once."""
    patiences: list[float] = []

    async def nothing(*_: object) -> None:
        pass

    async def attach(*_: object) -> None:
        await asyncio.sleep(0.05 if leaderless else 0.0)

    async def bring_back(side: object, binding: object, patience: float, attempts: int) -> bool:
        patiences.append(patience)
        return back

    monkeypatch.setattr(resuming, "save_when_room", nothing)
    monkeypatch.setattr(resuming, "write_changed_record", nothing)
    monkeypatch.setattr(resuming, "bring_back", bring_back)
    monkeypatch.setattr(resuming, "PENDING_RETURN_S", 0.04)
    client = FakeReceiver(FakeDeliveryServices())
    side = client.durable_side = DurableDelivery(as_client(client))
    side.begin()
    monkeypatch.setattr(side, "attach", attach)
    assert client.record is not None
    client.record.cons["key"] = CONSUMER
    source = side.add("key", CONSUMER, SubscriptionState(1, 0, 10)).source
    await resuming.rebind_consumers(as_client(client), side)
    assert bool(source.held & SubscriptionState.RETURNING) is not back
    assert client.delivery.reconciling.fake_due == ([] if back else ["name"])
    assert patiences == [0.0 if leaderless else 0.04]


@pytest.mark.sources
@pytest.mark.parametrize(("forgone", "start"), [(0, 31), (20, 20), (40, 31)])
async def test_a_consumer_that_was_deleted_begins_with_what_was_given_up(
    forgone: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only JetStream has that; what is done or on its way is known when it comes once more."""
    made: list[ConsumerRef] = []

    async def create(js: object, stream: str, consumer: ConsumerRef) -> None:
        made.append(consumer)

    async def call(js: object, what: str) -> dict[str, dict[str, int]]:
        return {"state": {"last_seq": 100}}

    monkeypatch.setattr(attaching, "create_consumer", create)
    monkeypatch.setattr(attaching, "call", call)
    client = FakeClient(FakeServices())
    source = SubscriptionState(1, 1, 10)
    source.last, source.forgotten_from = 30, forgone
    await attaching.make_anew(FakeSide(client), ConsumerBinding("key", CONSUMER, source))
    assert [one.start_seq for one in made] == [start]


@pytest.mark.parametrize(("first", "expected"), [(0, (3, 9)), (7, (3, 6)), (20, (3, 9))])
def test_what_came_for_the_first_time_has_not_gone(first: int, expected: tuple[int, int]) -> None:
    """JetStream may count it as pending when it says how the consumer is."""
    binding = ConsumerBinding("key", CONSUMER, SubscriptionState(1, 1, 10))
    binding.gone = 3, 9
    binding.source.base = first
    assert binding.not_come == expected
