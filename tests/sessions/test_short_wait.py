# SPDX-License-Identifier: Apache-2.0
"""The AckWait of a group's consumer is short for a moment after an election, and always set back."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from mqtt_nats.sessions.groups import subscribe as module
from mqtt_streams.api import ApiError, RequestTimeout
from mqtt_streams.consumers import ACK_WAIT_NS
from mqtt_streams.shared import EXPIRED_NS, SharedStore
from tests.sessions.fakes import FakeServices, as_services


class Groups:
    """The store of groups: which AckWaits are set, and what comes of each attempt."""

    def __init__(self, *outcomes: bool | Exception) -> None:
        self.outcomes = list(outcomes)
        self.set: list[int] = []

    async def set_wait(self, group: str, ack_wait: int, most: int = 0) -> bool:
        return self._outcome(ack_wait)

    async def restore_wait(self, group: str) -> None:
        self._outcome(ACK_WAIT_NS)

    def _outcome(self, ack_wait: int) -> bool:
        self.set.append(ack_wait)
        outcome = self.outcomes.pop(0) if self.outcomes else True
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


async def expire(groups: Groups) -> None:
    services = FakeServices()
    services.streams.groups = cast(SharedStore, groups)
    await module._expire(as_services(services), "group", 0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPIRING", 0.0)
    monkeypatch.setattr(module, "RESTORE_PAUSES", (0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("outcomes", "times"),
    [
        ((), 1),
        ((True, ApiError(503, 10158, "no leader")), 2),
        ((RequestTimeout("no answer"),), 1),
        ((ApiError(503, 10118, "raft"), ApiError(500, 10012, "create")), 2),
    ],
)
async def test_it_is_set_back(outcomes: tuple[bool | Exception, ...], times: int) -> None:
    groups = Groups(*outcomes)
    await expire(groups)
    assert groups.set == [EXPIRED_NS, *[ACK_WAIT_NS] * times]


async def test_nothing_is_set_back_where_nothing_was_set() -> None:
    groups = Groups(False)
    await expire(groups)
    assert groups.set == [EXPIRED_NS]


async def test_it_is_set_back_when_the_gateway_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPIRING", 3600.0)
    groups = Groups()
    task = asyncio.create_task(expire(groups))
    while not groups.set:  # noqa: ASYNC110  # a fake has no event
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert groups.set == [EXPIRED_NS, ACK_WAIT_NS]
