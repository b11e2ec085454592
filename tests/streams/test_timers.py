# SPDX-License-Identifier: Apache-2.0
"""Timers kept by a real server."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from mqtt_streams import headers
from mqtt_streams.api import NoResponders, Reply, RequestTimeout, call
from mqtt_streams.definitions import ensure_streams
from mqtt_streams.timers import (
    CONSUMER,
    EXPIRY,
    FIRED_PREFIX,
    STREAM,
    TimerStore,
    schedule_block,
    timer_subject,
)
from tests.streams.support import NatsPyJetStream, StreamsServer, eventually


async def store_of(js: NatsPyJetStream) -> TimerStore:
    await ensure_streams(js)
    store = TimerStore(js)
    await store.ensure_consumer()
    await store.ensure_consumer()
    return store


def test_schedule_block() -> None:
    block = schedule_block(EXPIRY, "A4a1Bsn5", 1_800_000_000.5, 17, [("Nmqtt-Client", "a%20b")])
    assert timer_subject(EXPIRY, "A4a1Bsn5") == "$MQTT.timers.expiry.A4a1Bsn5"
    assert headers.parse(block) == [
        ("Nats-Schedule", "@at 2027-01-15T08:00:00.500000Z"),
        ("Nats-Schedule-Target", "$MQTT.timers.fired.expiry.A4a1Bsn5"),
        ("Nmqtt-Epoch", "17"),
        ("Nmqtt-Client", "a%20b"),
    ]
    assert headers.parse(schedule_block(EXPIRY, "A4a1Bsn5", None, 17)) == [
        ("Nats-Rollup", "sub"),
        ("Nmqtt-Epoch", "17"),
    ]


async def test_a_timer_fires_once_and_is_gone_when_done(js: NatsPyJetStream) -> None:
    store = await store_of(js)
    due = time.time() + 1
    await store.schedule(EXPIRY, "A4a1Bsn5", due, 17, b"body", [("Nmqtt-Client", "x")])
    (timer,) = await store.fetch(10, 1)
    assert time.time() >= due - 0.3
    assert (timer.kind, timer.key, timer.epoch, timer.payload) == (EXPIRY, "A4a1Bsn5", 17, b"body")
    assert headers.get(timer.headers, "Nmqtt-Client") == "x"
    assert await store.fetch(0.05, 1) == []
    await store.done(timer)
    info = await js.client.jetstream().stream_info("$MQTT_timers")
    assert info.state.messages == 0

    async def acknowledged() -> bool:
        info = await js.client.jetstream().consumer_info("$MQTT_timers", "gateways")
        return bool(info.num_ack_pending == 0)

    await eventually(acknowledged)
    assert await store.cancel(EXPIRY, "A4a1Bsn5", 17) is False


async def test_timers_that_were_taken_when_the_leader_went(
    monkeypatch: pytest.MonkeyPatch, js: NatsPyJetStream
) -> None:
    """They are dealt with: JetStream would bring them again half a minute later."""
    store = await store_of(js)
    await store.schedule(EXPIRY, "a", time.time() - 3600, 1)
    stream = js.stream

    async def lost(subject: str, body: bytes, **options: Any) -> AsyncGenerator[Reply, None]:
        async for reply in stream(subject, body, **options):
            if reply.headers.startswith(b"NATS/1.0 4"):
                raise RequestTimeout("the leader has gone")
            yield reply

    monkeypatch.setattr(js, "stream", lost)

    async def taken() -> bool:
        try:
            (timer,) = await store.fetch(0.1, 2)
        except RequestTimeout:
            return False
        return timer.key == "a"

    await eventually(taken)


async def test_a_gateway_that_asks_for_more_than_may_be_pending(js: NatsPyJetStream) -> None:
    """It handles what it has got: other gateways may have the rest, and may wait for what this one has."""
    await ensure_streams(js)
    config = {"durable_name": CONSUMER, "ack_policy": "explicit", "filter_subject": FIRED_PREFIX + ">"}
    body = {"stream_name": STREAM, "config": config | {"max_ack_pending": 8}}
    await call(js, f"CONSUMER.DURABLE.CREATE.{STREAM}.{CONSUMER}", body)
    for number in range(20):
        await js.client.jetstream().publish(f"{FIRED_PREFIX}{EXPIRY}.c{number}")
    store = TimerStore(js)
    numbers: list[int] = []
    async with asyncio.timeout(15):
        while found := await store.fetch(10 if len(numbers) < 3 else 0.1, 12):
            numbers.append(len(found))
            for timer in found:
                await store.done(timer)
    assert numbers == [8, 8, 4]


async def test_overdue_timers_fire_at_once(js: NatsPyJetStream) -> None:
    store = await store_of(js)
    started = time.monotonic()
    await store.schedule(EXPIRY, "a.b", time.time() - 3600, 1)
    (timer,) = await store.fetch(10, 1)
    assert timer.key == "a.b"
    assert time.monotonic() - started < 10


@pytest.mark.long
async def test_cancel_and_replace(js: NatsPyJetStream) -> None:
    store = await store_of(js)
    await store.schedule(EXPIRY, "gone", time.time() + 0.8, 1)
    await store.schedule(EXPIRY, "moved", time.time() + 0.8, 1)
    await store.schedule(EXPIRY, "moved", time.time() + 1.6, 2)
    assert await store.cancel(EXPIRY, "gone", 1) is True
    assert await store.cancel(EXPIRY, "gone", 1) is False
    assert await store.cancel(EXPIRY, "moved", 1) is False, "a later owner's"
    (timer,) = await store.fetch(10, 1)
    assert (timer.key, timer.epoch) == ("moved", 2)
    assert await store.fetch(1, 1) == []


async def test_each_timer_goes_to_one_gateway(
    js: NatsPyJetStream, streams_server: StreamsServer, link: Callable[..., Awaitable[NatsPyJetStream]]
) -> None:
    store = await store_of(js)
    others = [await link(streams_server) for _ in range(3)]
    waiting = [asyncio.create_task(TimerStore(other).fetch(5, 1)) for other in others for _ in range(5)]
    for number in range(15):
        await store.schedule(EXPIRY, f"c{number}", time.time(), number)
    timers = [timer for taken in await asyncio.gather(*waiting) for timer in taken]
    assert sorted(timer.epoch for timer in timers) == list(range(15))
    for timer in timers:
        await store.done(timer)


async def test_fired_timers_wait_for_a_gateway(js: NatsPyJetStream) -> None:
    store = await store_of(js)
    await store.schedule(EXPIRY, "a", time.time(), 1)

    async def fired() -> bool:
        info = await js.client.jetstream().stream_info("$MQTT_timers", subjects_filter="$MQTT.timers.fired.>")
        return bool(info.state.subjects)

    await eventually(fired)
    (timer,) = await store.fetch(1, 1)
    assert timer.epoch == 1


async def test_no_consumer(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    with pytest.raises(NoResponders):
        await TimerStore(js).fetch(0.1, 1)
