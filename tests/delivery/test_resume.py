# SPDX-License-Identifier: Apache-2.0
"""Resume of a session: its subscriptions from the record, and that it goes on after NATS was lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mqtt_nats.codec import QuotaExceeded
from mqtt_nats.delivery import resume as resuming
from mqtt_nats.delivery.durable import DurableDelivery
from mqtt_nats.delivery.position_writer import PositionWriter
from mqtt_nats.delivery.resume import Resubscribed, keep_taken, recover, resume, write_changed_record
from mqtt_nats.delivery.states import DeliveryState
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.position import SessionPosition
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.api import ApiError
from mqtt_streams.consumers import ConsumerRef, backstop
from mqtt_streams.error_codes import MAXIMUM_CONSUMERS
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.positions import STREAM as POSITIONS
from mqtt_streams.pubrel import CONSUMER_PREFIX, Owed
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.sessions import Conflict, Draining, SubscriptionOptions
from mqtt_streams.shared import Assignment
from tests.delivery.fakes import FakeDeliveryServices, FakePositionWriter, FakeReceiver, Side
from tests.protocol.recorder import session
from tests.sessions.fakes import as_client, v5_of

CONSUMER = ConsumerRef("name", "deliver", "$MQTT.msgs.a", 10)


class Bench:
    """A session of which readers bring messages that are kept back, since NATS was lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stores: bool = True) -> None:
        self.client: Any = FakeReceiver(FakeDeliveryServices())
        self.machine, self.ports = session()
        self.source = SubscriptionState(1, 1)
        self.source.hold(SubscriptionState.RETURNING)
        self.machine.sources.append(self.source)
        self.writer = FakePositionWriter(stores=stores)
        binding = ConsumerBinding("a", CONSUMER, self.source)
        self.side: Any = Side(self.machine, client=self.client, bindings={"name": binding}, position_writer=self.writer)
        self.client.durable_side = self.side
        self.machine.arrived(self.source, 8, 1, b"r", None, 1)
        self.saved = 0
        self.refusal: Exception | None = None
        self.attached: list[object] = []
        monkeypatch.setattr(resuming, "save_when_room", self._save)
        monkeypatch.setattr(resuming, "attach_pubrels", self._attach)

    async def _save(self, client: object) -> None:
        assert client is self.client
        self.saved += 1
        if self.refusal is not None:
            raise self.refusal

    async def _attach(self, side: object) -> None:
        self.attached.append(side)

    @property
    def sent(self) -> list[object]:
        """Sequences of the messages that were sent."""
        return [call[1] for call in self.ports.calls if call[0] == "publish"]


# -- after NATS was lost ------------------------------------------------------------------------------


async def test_what_was_kept_back_goes_once_the_session_is_known_to_be_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write of its position that is stored proves that."""
    bench = Bench(monkeypatch)
    assert bench.sent == []
    await recover(bench.client, bench.side)
    assert (len(bench.writer.fake_written), bench.sent, bench.source.held) == (1, [8], 0)
    await recover(bench.client, bench.side)
    assert len(bench.writer.fake_written) == 1, "nothing is kept back"


async def test_a_session_that_has_moved_meanwhile_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, stores=False)
    bench.side.change_record()
    await recover(bench.client, bench.side)
    assert (bench.writer.fake_left, bench.sent, bench.saved) == (True, [], 0)


async def test_a_client_that_does_not_read_gets_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages are kept back until it reads, and its position is written then."""
    bench = Bench(monkeypatch)
    bench.side.state, bench.side.live = DeliveryState.NOT_READING, False
    await recover(bench.client, bench.side)
    assert (bench.writer.fake_written, bench.source.held) == ([], SubscriptionState.RETURNING)


