# SPDX-License-Identifier: Apache-2.0
"""Which sessions ``ctl sessions list`` chooses by their state."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from mqtt_nats.ctl.commands import sessions
from tests.ctl.test_early_ends import FakeCommandInbox, inbox_of

pytestmark = pytest.mark.sources


@pytest.mark.parametrize(
    ("state", "chosen", "questions"),
    [("all", ["one", "two"], 0), ("connected", ["one"], 1), ("disconnected", ["two"], 1)],
)
async def test_sessions_of_a_state(
    monkeypatch: pytest.MonkeyPatch,
    state: Literal["all", "connected", "disconnected"],
    chosen: list[str],
    questions: int,
) -> None:
    """Gateways are asked for the connected ones only where that matters."""
    asked: list[object] = []

    async def connected(inbox: object) -> tuple[dict[str, Any], list[str]]:
        asked.append(inbox)
        return {"one": None}, []

    monkeypatch.setattr(sessions, "_connected", connected)
    page, _ = await sessions._chosen(inbox_of(FakeCommandInbox()), sessions.Listing(state=state))
    assert [one.client_id for one in page.entries()] == chosen
    assert len(asked) == questions
