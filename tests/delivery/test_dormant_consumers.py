# SPDX-License-Identifier: Apache-2.0
"""Dormant consumers: removed, created, renewed and checked, while the position alone decides what is delivered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from mqtt_nats.delivery import dormant_consumers as dormancy
from mqtt_nats.delivery.dormant_consumers import (
    RENEWED_NS,
    check_dormant,
    create_dormant,
    first_incomplete,
    follow_position,
    remove_dormant,
    renew_dormant,
    set_consumers,
)
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.position import SessionPosition
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_nats.sessions.record import claimed
from mqtt_streams.api import ApiError, NoResponders
from mqtt_streams.consumers import ConsumerExists, ConsumerRef, backstop, describe
from mqtt_streams.error_codes import CONSUMER_ALREADY_EXISTS, CONSUMER_NAME_EXISTS
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.sessions import V5
from tests.delivery.fakes import FakeDeliveryServices, FakePositionWriter, FakeReceiver, Side
from tests.sessions.fakes import v5_of

THRESHOLD = backstop(60)

IN_USE = [ApiError(400, CONSUMER_NAME_EXISTS, "in use"), ApiError(400, CONSUMER_ALREADY_EXISTS, "exists")]
"""Refusals of a change: `DeliverSubjectBusy` and `ConsumerExists`."""


class Bench:
    """A session whose subscriptions have dormant consumers, with a position up to sequence 41."""

    def __init__(self, *names: str, consumerless: bool = False, stores: bool = True) -> None:
        self.services = FakeDeliveryServices()
        self.client: Any = FakeReceiver(self.services, v5=V5(expiry=60, consumerless=consumerless))
        self.writer = FakePositionWriter(stores=stores)
        self.writer.ledger.reached = 41
        self.side: Any = Side(position_writer=self.writer, bindings={}, client=self.client, settle=self._settle)
        self.cons = claimed(self.client.record)[0].cons
        self.consumers = self.services.fake_inbox.consumers[MESSAGES]
        self.attached = self.services.registry.attached
        for name in names:
            self._add(name, exists=not consumerless)

    def _add(self, name: str, *, exists: bool) -> None:
        consumer = subscription_consumer("hash", name, name_nuid=name, deliver_nuid="d", max_ack_pending=9, start_seq=1)
        consumer = replace(consumer, inactive_threshold=THRESHOLD, client_id=self.client.client_id)
        binding = ConsumerBinding(name, consumer, SubscriptionState(1, 1))
        binding.begin_after(0, removed=not exists)
        self.side.bindings[consumer.durable_name] = binding
        self.cons[name] = consumer
        if exists:
            self._put(consumer)
            self.attached[consumer.durable_name] = cast("Any", self.client)

    def _put(self, consumer: ConsumerRef, **settings: object) -> None:
        described = {"description": describe(self.client.client_id, consumer.filter_subject)}
        self.consumers[consumer.durable_name] = {"config": consumer.to_config() | described | settings}

    def _settle(self) -> None:
        for binding in self.side.bindings.values():
            binding.source.deliver_to(self.writer.ledger.reached)

    def binding(self, name: str) -> ConsumerBinding:
        return cast("ConsumerBinding", self.side.bindings[f"hash_{name}"])

    def config(self, name: str) -> dict[str, Any]:
        return cast("dict[str, Any]", self.consumers[f"hash_{name}"]["config"])

    def change(self, name: str, **settings: object) -> None:
        """Change the configuration of a consumer in JetStream, as somebody else does it."""
        self._put(self.binding(name).consumer, **settings)

    def positions(self) -> dict[str, int]:
        """Stream sequences to which consumers were set, by name."""
        return {name: one["delivered"]["stream_seq"] + 1 for name, one in self.consumers.items() if "delivered" in one}

    def requests(self) -> list[str]:
        """Kinds of the requests that were made."""
        return [one.removeprefix("$JS.API.CONSUMER.").split(".$")[0] for one in self.services.fake_inbox.asked]


def fail(bench: Bench, kind: str, error: Exception) -> None:
    """Have JetStream refuse, or not answer, requests of a kind."""

    def before(subject: str) -> None:
        if kind in subject:
            raise error

    bench.services.fake_inbox.before = before


# -- removing -----------------------------------------------------------------------------------------


async def test_consumers_are_removed() -> None:
    """Nobody takes their deletion for a loss."""
    bench = Bench("a", "b")
    bench.writer.present = {"hash_a", "hash_b"}
    bench.services.fake_inbox.before = lambda subject: (
        pytest.fail("it would be created again") if bench.attached else None
    )
    await remove_dormant(bench.client, bench.side)
    assert (bench.consumers, bench.attached, bench.writer.present) == ({}, {}, set())
    assert [one.removed for one in bench.side.bindings.values()] == [True, True]


@pytest.mark.parametrize("why", ["left", "no position"])
async def test_only_the_owner_of_a_session_removes_its_consumers(why: str) -> None:
    """A later request would be one for a consumer that the next owner has created."""
    bench = Bench("a")
    bench.client.alive = why != "left"
    if why == "no position":
        bench.side.position_writer = None
    await remove_dormant(bench.client, bench.side)
    assert list(bench.consumers) == list(bench.attached) == ["hash_a"]
    assert not bench.binding("a").removed


async def test_consumers_that_may_stay() -> None:
    """The position names them, so that the next gateway removes them."""
    bench = Bench("a")
    bench.writer.present = {"hash_a"}
    fail(bench, "CONSUMER.DELETE", NoResponders("no leader"))
    await remove_dormant(bench.client, bench.side)
    assert (bench.writer.present, bench.binding("a").removed) == ({"hash_a"}, True)


# -- renewing -----------------------------------------------------------------------------------------


async def test_a_renewal_changes_a_consumer_each_time() -> None:
    """An update that changes nothing would not count as a use."""
    bench = Bench("a", "b")
    bench.binding("b").remove()
    for expected in (THRESHOLD + RENEWED_NS, THRESHOLD, THRESHOLD + RENEWED_NS):
        await renew_dormant(bench.client, bench.side)
        assert bench.config("a")["inactive_threshold"] == expected
        assert bench.binding("a").consumer.inactive_threshold == expected
    assert bench.config("b")["inactive_threshold"] == THRESHOLD, "it was removed"


async def test_consumers_that_never_expire_need_no_renewal() -> None:
    bench = Bench("a")
    v5_of(bench.client).expiry = None
    await renew_dormant(bench.client, bench.side)
    assert bench.requests() == []


@pytest.mark.parametrize("error", [ApiError(404, 10014, "consumer not found"), *IN_USE])
async def test_a_renewal_that_fails_does_not_keep_others_from_theirs(error: ApiError) -> None:
    bench = Bench("a", "b")
    fail(bench, "hash_a", error)
    await renew_dormant(bench.client, bench.side)
    assert bench.config("b")["inactive_threshold"] == THRESHOLD + RENEWED_NS


# -- checking -----------------------------------------------------------------------------------------


async def test_a_consumer_that_is_as_it_has_to_be_stays() -> None:
    bench = Bench("a")
    await check_dormant(bench.client, bench.side)
    assert (bench.requests(), bench.side.kept) == (["INFO"], False)


async def test_a_consumer_that_was_renewed_stays() -> None:
    """The record names its threshold from then on."""
    bench = Bench("a")
    bench.change("a", inactive_threshold=THRESHOLD + RENEWED_NS)
    await check_dormant(bench.client, bench.side)
    assert (bench.requests(), bench.side.kept) == (["INFO"], True)
    assert bench.cons["a"].inactive_threshold == THRESHOLD + RENEWED_NS


@pytest.mark.parametrize(("pending", "start", "begin"), [([], 1, 42), ([7, 9], 1, 7), ([], 50, 50), ([7], 50, 50)])
async def test_a_consumer_that_is_gone_is_created_where_the_position_is(
    pending: list[int], start: int, begin: int
) -> None:
    """Nothing that is complete comes again at nats-server's listener, and nothing is lost there."""
    bench = Bench("a")
    for sequence in pending:
        bench.writer.ledger.add_pending(sequence, 1)
    bench.binding("a").source.start = start
    del bench.consumers["hash_a"]
    await check_dormant(bench.client, bench.side)
    assert bench.config("a")["opt_start_seq"] == begin
    assert (bench.cons["a"].start_seq, bench.binding("a").consumer.start_seq) == (begin, begin)
    assert bench.side.kept, "nats-server's listener needs the record"


