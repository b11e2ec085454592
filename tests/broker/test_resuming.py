# SPDX-License-Identifier: Apache-2.0
"""A session is attached again while it is being attached again."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.broker import attaching, resuming
from mqtt_streams.consumers import ConsumerRef


async def test_one_at_a_time_and_only_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that change the same consumers in turn would take the deliver subject from each other."""
    side: Any = SimpleNamespace(turn=0, reattaching=asyncio.Lock())
    begun: list[int] = []
    go_on = asyncio.Event()

    async def work(client: object, side: Any, turn: int) -> None:
        begun.append(turn)
        await go_on.wait()

    monkeypatch.setattr(resuming, "_reattach", work)
    client: Any = None
    tasks = [asyncio.create_task(resuming.reattach(client, side)) for _ in range(3)]
    await asyncio.sleep(0)
    later = asyncio.create_task(resuming.reattach(client, side))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*tasks, later)
    assert begun == [1, 4]


async def test_a_consumer_that_is_attached_anew_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the earlier one would write names a deliver subject to which nobody listens any more."""
    written: list[str] = []
    over = False

    async def update(js: object, stream: str, consumer: ConsumerRef) -> Any:
        nonlocal over
        written.append(consumer.deliver_subject)
        over = True
        return SimpleNamespace(num_ack_pending=5)

    monkeypatch.setattr(attaching, "update_consumer", update)
    broker: Any = SimpleNamespace(inbox=None)
    await attaching.send_again(broker, "stream", ConsumerRef("name", "old", "filter", 10), lambda: 0, lambda: over)
    assert written == ["old"]
