# SPDX-License-Identifier: Apache-2.0
"""The state of JetStream that gateways report: the session that has been absent for longest."""

from __future__ import annotations

import asyncio
import time

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.config.settings import Settings
from mqtt_nats.ctl.nats_connection import connected
from mqtt_nats.observability import jetstream_state
from mqtt_streams.definitions import ensure_streams
from mqtt_streams.pages import PAGE_FIRST
from mqtt_streams.timers import EXPIRY, TimerStore
from tests.harness.nats import NatsServer

MANY = PAGE_FIRST * 2 + 1


async def _absent(url: str) -> tuple[float, int, float]:
    """Return the seconds before and after a session that expires has left, and where the next look begins."""
    async with connected(Settings(nats=(url,))) as inbox:
        await ensure_streams(inbox)
        timers = TimerStore(inbox)
        for start in range(0, MANY, 100):
            some = range(start, min(start + 100, MANY))
            await asyncio.gather(*(timers.schedule(EXPIRY, f"key{one}", None, 1) for one in some))
        before = await jetstream_state._absent(inbox)
        last = await timers.schedule(EXPIRY, "expires", time.time() + 600, 1)
        return before, last - _begin(inbox), await jetstream_state._absent(inbox)


def _begin(inbox: RequestInbox) -> int:
    """Return the sequence before which no timer is read again."""
    return jetstream_state._first[inbox]


def test_timers_of_sessions_that_do_not_expire_are_passed_once(nats_server: NatsServer) -> None:
    """However many there are; the first one behind them counts."""
    before, ahead, after = asyncio.run(_absent(nats_server.url))
    assert before == 0
    assert ahead == 1
    assert 0 < after < 60