async def test_a_consumer_gets_the_present_expiry_of_its_session() -> None:
    bench = Bench("a")
    bench.change("a", inactive_threshold=5)
    await check_dormant(bench.client, bench.side)
    assert bench.requests() == ["INFO", "DURABLE.CREATE"]
    assert (bench.config("a")["inactive_threshold"], bench.cons["a"].inactive_threshold) == (THRESHOLD, THRESHOLD)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("ack_wait", 1), ("filter_subject", "$MQTT.msgs.other"), ("description", "somebody's")],
)
async def test_a_consumer_that_somebody_has_edited_is_put_right(setting: str, value: object) -> None:
    """What was edited does not reach the session's record."""
    bench = Bench("a")
    right, named = bench.config("a"), bench.cons["a"]
    bench.change("a", **{setting: value})
    await check_dormant(bench.client, bench.side)
    assert bench.requests() == ["INFO", "DURABLE.CREATE"]
    assert bench.config("a").get(setting) == right.get(setting)
    assert (bench.cons["a"], bench.side.kept) == (named, False)


async def test_the_bound_of_an_account_is_no_edit() -> None:
    """JetStream may allow a consumer fewer unacknowledged messages than the session asks for."""
    bench = Bench("a")
    bench.change("a", max_ack_pending=3)
    await check_dormant(bench.client, bench.side)
    assert (bench.requests(), bench.side.kept) == (["INFO"], False)


