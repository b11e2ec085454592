# SPDX-License-Identifier: Apache-2.0
"""The end of a session: which timers end it, which record takes its place, and what is removed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mqtt_nats.base import server_clock as natstime
from mqtt_nats.hooks.points import SESSION_TERMINATED
from mqtt_nats.hooks.registry import Hooks
from mqtt_nats.lifecycle import expiry
from mqtt_nats.lifecycle.expiry import TIMER_POSTPONED_S, end_session, ended_record, expire, is_ended, postpone
from mqtt_nats.lifecycle.will import Wills
from mqtt_streams.api import ApiError
from mqtt_streams.hashing import name_hash
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.pubrel import CONSUMER_PREFIX
from mqtt_streams.sessions import PREFIX, V5, SessionRecord
from mqtt_streams.timers import EXPIRY, FiredTimer, timer_subject
from tests.lifecycle.fakes import FakeEndingWills

pytestmark = pytest.mark.sources

KEY = name_hash("client")
RECORD = f"{PREFIX}{KEY}"
TIMER = timer_subject(EXPIRY, KEY)
CONSUMER_OF = subscription_consumer(KEY, "a", name_nuid="n1", deliver_nuid="n2", max_ack_pending=10, start_seq=1)
CONSUMER = CONSUMER_OF.durable_name


class World:
    """A session whose connection has ended, and the gateway that has its timer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wills = FakeEndingWills()
        self.js = self.wills.services.fake_inbox
        self.quotas = self.wills.services.quotas
        self.told: list[str] = []
        self.settled: list[tuple[list[str], int, bool]] = []

        def tell(hooks: Hooks, point: object, client_id: str, epoch: int) -> None:
            assert point is SESSION_TERMINATED
            self.told.append(f"{client_id} {epoch}")

        async def settle(wills: Any, key: str, gateways: list[str], epoch: int, *, continued: bool) -> None:
            assert key == KEY
            self.settled.append((list(gateways), epoch, continued))

        monkeypatch.setattr(expiry, "session", tell)
        monkeypatch.setattr(expiry, "settle_wills", settle)

    async def write(self, v5: V5 | None = None, *, consumer: str = "") -> int:
        """Write the record, maybe with a consumer; returns its sequence."""
        record = SessionRecord("client", "gateway1", v5=v5 if v5 is not None else V5())
        if consumer:
            record.cons["a"] = CONSUMER_OF
            self.js.consumers[MESSAGES][consumer] = {"config": {}}
        return await self.wills.services.streams.sessions.save(record, expected=None)

    async def expire(self, epoch: int) -> None:
        await expire(cast("Wills", self.wills), FiredTimer(EXPIRY, KEY, epoch, 1, b"", b"client", "ack"), None)

    @property
    def records(self) -> list[str]:
        return self.js.subjects("$MQTT_sess")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_a_session_ends_at_its_deadline(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """[MQTT-3.1.2-23] (5.0): with its consumers, its will, and its place in the quota."""
    caplog.set_level("INFO", "mqtt_nats.broker")
    epoch = await world.write(V5(wills=["gateway1"]), consumer=CONSUMER)
    await world.expire(epoch)
    assert (world.records, world.js.consumers[MESSAGES]) == ([], {})
    assert world.wills.services.stream.consumers == -1
    assert world.settled == [(["gateway1"], epoch + 1, False)]
    assert world.told == [f"client {epoch}"]
    assert world.quotas.fake_forgotten == ["client"]
    assert "the session of 'client' has expired" in caplog.text


async def test_a_session_that_was_claimed_since_goes_on(world: World) -> None:
    epoch = await world.write()
    await world.write()
    await world.expire(epoch)
    assert (set(world.records), world.settled, world.told) == ({RECORD}, [], [])


async def test_a_session_that_is_claimed_at_this_moment_goes_on(world: World) -> None:
    epoch = await world.write(consumer=CONSUMER)

    def claim(subject: str) -> None:
        if subject == RECORD:
            world.js.before = lambda subject: None
            world.js.put(RECORD, b"{}")

    world.js.before = claim
    await world.expire(epoch)
    assert (world.settled, list(world.js.consumers[MESSAGES]), world.quotas.fake_forgotten) == ([], [CONSUMER], [])


async def test_a_session_that_has_ended_is_not_looked_for(world: World) -> None:
    await world.expire(7)
    assert (world.settled, world.told, world.js.subjects("$MQTT_timers")) == ([], [], [])


async def test_after_an_interruption_all_is_done_again(world: World) -> None:
    """A gateway has claimed the session, and has died before it removed all of it. Hooks are told again."""
    epoch = await world.write(V5(wills=["gateway1"]), consumer=CONSUMER)

    def die(subject: str) -> None:
        if ".CONSUMER.DELETE." in subject:
            raise ApiError(503, 10008, "a test")

    world.js.before = die
    with pytest.raises(ApiError):
        await world.expire(epoch)
    assert world.records == [RECORD]
    world.js.before = lambda subject: None
    await world.expire(epoch)
    assert (world.records, world.js.consumers[MESSAGES]) == ([], {})
    assert world.told == [f"client {epoch}"] * 2
    assert [found[1] for found in world.settled] == [epoch + 1] * 2


async def test_a_record_that_is_removed_by_another_gateway_counts_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = await world.write()
    removed = world.wills.services.streams.sessions.delete

    async def first(key: str, sequence: int) -> bool:
        await removed(key, sequence)
        return await removed(key, sequence)

    monkeypatch.setattr(world.wills.services.streams.sessions, "delete", first)
    await world.expire(epoch)
    assert (world.records, world.quotas.fake_forgotten) == ([], [])


async def test_a_record_of_a_newer_gateway_is_left_to_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timer fires again, for whoever can read the record."""
    monkeypatch.setattr(natstime, "now", lambda: 2e9 - TIMER_POSTPONED_S)
    epoch = await world.write(V5(extra={"version": 10_000}))
    await world.expire(epoch)
    assert (world.records, world.settled) == ([RECORD], [])
    (timer,) = world.js.messages["$MQTT_timers"]
    assert (timer.subject, timer.payload) == (TIMER, b"client")
    assert b"Nats-Schedule:@at 2033-05-18T03:33:20" in timer.headers
    assert b"Nmqtt-Epoch:%d\r\n" % epoch in timer.headers


async def test_a_timer_that_was_set_since_is_not_replaced(world: World) -> None:
    world.js.put(TIMER, b"of the later owner")
    timer = FiredTimer(EXPIRY, KEY, 7, 1, b"", b"client", "ack")
    await postpone(cast("Wills", world.wills), timer)
    assert [one.payload for one in world.js.messages["$MQTT_timers"]] == [b"of the later owner"]


async def test_a_timer_that_jetstream_does_not_store_fires_again_by_itself(world: World) -> None:
    def refuse(subject: str) -> None:
        if subject == TIMER:
            raise ApiError(503, 10023, "insufficient resources")

    world.js.before = refuse
    with pytest.raises(ApiError, match="insufficient resources"):
        await postpone(cast("Wills", world.wills), FiredTimer(EXPIRY, KEY, 7, 1, b"", b"", "ack"))


async def test_a_record_that_cannot_be_read_is_left_alone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    sequence = world.js.put(RECORD, b"no JSON")
    await world.expire(sequence)
    assert world.records == [RECORD]
    assert "a session whose deadline has passed cannot be read" in caplog.text


@pytest.mark.parametrize("claimed", [False, True])
async def test_an_administrator_ends_a_session_that_is_as_it_was_read(world: World, claimed: bool) -> None:
    epoch = await world.write(consumer=CONSUMER)
    found = await world.wills.services.streams.sessions.load(KEY)
    assert found is not None
    if claimed:
        await world.write()
    assert await end_session(cast("Wills", world.wills), found[0], epoch) is not claimed
    assert (world.records == []) is not claimed


def test_the_record_that_takes_its_place_names_what_is_to_be_removed() -> None:
    """A client that connects meanwhile gets a new session, and finds what the ended one has left."""
    v5 = V5(expiry=100, wills=["gateway1"], leaving=["$share/g/a"], pos="records", user="ann", quota="q")
    record = SessionRecord("client", "gateway1", v5=v5, key=KEY)
    record.cons["a"] = CONSUMER_OF
    ended = ended_record(record, "gateway0", 7)
    assert (ended.client_id, ended.key, ended.clean, ended.cons, ended.subs) == ("client", KEY, True, {}, {})
    assert ended.v5 is not None
    assert (ended.v5.kind, ended.v5.expiry) == ("regular", 0)
    assert (ended.v5.wills, ended.v5.leaving, ended.v5.pos) == (["gateway1"], ["$share/g/a"], "records")
    assert (ended.v5.user, ended.v5.quota) == ("ann", "q")
    assert [one.name for one in ended.v5.draining] == [CONSUMER, f"{CONSUMER_PREFIX}{KEY}"]
    assert (is_ended(ended), is_ended(record)) == (True, False)


def test_a_record_of_nats_servers_listener_ends_too() -> None:
    record = SessionRecord("client")
    assert record.v5 is None
    assert not is_ended(record)
    ended = ended_record(record, "gateway0", 7)
    assert is_ended(ended)


async def test_who_waits_for_the_end_sees_it_from_hooks_once(world: World) -> None:
    """A record of a session that ends with its connection was told by its gateway."""
    epoch = await world.write(V5(kind="regular", expiry=0))
    await world.expire(epoch)
    assert (world.records, world.told) == ([], [])
