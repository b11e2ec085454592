# SPDX-License-Identifier: Apache-2.0
"""Retained messages that wait until it is known whose the session of their client is."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.backbone.pending_stores import PendingStore
from mqtt_nats.ingress.retained import deferral as withholding
from mqtt_nats.ingress.retained.deferral import consider, withhold
from mqtt_nats.ingress.retained.store import RetainedStores
from mqtt_streams.api import ApiError, NoResponders
from mqtt_streams.sessions import V5, PoisonedRecord, SessionRecord, SessionStore
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeServices, as_services

Found = tuple[SessionRecord, int] | Exception | None


class Waiting(PendingStore):
    """The store of a retained message, of a client that stands for one."""

    def __init__(self, client: object = None) -> None:
        self.client = client


class Person:
    """A client."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


@pytest.fixture(autouse=True)
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(withholding, "RetainedOp", Waiting)


class Store:
    """Notes what becomes of what is withheld."""

    def __init__(self) -> None:
        self.withheld: set[PendingStore] = set()
        self.gone: set[PendingStore] = set()
        self.dropped: set[PendingStore] = set()

    def withhold(self, op: PendingStore) -> None:
        self.withheld.add(op)

    def let_go(self, dropped: set[PendingStore]) -> None:
        self.dropped = dropped
        self.gone = self.withheld - dropped


class Bench:
    """Stores of retained messages, and a client that has one under way."""

    def __init__(self, *answers: Found, alive: bool, durable: bool) -> None:
        self.store = Store()
        self.answers = list(answers)
        self.over = self.closed = False
        self.services = FakeServices()
        self.services.nats.store = cast(AckedPublisher, self.store)
        self.services.streams.sessions = cast(SessionStore, self)
        self.stores = RetainedStores(as_services(self.services), limited=False)
        record = SessionRecord("client", v5=V5(nonce="mine"))
        self.client: Any = Person(
            services=self.services,
            client_id="client",
            hash="hash",
            alive=alive,
            durable=durable,
            epoch=2,
            taken=False,
            taken_over=self.taken_over,
            close=self.close,
            record=record,
        )
        self.op = Waiting(self.client)
        self.other = Waiting()
        """Of nobody who may be elsewhere."""
        self.stores.storing |= {self.op, self.other}

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        return self.services.tasks.fake_spawned

    def taken_over(self) -> None:
        self.over = True

    def close(self) -> None:
        self.closed = True

    async def load(self, *_: object) -> Found:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run(self) -> tuple[bool, bool]:
        """Whether it was let go, and whether it was dropped."""
        withhold(self.stores)
        assert self.store.withheld == {self.op, self.other}
        assert vars(self.stores)["withholding"] == {self.client}
        withhold(self.stores)
        assert len(self.tasks) == 1, "NATS was lost once more"
        await asyncio.gather(*self.tasks)
        assert vars(self.stores)["withholding"] is None
        assert self.other in self.store.gone
        return self.op in self.store.gone, self.op in self.store.dropped


def record(nonce: str) -> SessionRecord:
    return SessionRecord("client", v5=V5(nonce=nonce))


@pytest.mark.parametrize(
    ("found", "alive", "durable", "here"),
    [
        pytest.param((record("mine"), 2), True, True, True, id="its own"),
        pytest.param((record("mine"), 3), True, True, True, id="its own, written and not yet confirmed"),
        pytest.param((record("before"), 2), True, True, True, id="its own, being written"),
        pytest.param((record("other"), 3), True, True, False, id="moved"),
        pytest.param((record("other"), 3), False, False, False, id="moved, and its connection has ended"),
        pytest.param((SessionRecord("client"), 3), True, True, False, id="of nats-server's listener"),
        pytest.param(None, True, True, False, id="removed elsewhere"),
        pytest.param(None, True, False, False, id="regular, removed elsewhere"),
        pytest.param(None, False, True, True, id="expired"),
        pytest.param((record("before"), 1), True, True, True, id="its own, read before the last write"),
        pytest.param(ApiError(403, 1, "a test"), True, True, False, id="may not be read"),
        pytest.param(None, False, False, True, id="ended with its connection"),
        pytest.param(PoisonedRecord("no JSON"), True, True, False, id="cannot be read"),
    ],
)
async def test_whose_session_it_is(found: Found, alive: bool, durable: bool, here: bool) -> None:
    bench = Bench(found, alive=alive, durable=durable)
    assert await bench.run() == (here, not here)
    assert (bench.op in bench.stores.storing) == here, "whoever waits for what is retained goes on"
    told = isinstance(found, Exception)
    assert bench.over == (alive and not here and not told)
    assert bench.closed == told, "nobody can tell"


