# SPDX-License-Identifier: Apache-2.0
"""Fired timers that cannot be handled at the moment."""

from __future__ import annotations

from typing import cast

import pytest

from mqtt_nats.lifecycle import timers
from mqtt_nats.lifecycle.will import Wills
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.timers import EXPIRY, FiredTimer
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeServices

pytestmark = pytest.mark.anyio

TIMER = FiredTimer(EXPIRY, "key", 1, 2, b"", b"", "$JS.ACK.$MQTT_timers.gateways.1.2.3.4.5")


@stands_for(Wills)
class FakeWills:
    """Stands for `Wills`: what timers of other kinds need."""

    def __init__(self) -> None:
        self.services = FakeServices()


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
    wills = FakeWills()
    done: list[FiredTimer] = []

    async def expire(*_: object) -> None:
        if error is not None:
            raise error

    async def settle(timer: FiredTimer) -> bool:
        done.append(timer)
        return True

    monkeypatch.setattr(timers, "expire", expire)
    monkeypatch.setattr(wills.services.streams.timers, "done", settle)
    await timers._handle_all(cast(Wills, wills), [TIMER])
    assert done == ([] if error else [TIMER])
    assert wills.services.fake_link.out == (
        [b'PUB %b 24\r\n-NAK {"delay":250000000}\r\n' % TIMER.ack.encode()] if soon else []
    )


@pytest.mark.parametrize(("number", "listed"), [(timers.TOGETHER - 1, 0), (timers.TOGETHER, 1)])
async def test_exchanges_are_listed_for_many_sessions(
    monkeypatch: pytest.MonkeyPatch, number: int, listed: int
) -> None:
    """The list may have 100,000 subjects, of which one session has few."""
    wills = FakeWills()
    lists: list[object] = []

    async def expire(*_: object) -> None:
        return

    async def list_exchanges(services: object) -> None:
        lists.append(services)

    async def settle(timer: FiredTimer) -> bool:
        return True

    monkeypatch.setattr(timers, "expire", expire)
    monkeypatch.setattr(timers, "list_exchanges", list_exchanges)
    monkeypatch.setattr(wills.services.streams.timers, "done", settle)
    await timers._handle_all(cast(Wills, wills), [TIMER] * number)
    assert len(lists) == listed
