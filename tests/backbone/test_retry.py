# SPDX-License-Identifier: Apache-2.0
"""A gateway that starts beside a cluster that has just created its streams."""

from __future__ import annotations

import asyncio

import pytest

from mqtt_nats.backbone import retry as patience
from mqtt_nats.backbone.retry import ask_once_for_all, retry_in_background
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout


class Answers:
    """What is raised, one after the other, before there is an answer."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


async def test_a_new_stream_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RETRY_PAUSE_S", 0.01)
    assert (
        await ask_once_for_all(Answers(NoResponders("nobody"), RequestTimeout("late"), NoResponders("nobody")))
        == "answer"
    )


async def test_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "ELECTION_MOST_S", 0.0)
    monkeypatch.setattr(patience, "RETRY_PAUSE_S", 0.01)
    with pytest.raises(NoResponders):
        await ask_once_for_all(Answers(*[NoResponders("nobody")] * 9))


async def test_what_is_refused_is_refused() -> None:
    with pytest.raises(ApiError):
        await ask_once_for_all(Answers(ApiError(403, 0, "a test")))


async def test_what_no_client_waits_for_is_tried_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RETRY_PAUSE_S", 0.0)
    online = asyncio.Event()
    errors = [NoResponders("nobody"), RequestTimeout("late"), ApiError(503, 10008, "no leader"), TimeoutError()]
    attempt = Answers(*errors)
    waiting = asyncio.create_task(retry_in_background(online, attempt))
    await asyncio.sleep(0)
    assert len(attempt.errors) == len(errors)  # NATS is not there
    online.set()
    assert await waiting == "answer"


async def test_what_is_refused_is_not_tried_again() -> None:
    online = asyncio.Event()
    online.set()
    with pytest.raises(ApiError):
        await retry_in_background(online, Answers(ApiError(403, 0, "a test")))
