# SPDX-License-Identifier: Apache-2.0
"""Fired timers that cannot be handled at the moment."""

from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.lifecycle import timers
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.timers import EXPIRY, FiredTimer

pytestmark = pytest.mark.anyio

TIMER = FiredTimer(EXPIRY, "key", 1, 2, b"", b"", "$JS.ACK.$MQTT_timers.gateways.1.2.3.4.5")


@pytest.mark.parametrize(
    ("error", "soon"),
    [
        (None, False),
        (NoResponders("no leader"), True),
        (RequestTimeout("no answer"), True),
        (ApiError(503, 10008, "no quorum"), True),
        (ApiError(400, 10077, "a refusal"), False),
    ],
    ids=str,
)
async def test_a_timer_without_an_answer_comes_again_soon(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, soon: bool
) -> None:
    """Not after the AckWait of half a minute: a leader that is missing may be there in a moment.

    What JetStream refuses would be refused four times a second.
    """
    out: list[bytes] = []
    done: list[FiredTimer] = []

    async def expire(*_: object) -> None:
        if error is not None:
            raise error

    async def settle(timer: FiredTimer) -> None:
        done.append(timer)

    monkeypatch.setattr(timers, "expire", expire)
    link = SimpleNamespace(out=out, kick=lambda: None)
    streams = SimpleNamespace(timers=SimpleNamespace(done=settle))
    wills: Any = SimpleNamespace(services=SimpleNamespace(nats=SimpleNamespace(link=link), streams=streams))
    await timers._handle(wills, TIMER)
    assert done == ([] if error else [TIMER])
    assert out == ([b'PUB %b 24\r\n-NAK {"delay":250000000}\r\n' % TIMER.ack.encode()] if soon else [])
