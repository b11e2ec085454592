# SPDX-License-Identifier: Apache-2.0
"""A consumer whose subscription was lowered to QoS 0: its gates, and waiting until it reports that it has no more."""

from __future__ import annotations

import asyncio

import pytest

from mqtt_nats.messages.message import Stored
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.pubsub.backlog import Gate
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.consumers import ConsumerRef
from tests.harness.doubles import stands_for

LONG = 30.0  # seconds that no test waits


@stands_for(Gate)
class FakeGate:
    """Stands for `Gate`: counts how many wait for it to open, and notes what is discarded."""

    def __init__(self) -> None:
        self.fake_held = 0
        self.fake_discarded: list[bytes | None] = []

    def hold(self) -> None:
        self.fake_held += 1

    def discard(self, known: bytes | None) -> None:
        self.fake_discarded.append(known)


def binding() -> ConsumerBinding:
    return ConsumerBinding("key", ConsumerRef("name", "deliver", "filter", 10), SubscriptionState(1, 0, 10))


def lowered(*gates: FakeGate) -> ConsumerBinding:
    found = binding()
    found.lowered(list(gates))  # type: ignore[arg-type]
    return found


def test_a_new_binding_has_nothing_to_wait_for() -> None:
    found = binding()
    assert (found.drained, found.through, found.missed, found.since, found.gates) == (True, False, False, 0, [])


@pytest.mark.sources
def test_a_lowered_subscription_has_no_key_in_the_record_and_holds_its_gates() -> None:
    one, other = FakeGate(), FakeGate()
    found = lowered(one, other)
    assert (found.key, one.fake_held, other.fake_held) == ("", 1, 1)


@pytest.mark.sources
def test_what_the_consumer_brings_is_taken_out_of_the_gates() -> None:
    """By the id of the message, which core NATS may have brought before."""
    gate = FakeGate()
    found = lowered(gate)
    found.brings(Stored("a", b"", b"", 1, 1, False, b"", b"NATS/1.0\r\nNmqtt-Id:abc\r\n\r\n"))
    assert gate.fake_discarded == [b"abc"]


@pytest.mark.sources
def test_released_gates_are_not_held_again() -> None:
    gate = FakeGate()
    found = lowered(gate)
    assert len(found.release()) == 1
    assert found.release() == []


async def test_waiting_ends_when_the_consumer_has_no_more() -> None:
    found = lowered()
    waiting = asyncio.create_task(found.rest(LONG))
    await asyncio.sleep(0)
    assert not waiting.done()
    found.emptied()
    await asyncio.wait_for(waiting, 5)


async def test_a_report_from_before_does_not_end_the_next_wait() -> None:
    found = lowered()
    found.emptied()
    await asyncio.wait_for(found.rest(LONG), 5)
    waiting = asyncio.create_task(found.rest(LONG))
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_waiting_has_an_end() -> None:
    await asyncio.wait_for(lowered().rest(0.0), 5)
    found = binding()
    found.emptied()  # of a subscription that was not lowered: nobody waits for it
    await asyncio.wait_for(found.rest(0.0), 5)