async def test_the_record_gets_the_deliver_subject_of_its_consumer() -> None:
    """Nats-server's listener has changed it, or a gateway of before."""
    bench = Bench("a")
    bench.change("a", deliver_subject="$MQTT.sub.other")
    await check_dormant(bench.client, bench.side)
    assert (bench.requests(), bench.side.kept) == (["INFO"], True)
    assert bench.cons["a"].deliver_subject == bench.binding("a").consumer.deliver_subject == "$MQTT.sub.other"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("opt_start_seq", None),
        ("opt_start_seq", 43),
        ("deliver_subject", ""),
        ("deliver_subject", "other"),
        ("deliver_subject", "$MQTT.sub.*"),
    ],
    ids=["as the listener makes them", "begins later", "pull", "foreign subject", "wildcard"],
)
async def test_a_consumer_that_cannot_be_set_is_made_again(setting: str, value: object) -> None:
    """Or that delivers to a subject that is not of a client."""
    bench = Bench("a")
    bench.change("a", **{setting: value})
    inbox: Any = bench.services.fake_inbox
    inbox.before = lambda subject: (
        pytest.fail("it would be taken for a loss") if "DELETE" in subject and bench.attached else None
    )
    await check_dormant(bench.client, bench.side)
    assert bench.requests() == ["INFO", "DELETE", "DURABLE.CREATE"]
    assert (bench.config("a")["opt_start_seq"], bench.cons["a"].start_seq) == (42, 42)
    assert bench.config("a")["deliver_subject"] == bench.cons["a"].deliver_subject == "$MQTT.sub.d"
    assert (list(bench.attached), bench.side.kept) == (["hash_a"], True)


