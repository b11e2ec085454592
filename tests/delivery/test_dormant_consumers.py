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
    remove_dormant,
    renew_dormant,
)
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_nats.sessions.record import claimed
from mqtt_streams.api import ApiError, NoResponders
from mqtt_streams.consumers import ConsumerExists, ConsumerRef, backstop
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.sessions import V5
from tests.delivery.fakes import FakeDeliveryServices, FakePositionWriter, FakeReceiver, Side
from tests.sessions.fakes import v5_of

THRESHOLD = backstop(60)


class Bench:
    """A session whose subscriptions have dormant consumers, with a position up to sequence 41."""

    def __init__(self, *names: str, times: int = 9, consumerless: bool = False, stores: bool = True) -> None:
        self.services = FakeDeliveryServices()
        self.client: Any = FakeReceiver(self.services, v5=V5(expiry=60, consumerless=consumerless))
        self.writer = FakePositionWriter(times, stores=stores)
        self.writer.ledger.reached = 41
        self.side: Any = Side(position_writer=self.writer, bindings={}, client=self.client, settle=self._settle)
        self.cons = claimed(self.client.record)[0].cons
        self.consumers = self.services.fake_inbox.consumers[MESSAGES]
        self.attached = self.services.registry.attached
        for name in names:
            self._add(name, exists=not consumerless)

    def _add(self, name: str, *, exists: bool) -> None:
        consumer = subscription_consumer("hash", name, name_nuid=name, deliver_nuid="d", max_ack_pending=9, start_seq=1)
        consumer = replace(consumer, inactive_threshold=THRESHOLD)
        binding = ConsumerBinding(name, consumer, SubscriptionState(1, 1))
        binding.begin_after(0, removed=not exists)
        self.side.bindings[consumer.durable_name] = binding
        self.cons[name] = consumer
        if exists:
            self.consumers[consumer.durable_name] = {"config": consumer.to_config()}
            self.attached[consumer.durable_name] = cast("Any", self.client)

    def _settle(self) -> None:
        for binding in self.side.bindings.values():
            binding.source.deliver_to(self.writer.ledger.reached)

    def binding(self, name: str) -> ConsumerBinding:
        return cast("ConsumerBinding", self.side.bindings[f"hash_{name}"])

    def config(self, name: str) -> dict[str, Any]:
        return cast("dict[str, Any]", self.consumers[f"hash_{name}"]["config"])

    def change(self, name: str, **settings: object) -> None:
        """Change a consumer in JetStream, as somebody else does it."""
        found = self.binding(name).consumer
        self.consumers[found.durable_name] = {"config": replace(found, **settings).to_config()}  # type: ignore[arg-type]

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


@pytest.mark.parametrize("why", ["moved", "left", "no position"])
async def test_only_the_owner_of_a_session_removes_its_consumers(why: str) -> None:
    """A later request would be one for a consumer that the next owner has created."""
    bench = Bench("a", times=0 if why == "moved" else 9)
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


async def test_a_renewal_that_fails_does_not_keep_others_from_theirs() -> None:
    bench = Bench("a", "b")
    fail(bench, "hash_a", ApiError(404, 10014, "consumer not found"))
    await renew_dormant(bench.client, bench.side)
    assert bench.config("b")["inactive_threshold"] == THRESHOLD + RENEWED_NS


# -- checking -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [THRESHOLD, THRESHOLD + RENEWED_NS], ids=["as created", "renewed"])
async def test_a_consumer_that_is_as_it_has_to_be_stays(threshold: int) -> None:
    bench = Bench("a")
    bench.change("a", inactive_threshold=threshold)
    await check_dormant(bench.client, bench.side)
    assert (bench.requests(), bench.side.kept) == (["INFO"], False)


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
    bench.change("a", inactive_threshold=5, max_ack_pending=3)
    await check_dormant(bench.client, bench.side)
    assert (bench.config("a")["inactive_threshold"], bench.config("a")["max_ack_pending"]) == (THRESHOLD, 3)
    assert bench.cons["a"].inactive_threshold == THRESHOLD


async def test_the_record_gets_the_deliver_subject_of_its_consumer() -> None:
    """Nats-server's listener has changed it, or a gateway of before."""
    bench = Bench("a")
    bench.change("a", deliver_subject="other")
    await check_dormant(bench.client, bench.side)
    assert (bench.requests(), bench.cons["a"].deliver_subject, bench.side.kept) == (["INFO"], "other", True)


@pytest.mark.parametrize("ours", [True, False])
async def test_a_consumer_of_the_listener_is_made_again(ours: bool) -> None:
    """It begins with new messages, so that it cannot be set to the position; only its owner deletes it."""
    bench = Bench("a", times=int(ours))
    bench.change("a", start_seq=None, deliver_subject="listener")
    inbox: Any = bench.services.fake_inbox
    inbox.before = lambda subject: (
        pytest.fail("it would be taken for a loss") if "DELETE" in subject and bench.attached else None
    )
    await check_dormant(bench.client, bench.side)
    assert bench.requests() == (["INFO", "DELETE", "DURABLE.CREATE"] if ours else ["INFO"])
    assert bench.config("a").get("opt_start_seq") == (42 if ours else None)
    assert bench.config("a")["deliver_subject"] == "listener"
    assert list(bench.attached) == ["hash_a"]
    assert bench.side.kept is ours
    assert bench.cons["a"].deliver_subject == ("listener" if ours else "$MQTT.sub.d")


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
