# SPDX-License-Identifier: Apache-2.0
"""Gateways ask each other whether the stores have ended that were under way when the question came."""

from __future__ import annotations

import asyncio

import pytest

from mqtt_nats.backbone import store_barrier as module
from mqtt_nats.backbone.store_barrier import StoreBarrier
from mqtt_streams.api import RequestTimeout
from mqtt_streams.gateway_subjects import SETTLE
from tests.sessions.fakes import FakeServices, as_tasks

NO_RESPONDERS = b"NATS/1.0 503\r\n\r\n"


class Gateway:
    """One gateway: its connection, its stores, and its questions."""

    def __init__(self, bus: Bus) -> None:
        self.services = FakeServices()
        self.link, self.store = self.services.fake_link, self.services.fake_store
        self.store_barrier = StoreBarrier(self.services.nats, as_tasks(self.services.tasks))
        self.connected = True
        bus.gateways.append(self)

    def stores(self, oldest: int, count: int) -> None:
        """Have messages under way from the token ``oldest`` on (0 = none), and so many stores begun."""
        self.store.fake_oldest, self.store.count = oldest, count


class Bus:
    """NATS between gateways: brings what one publishes to the others that have subscribed it."""

    def __init__(self) -> None:
        self.gateways: list[Gateway] = []
        self.published: list[bytes] = []

    def turn(self) -> None:
        """Bring everything that was published."""
        for sender in self.gateways:
            while sender.link.out:
                head, payload, _ = sender.link.out.pop(0).split(b"\r\n")
                _, subject, *reply, _ = head.split(b" ")
                self.published.append(subject)
                if not sender.connected:
                    continue
                heard = [self._bring(one, subject, reply, payload) for one in self.gateways if one is not sender]
                if reply and reply[0].startswith(b"$MQTT.inbox.") and not any(heard):
                    self._call(sender, reply[0], NO_RESPONDERS)

    def _bring(self, one: Gateway, subject: bytes, reply: list[bytes], payload: bytes) -> bool:
        if not one.connected:
            return False
        found = False
        for sid, pattern in list(one.link.fake_subjects.items()):
            if pattern == subject or (pattern.endswith(b"*") and subject.startswith(pattern[:-1])):
                one.link.handlers[sid](subject, reply[0] if reply else b"", b"", payload)
                found = True
        return found

    def _call(self, one: Gateway, subject: bytes, headers: bytes) -> None:
        for sid, pattern in list(one.link.fake_subjects.items()):
            if pattern.endswith(b"*") and subject.startswith(pattern[:-1]):
                one.link.handlers[sid](subject, b"", headers, b"")


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Bus:
    for name in (
        "UNKNOWN_GATEWAYS_WAIT_S",
        "QUESTION_REPEAT_S",
        "LISTEN",
        "BARRIER_TIMEOUT",
        "GATEWAY_SILENT_S",
        "GATEWAY_SIGN_S",
    ):
        monkeypatch.setattr(module, name, getattr(module, name) / 10)
    monkeypatch.setattr(module, "STORES_POLL_S", 0.002)
    return Bus()


async def asked(bus: Bus, gateway: Gateway) -> asyncio.Task[None]:
    """The gateway asks; the question has come to the others."""
    task = asyncio.get_running_loop().create_task(gateway.store_barrier.settled())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    bus.turn()
    bus.turn()
    return task


async def ended(bus: Bus, task: asyncio.Task[None], seconds: float = 5.0) -> None:
    """Bring messages until the question is answered."""
    async with asyncio.timeout(seconds):
        while not task.done():
            bus.turn()
            await asyncio.sleep(0.001)
    await task


async def goes_on(bus: Bus, task: asyncio.Task[None], seconds: float = 0.05) -> bool:
    """Whether the question is still open after a while."""
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        bus.turn()
        await asyncio.sleep(0.001)
    return not task.done()