@pytest.mark.parametrize("error", IN_USE)
async def test_a_consumer_that_is_not_put_right_does_not_keep_others_from_it(error: ApiError) -> None:
    bench = Bench("a", "b")
    named = bench.cons["a"]
    for name in "ab":
        bench.change(name, ack_wait=1)
    fail(bench, "CREATE.$MQTT_msgs.hash_a", error)
    await check_dormant(bench.client, bench.side)
    assert [bench.config(name)["ack_wait"] for name in "ab"] == [1, bench.cons["b"].ack_wait]
    assert (bench.cons["a"], bench.binding("a").consumer) == (named, named)


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        ("DELETE", NoResponders("no leader")),
        ("CREATE", NoResponders("no leader")),
        ("CREATE", ApiError(400, CONSUMER_ALREADY_EXISTS, "exists")),
    ],
)
async def test_a_consumer_that_is_not_made_again_stays_attached(refused: str, error: Exception) -> None:
    """Its loss is noticed later."""
    bench = Bench("a")
    bench.change("a", opt_start_seq=None)
    fail(bench, refused, error)
    await check_dormant(bench.client, bench.side)
    assert list(bench.attached) == ["hash_a"]


async def test_where_jetstream_allows_few_consumers_readers_have_their_places() -> None:
    """One that exists stays."""
    bench = Bench("a", "b")
    del bench.consumers["hash_a"]
    bench.services.stream.crowded = True
    await check_dormant(bench.client, bench.side)
    assert (bench.requests(), list(bench.consumers), bench.side.kept) == (["INFO", "INFO"], ["hash_b"], False)


@pytest.mark.parametrize("why", ["left", "removed", "ended"])
async def test_what_is_not_checked(why: str) -> None:
    bench = Bench("a")
    if why == "left":
        bench.client.alive = False
    elif why == "removed":
        bench.binding("a").remove()
    else:
        binding = bench.binding("a")
        bench.side.bindings = Gone(bench.side.bindings)
        assert bench.side.bindings.get(binding.consumer.durable_name) is None
    await check_dormant(bench.client, bench.side)
    assert bench.requests() == []


class Gone(dict[str, ConsumerBinding]):
    """Subscriptions that end while they are checked."""

    def get(self, key: str, default: Any = None) -> Any:
        return default