async def test_it_waits_until_the_record_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the connection on which it is let go: the session may have moved while NATS was lost once more."""
    monkeypatch.setattr(withholding, "RECORDS_READ_RETRY_S", 0.01)
    own = record("mine"), 2
    bench = Bench(NoResponders("a test"), own, own, alive=True, durable=True)
    bench.services.fake_link.online = False
    running = asyncio.create_task(bench.run())
    await aeventually(lambda: len(bench.answers) == 1)
    bench.services.fake_link.online, bench.services.nats.linked = True, 2.0
    assert await running == (True, False)
    assert not bench.answers


async def test_what_comes_before_its_client_is_checked_waits() -> None:
    """And whatever comes behind it; other clients' sessions are not asked for."""
    bench = Bench((record("other"), 3), alive=True, durable=True)
    bench.stores.storing.clear()
    withhold(bench.stores)
    consider(bench.stores, bench.other)
    assert not bench.store.withheld, "nobody is in doubt"
    bench.services.registry.unchecked.add(bench.client)
    behind = Waiting(Person(taken=False))
    for one in (bench.op, bench.other, behind):
        consider(bench.stores, one)
        bench.stores.storing.add(one)
    assert bench.store.withheld == {bench.op, bench.other, behind}
    await asyncio.gather(*bench.tasks)
    assert bench.store.dropped == {bench.op}
    assert bench.over
    assert not bench.answers


async def test_who_comes_into_doubt_while_another_one_is_looked_for() -> None:
    bench = Bench((record("other"), 3), (record("other"), 3), alive=True, durable=True)
    second = Waiting(Person(**vars(bench.client)))
    bench.services.registry.unchecked |= {bench.client, second.client}
    original = bench.load

    async def load(*_: object) -> Found:
        if len(bench.answers) == 2:
            bench.stores.storing.add(second)
            consider(bench.stores, second)
        return await original()

    bench.load = load  # type: ignore[method-assign]
    withhold(bench.stores)
    await asyncio.gather(*bench.tasks)
    assert bench.store.dropped == {bench.op, second}


async def test_who_was_here_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the others cannot be read: it may have moved meanwhile."""
    monkeypatch.setattr(withholding, "RECORDS_READ_RETRY_S", 0.01)
    own = record("mine"), 2
    bench = Bench(alive=True, durable=True)
    second = Waiting(Person(**vars(bench.client)))
    answers: dict[object, list[Found]] = {
        bench.client.hash: [own, (record("other"), 3)],
        "another": [NoResponders("a test"), own],
    }
    second.client.hash = "another"  # type: ignore[attr-defined]
    bench.stores.storing.add(second)

    async def load(name: str, _: object) -> Found:
        answer = answers[name].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    bench.load = load  # type: ignore[method-assign, assignment]
    withhold(bench.stores)
    await asyncio.gather(*bench.tasks)
    assert bench.store.dropped == {bench.op}


async def test_who_was_taken_over_meanwhile_is_not_here() -> None:
    bench = Bench((record("mine"), 2), alive=True, durable=True)
    bench.client.taken = True
    withhold(bench.stores)
    await asyncio.gather(*bench.tasks)
    assert bench.store.dropped == {bench.op}