async def test_a_gateway_that_is_alone_has_nothing_to_wait_for(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNKNOWN_GATEWAYS_WAIT_S", 1000.0)
    await ended(bus, await asked(bus, Gateway(bus)))


async def test_it_waits_for_its_own_stores(bus: Bus) -> None:
    gateway = Gateway(bus)
    gateway.stores(3, 5)
    task = await asked(bus, gateway)
    gateway.stores(5, 8)
    assert await goes_on(bus, task)
    gateway.stores(6, 9)  # a later one
    await ended(bus, task)


async def test_it_waits_for_the_stores_of_others(bus: Bus) -> None:
    """Not for those that were begun after the question."""
    one, other, third = Gateway(bus), Gateway(bus), Gateway(bus)
    other.stores(7, 9)
    task = await asked(bus, one)
    other.stores(9, 20)
    assert await goes_on(bus, task)
    other.stores(10, 20)
    await ended(bus, task)
    assert len(one.store_barrier.known) == 2
    assert len(third.store_barrier.known) == 1


async def test_a_store_that_does_not_end_has_the_caller_ask_again(bus: Bus) -> None:
    """The gateway that stores says so all the time, so that it does not count as gone."""
    one, other = Gateway(bus), Gateway(bus)
    other.stores(1, 1)
    with pytest.raises(RequestTimeout, match="1 other gateways are storing"):
        await ended(bus, await asked(bus, one))
    other.stores(0, 1)
    await ended(bus, await asked(bus, one))


async def test_a_gateway_that_has_gone_is_not_waited_for(bus: Bus) -> None:
    one, other = Gateway(bus), Gateway(bus)
    other.stores(1, 1)
    task = await asked(bus, one)
    other.connected = False
    await ended(bus, task)


async def test_a_known_gateway_that_is_connecting_is_asked_again(bus: Bus) -> None:
    """Nobody hears the question, and it is there a moment later: its messages are on their way all the same."""
    one, other = Gateway(bus), Gateway(bus)
    await ended(bus, await asked(bus, one))
    other.connected = False
    other.stores(1, 1)
    task = await asked(bus, one)
    assert await goes_on(bus, task)
    other.connected = True
    assert await goes_on(bus, task, module.LISTEN * 1.4)
    other.stores(0, 1)
    await ended(bus, task)


async def test_a_gateway_that_has_connected_is_there_before_anything_else_is_sent(bus: Bus) -> None:
    """Others know it from then on."""
    one, other = Gateway(bus), Gateway(bus)
    (wired,) = other.link.fake_wired
    wired(False)
    assert (other.link.out, other.link.fake_renewed) == ([], [])
    wired(True)
    assert [subject for _, subject in other.link.fake_renewed][1:] == [SETTLE]
    bus.turn()
    assert len(one.store_barrier.known) == 1


async def test_a_known_gateway_has_more_time_than_others(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is awaited; if it does not come, the next question is answered without it."""
    one, other = Gateway(bus), Gateway(bus)
    Gateway(bus)
    await ended(bus, await asked(bus, other))
    assert len(one.store_barrier.known) == 1
    other.connected = False
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await ended(bus, await asked(bus, one))
    assert loop.time() - begun >= module.LISTEN
    assert len(one.store_barrier.known) == 1, "the third gateway, which has answered"
    begun = loop.time()
    await ended(bus, await asked(bus, one))
    assert loop.time() - begun < module.LISTEN
    (sid,) = (sid for sid, pattern in one.link.fake_subjects.items() if pattern.endswith(b"*"))
    one.link.handlers[sid](one.link.fake_subjects[sid][:-1] + b"1", b"", b"", b"+late")
    assert b"late" in one.store_barrier.known, "it was slow"


async def test_a_lost_connection_is_no_answer(bus: Bus) -> None:
    one = Gateway(bus)
    Gateway(bus)
    task = await asked(bus, one)
    one.link.wire = object()
    with pytest.raises(RequestTimeout, match="connection"):
        await ended(bus, task)


async def test_gateways_introduce_themselves(bus: Bus) -> None:
    one, other = Gateway(bus), Gateway(bus)
    task = asyncio.get_running_loop().create_task(other.store_barrier.introduce())
    await ended(bus, task)
    assert (len(one.store_barrier.known), len(other.store_barrier.known)) == (1, 1)
    one.stores(1, 1)
    await ended(bus, asyncio.get_running_loop().create_task(other.store_barrier.introduce()))


async def test_what_is_remembered_is_limited(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED_MOST", 2)
    gateway = Gateway(bus)
    gateway.stores(1, 1)
    sid = next(sid for sid, subject in gateway.link.fake_subjects.items() if subject == SETTLE)
    for number in range(5):
        gateway.link.handlers[sid](SETTLE, b"reply%d" % number, b"", b"gateway%d" % number)
    assert (len(gateway.store_barrier.known), gateway.store_barrier.dropped) == (2, 3)
    gateway.link.handlers[sid](SETTLE, b"", b"", b"gateway0")  # nobody waits for an answer
    gateway.stores(0, 1)
    async with asyncio.timeout(5):
        await gateway.services.tasks.fake_settle()