async def test_a_consumer_that_somebody_else_has_created_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another configuration: a restore from a backup, say."""
    bench = Bench("a")
    del bench.consumers["hash_a"]

    async def create(inbox: object, stream: str, consumer: ConsumerRef) -> None:
        raise ConsumerExists(consumer.durable_name)

    monkeypatch.setattr(dormancy, "create_consumer", create)
    await check_dormant(bench.client, bench.side)
    assert bench.side.kept


# -- creating -----------------------------------------------------------------------------------------


async def test_consumers_of_a_session_without_are_created() -> None:
    """The position names them first: this gateway may die before the record says that they exist."""
    bench = Bench("a", "b", consumerless=True)
    inbox: Any = bench.services.fake_inbox
    inbox.before = lambda subject: (
        None if bench.writer.fake_written else pytest.fail("the position does not name it yet")
    )
    assert await create_dormant(bench.client, bench.side)
    assert bench.writer.fake_written == [{"hash_a", "hash_b"}]
    assert {name: one["config"]["opt_start_seq"] for name, one in bench.consumers.items()} == {
        "hash_a": 42,
        "hash_b": 42,
    }
    assert [one.removed for one in bench.side.bindings.values()] == [False, False]
    assert set(bench.attached) == {"hash_a", "hash_b"}
    assert (v5_of(bench.client).consumerless, bench.side.kept) == (False, True)


async def test_a_session_that_has_consumers_again_says_so_in_its_record() -> None:
    """Also where all of its subscriptions were lowered, so that the record names no consumer."""
    bench = Bench("a", consumerless=True)
    bench.cons.clear()
    assert await create_dormant(bench.client, bench.side)
    assert bench.side.kept


async def test_a_session_that_has_moved_gets_no_consumers() -> None:
    bench = Bench("a", consumerless=True, stores=False)
    assert not await create_dormant(bench.client, bench.side)
    assert (bench.consumers, bench.writer.fake_left) == ({}, True)
    assert v5_of(bench.client).consumerless


async def test_a_client_that_leaves_while_its_consumers_are_created() -> None:
    """The record does not say that they exist: the position does, and the next gateway removes them."""
    bench = Bench("a", consumerless=True)

    def leave(subject: str) -> None:
        bench.client.alive = "CREATE" not in subject

    bench.services.fake_inbox.after = leave
    assert not await create_dormant(bench.client, bench.side)
    assert (v5_of(bench.client).consumerless, bench.binding("a").removed) == (True, True)
    assert (bench.attached, bench.writer.present) == ({}, {"hash_a"})


# -- the position of the session ------------------------------------------------------------------------


@pytest.mark.parametrize(("pending", "first"), [([], 42), ([9, 7], 7), ([50], 42)])
def test_the_first_message_that_the_client_has_not_completed(pending: list[int], first: int) -> None:
    """A message after the position may be pending already: those between may not have come."""
    position = SessionPosition()
    position.reach(41)
    for sequence in pending:
        position.pending[sequence] = 1
    assert first_incomplete(position) == first


async def test_consumers_are_set_to_the_position() -> None:
    """A subscription that begins later shows nothing from before."""
    bench = Bench("a", "b")
    await set_consumers(bench.services.fake_inbox, [("hash_a", 1), ("hash_b", 9)], 7)
    assert bench.positions() == {"hash_a": 7, "hash_b": 9}


@pytest.mark.parametrize("why", ["gone", "refused"])
async def test_a_consumer_that_is_not_set_does_not_keep_others_from_it(why: str) -> None:
    """nats-server does not answer for one that is gone."""
    bench = Bench("a", "b")
    if why == "gone":
        del bench.consumers["hash_a"]
    else:
        fail(bench, "RESET.$MQTT_msgs.hash_a", ApiError(400, 10204, "invalid reset"))
    await set_consumers(bench.services.fake_inbox, [("hash_a", 1), ("hash_b", 1)], 7)
    assert bench.positions() == {"hash_b": 7}


async def test_nobody_sets_consumers_where_jetstream_does_not_answer() -> None:
    bench = Bench("a")
    fail(bench, "RESET", NoResponders("no leader"))
    with pytest.raises(NoResponders):
        await set_consumers(bench.services.fake_inbox, [("hash_a", 1)], 7)


async def test_consumers_follow_the_position_of_a_connected_client() -> None:
    """Those that exist: of a removed one nothing is asked."""
    bench = Bench("a", "b", "c")
    bench.binding("b").remove()
    bench.binding("c").source.start = 9
    await follow_position(bench.client, bench.side, 7)
    assert bench.positions() == {"hash_a": 7, "hash_c": 9}
    assert bench.requests() == ["RESET", "RESET"]


@pytest.mark.parametrize("why", ["left", "taken"])
async def test_consumers_of_the_next_owner_follow_nobody_else(why: str) -> None:
    bench = Bench("a")
    bench.client.alive, bench.client.taken = why != "left", why == "taken"
    await follow_position(bench.client, bench.side, 7)
    assert bench.requests() == []


async def test_a_client_that_leaves_while_its_consumers_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were not asked for yet are the next owner's."""
    bench = Bench("a", "b", "c")
    monkeypatch.setattr(dormancy, "parts", lambda some: [some[:2], some[2:]])

    def leave(subject: str) -> None:
        bench.client.alive = False

    bench.services.fake_inbox.after = leave
    await follow_position(bench.client, bench.side, 7)
    assert set(bench.positions()) == {"hash_a", "hash_b"}


async def test_a_client_stays_when_its_consumers_cannot_follow() -> None:
    bench = Bench("a")
    fail(bench, "RESET", NoResponders("no leader"))
    await follow_position(bench.client, bench.side, 7)
    assert (bench.positions(), bench.client.fake_ended) == ({}, [])
