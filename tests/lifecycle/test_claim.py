# SPDX-License-Identifier: Apache-2.0
"""A client was refused because nobody answered its claim: was that stored?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import pytest

from mqtt_nats.lifecycle import claim as unconfirmed
from mqtt_nats.lifecycle.claim import leave_claimed
from mqtt_streams.api import RequestTimeout
from mqtt_streams.sessions import V5, Kind, PoisonedRecord, SessionRecord, SessionStore
from tests.sessions.fakes import FakeClient, FakeServices

pytestmark = [pytest.mark.anyio, pytest.mark.sources]


NO_WILLS: Any = None
"""The records name no wills."""


def record(nonce: str, kind: Kind = "durable") -> SessionRecord:
    return SessionRecord("client", v5=V5(kind, nonce=nonce))


class Setup:
    """The record that each look finds; the last one for all later looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, found: Iterable[Any]) -> None:
        self.found = list(found)
        self.deadlines: list[tuple[int, bool]] = []
        """Epoch of each timer that is set, and whether it fires."""
        monkeypatch.setattr(unconfirmed, "RETRY_PAUSE_S", 0.001)
        monkeypatch.setattr(unconfirmed, "RECORD_STORED_MOST_S", 0.01)
        monkeypatch.setattr(
            unconfirmed, "set_deadline", lambda client, at: self.deadlines.append((client.epoch, at is not None))
        )
        services = FakeServices()
        services.streams.sessions = cast(SessionStore, self)
        self.told: list[tuple[str, int]] = []
        """Client and epoch of each session whose end hooks are told."""
        monkeypatch.setattr(
            unconfirmed, "session", lambda hooks, point, client_id, epoch: self.told.append((client_id, epoch))
        )
        services.hooks = None  # type: ignore[attr-defined]
        self.client: Any = FakeClient(services)
        self.client.record = record("mine")

    async def load(self, *_: object) -> Any:
        found = self.found.pop(0) if len(self.found) > 1 else self.found[0]
        if isinstance(found, Exception):
            raise found
        return found


CASES: dict[str, tuple[list[Any], int]] = {
    "stored": ([(record("mine"), 6)], 6),
    "stored, as JetStream says later": ([RequestTimeout("a test"), (record("mine"), 6)], 6),
    "stored after the first look": ([(record("before"), 5), (record("mine"), 6)], 6),
    "not stored": ([(record("before"), 5)], 0),
    "claimed by another connection": ([(record("other"), 7)], 0),
    "claimed by nats-server's listener": ([(SessionRecord("client"), 7)], 0),
    "claimed by who knows": ([PoisonedRecord("a test")], 0),
    "ended": ([None], 0),
}


@pytest.mark.parametrize("continued", [True, False])
@pytest.mark.parametrize("case", CASES)
async def test_what_is_left_in_order(monkeypatch: pytest.MonkeyPatch, case: str, continued: bool) -> None:
    """Only what this connection has claimed, and nobody after it."""
    found, epoch = CASES[case]
    setup = Setup(monkeypatch, found)
    await asyncio.wait_for(leave_claimed(setup.client, NO_WILLS, 5, continued=continued), 10)
    assert (setup.client.epoch, setup.deadlines) == (epoch, [(epoch, True)] if epoch else [])


async def test_the_timer_of_a_session_that_does_not_expire_never_fires(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(monkeypatch, [(record("mine"), 6)])
    setup.client.expiry = None
    await asyncio.wait_for(leave_claimed(setup.client, NO_WILLS, 0, continued=True), 10)
    assert (setup.client.epoch, setup.deadlines) == (6, [(6, False)])


@pytest.mark.parametrize(("kind", "told"), [("durable", []), ("regular", [("client", 6)])])
async def test_hooks_are_told_of_the_end_of_a_session_that_ends_with_its_connection(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, told: list[tuple[str, int]]
) -> None:
    """Its timer tells nothing; that of another session does."""
    setup = Setup(monkeypatch, [(record("mine", kind), 6)])
    await asyncio.wait_for(leave_claimed(setup.client, NO_WILLS, 0, continued=False), 10)
    assert (setup.told, setup.deadlines) == (told, [(6, True)])
