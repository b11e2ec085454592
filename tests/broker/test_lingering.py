# SPDX-License-Identifier: Apache-2.0
"""When records of what is complete may go."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.backbone.store import Silent
from mqtt_nats.broker import lingering
from mqtt_nats.broker.lingering import Lingering


async def test_nothing_goes_while_a_server_may_send_again_what_it_forgot(monkeypatch: pytest.MonkeyPatch) -> None:
    """NATS is away, then it is back for a moment, then for long enough."""
    monkeypatch.setattr(lingering, "LINGER", 10.0)
    monkeypatch.setattr(lingering, "AFTERWARDS", 100.0)
    timers: list[Any] = []
    loop: Any = SimpleNamespace(
        now=0.0,
        time=lambda: loop.now,
        call_later=lambda delay, act: timers.append((loop.now + delay, act)),
        call_at=lambda due, act: timers.append((due, act)),
    )
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    link = SimpleNamespace(online=True, out=[], kick=lambda: None)
    gone: list[bytes] = []
    broker: Any = SimpleNamespace(link=link, relinked=-1e9, drop_assignment=lambda token, operation: gone.append(token))
    kept = Lingering(broker)

    def pass_to(now: float) -> None:
        while timers and timers[0][0] <= now:
            loop.now, act = timers.pop(0)
            act()
        loop.now = now

    kept.add(b"=1", Silent())
    link.online = False
    pass_to(50)
    link.online, broker.relinked = True, 50.0
    kept.add(b"&reply", Silent())
    pass_to(149)
    assert not gone
    assert not link.out
    pass_to(161)
    assert gone == [b"1"]
    assert link.out == [b"PUB reply 0\r\n\r\n"]
    kept.add(b"=2", Silent())
    pass_to(172)
    assert gone == [b"1", b"2"]