@pytest.mark.parametrize("has", [True, False])
async def test_pubrel_records_come_again(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    bench = Bench(monkeypatch)
    if has:
        bench.side.listen_for_pubrels(b"5")
    await recover(bench.client, bench.side)
    assert bench.attached == ([bench.side] if has else [])


async def test_a_message_that_waits_for_room_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where no message was kept back: requests that it waited for may have failed."""
    bench = Bench(monkeypatch)
    pumped: list[bool] = []
    monkeypatch.setattr(bench.machine, "pump", lambda: pumped.append(True))
    bench.source.held = 0
    await recover(bench.client, bench.side)
    assert pumped == [True]


# -- the record ---------------------------------------------------------------------------------------


async def test_a_changed_record_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    await write_changed_record(bench.client, bench.side)
    assert bench.saved == 0
    bench.side.change_record()
    for _ in range(2):
        await write_changed_record(bench.client, bench.side)
    assert bench.saved == 1


async def test_a_record_of_another_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.refusal = Conflict("client")
    bench.side.change_record()
    await write_changed_record(bench.client, bench.side)
    assert bench.client.fake_ended == ["taken over"]


# -- the position before the deletion of consumers ----------------------------------------------------


class Keeping:
    """In place of a `PositionWriter` of a session that readers serve; a write is stored later."""

    def __init__(self, *, moved: bool = False) -> None:
        self.ledger, self.live, self.moved = SessionPosition(), {"name"}, moved
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def begin_flush(self) -> asyncio.Future[bool]:
        return self.done


def keeping(writer: Keeping | None) -> Any:
    client: Any = FakeReceiver(FakeDeliveryServices())
    client.durable_side = Side(client=client, position_writer=writer)
    client.path.store.lacking_room = lambda stream: None
    return client


async def test_a_session_without_a_position_has_nothing_to_keep() -> None:
    await keep_taken(keeping(None))
    client = keeping(None)
    client.durable_side = None
    await keep_taken(client)
    writer = Keeping()
    writer.live.clear()
    await keep_taken(keeping(writer))
    assert not writer.done.done()


@pytest.mark.parametrize(
    ("stored", "moved", "error"), [(True, False, None), (False, True, Conflict), (False, False, QuotaExceeded)]
)
async def test_the_position_is_stored_first(stored: bool, moved: bool, error: type[Exception] | None) -> None:
    writer = Keeping(moved=moved)
    task = asyncio.create_task(keep_taken(keeping(writer)))
    await asyncio.sleep(0)
    assert not task.done()
    writer.done.set_result(stored)
    if error is None:
        await task
    else:
        with pytest.raises(error):
            await task


async def test_a_position_that_waits_for_room_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is told that it cannot be subscribed now."""
    monkeypatch.setattr(resuming, "ROOM_LOOK_S", 0.001)
    client = keeping(writer := Keeping())
    asked: list[bytes] = []
    refusals = [None, ApiError(503, 10023, "insufficient resources")]

    def lacking(stream: bytes) -> ApiError | None:
        asked.append(stream)
        return refusals.pop(0)

    client.path.store.lacking_room = lacking
    with pytest.raises(ApiError):
        await keep_taken(client)
    assert asked == [POSITIONS.encode()] * 2
    assert not writer.done.done()


# -- subscriptions of the record ----------------------------------------------------------------------


class Turns:
    """Does all steps of a job at once."""

    async def run(self, steps: Any) -> None:
        for _ in steps:
            pass


def resumed(reached: int = 40, **subs: int) -> tuple[Any, DurableDelivery]:
    """A session whose record has subscriptions, up to a position."""
    client: Any = FakeReceiver(FakeDeliveryServices())
    client.path.round = type("Round", (), {"turns": Turns()})()
    for name, qos in subs.items():
        client.record.subs[name] = qos
        client.record.cons[name] = subscription_consumer(
            "hash", name, name_nuid=name, deliver_nuid="d", max_ack_pending=9, start_seq=1
        )
    side = client.durable_side = DurableDelivery(as_client(client))
    side.resume_from(reached)
    return client, side


@pytest.mark.sources
async def test_subscriptions_go_on_after_the_position() -> None:
    client, side = resumed(a=1, b=2)
    v5 = v5_of(client)
    v5.start, v5.was = {"b": 50}, {"a": (2, 30)}
    v5.options["b"] = SubscriptionOptions("b", nl=True, rap=True, id=5)
    v5.replay["a"] = 3
    unfinished = await resuming._add_subscriptions(client, side)
    first, second = (side.bindings[f"hash_{name}"] for name in "ab")
    assert (first.since, second.since) == (40, 49)
    assert (first.source.qos, first.source.was_qos, first.source.until) == (1, 2, 30)
    assert (second.source.no_local, second.source.kept, second.source.identifier) == (True, True, 5)
    assert [(one.filter, one.source) for one in unfinished] == [("a", first.source)]
    assert (first.source.replaying, second.source.replaying) == (True, False)
    assert (first.removed, second.removed) == (False, False)


@pytest.mark.sources
async def test_a_session_without_consumers_has_subscriptions_without() -> None:
    """But for those that its position names."""
    client, side = resumed(a=1, b=1)
    v5_of(client).consumerless = True
    writer = PositionWriter(client, 0)
    writer.expect_consumers(["hash_b"])
    side.store_position_with(writer)
    await resuming._add_subscriptions(client, side)
    assert [side.bindings[f"hash_{name}"].removed for name in "ab"] == [True, False]


@pytest.mark.sources
async def test_lowered_subscriptions_are_served_to_their_end() -> None:
    """The consumers of ended ones can go: their messages are in the position."""
    client, side = resumed()
    v5 = v5_of(client)
    v5.expiry = 60
    v5.draining = [
        Draining("lowered", "$MQTT.msgs.a", 2, 60, 5, True),
        Draining("ended", "$MQTT.msgs.a", 0, 60, 5),
        Draining("empty", "$MQTT.msgs.a", 0, 0, 5, True),
        Draining("of a former gateway", "$MQTT.msgs.a", 1, 60, 5),
    ]
    v5.options["a"] = SubscriptionOptions("a", nl=True, rap=False, id=None)
    lowered, done = resuming._add_lowered(client, side, [])
    (binding,) = lowered
    assert done == ["ended", "empty", "of a former gateway"]
    assert (binding.key, binding.since, binding.drained, binding.removed) == ("", 40, False, False)
    assert (binding.source.qos, binding.source.end, binding.source.whole) == (2, 60, True)
    assert (binding.source.no_local, binding.source.is_served) == (True, True)
    assert binding.consumer.inactive_threshold == backstop(60)
    assert list(side.bindings) == ["lowered"]


# -- the consumer of PUBREL records -------------------------------------------------------------------


class Resuming:
    """A session that is resumed while JetStream refuses to create its consumer of PUBREL records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client, self.side = resumed(a=1)
        self.owed: list[Owed] = []
        self.assignments: list[Assignment] = []
        self.asked = 0
        self.done: list[str] = []
        streams = self.client.services.streams
        self.client.services.fake_inbox.before = self._refuse
        monkeypatch.setattr(streams.pubrels, "owed", self._owed)
        monkeypatch.setattr(streams.groups, "assigned", self._assigned)
        for name in ("restore_position", "write_changed_record", "resend", "_start"):
            monkeypatch.setattr(resuming, name, self._step(name))

    def _refuse(self, subject: str) -> None:
        create = f"$JS.API.CONSUMER.DURABLE.CREATE.{OUT}.{CONSUMER_PREFIX}{self.client.hash}"
        if subject == create and self.side.has_pubrels:  # there was none to move
            self.asked += 1
            raise ApiError(400, MAXIMUM_CONSUMERS, "maximum consumers limit reached")

    async def _owed(self, client_hash: str) -> list[Owed]:
        return self.owed

    async def _assigned(self, client_hash: str) -> tuple[list[Assignment], None]:
        return self.assignments, None

    def _step(self, name: str) -> Any:
        async def step(*given: object) -> None:
            self.done.append(name)

        return step

    async def resume(self) -> None:
        async def withdraw(filters: object) -> None:
            pytest.fail("no subscription is denied")

        await resume(self.client, self.side, Resubscribed(set(), [], []), withdraw)


STEPS = ["restore_position", "write_changed_record", "resend", "_start"]


@pytest.mark.sources
@pytest.mark.parametrize(("assigned", "replays"), [(True, False), (False, True), (True, True)])
async def test_a_session_to_which_no_pubrel_is_owed_goes_on_without_their_consumer(
    monkeypatch: pytest.MonkeyPatch, assigned: bool, replays: bool
) -> None:
    """Messages that are assigned to it, or replayed, may need the consumer later: it is tried again then."""
    setup = Resuming(monkeypatch)
    setup.assignments = [Assignment(7, 1, 3, "$share/group/b")] if assigned else []
    if replays:
        v5_of(setup.client).replay["a"] = 3
    await setup.resume()
    assert (setup.asked, setup.done) == (1, STEPS)
    assert not setup.side.has_pubrels
    assert list(setup.side.bindings) == ["hash_a"]


@pytest.mark.sources
async def test_a_session_is_not_resumed_without_the_consumer_of_its_owed_pubrels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its stored records come by it."""
    setup = Resuming(monkeypatch)
    setup.owed = [Owed(7, 1, 3)]
    v5_of(setup.client).replay["a"] = 3
    with pytest.raises(ApiError, match="maximum consumers"):
        await setup.resume()
    assert (setup.asked, setup.done) == (1, STEPS[:2])


@pytest.mark.sources
async def test_a_session_that_needs_no_consumer_of_pubrels_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Resuming(monkeypatch)
    await setup.resume()
    assert (setup.asked, setup.done) == (0, STEPS)
