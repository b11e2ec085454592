# SPDX-License-Identifier: Apache-2.0
"""Rules that change while a client is connected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.client import authorization as permitting


@pytest.mark.parametrize(
    ("regular", "durable", "ends"),
    [
        (SimpleNamespace(waiting=0), None, False),
        (SimpleNamespace(waiting=1), None, True),
        (None, SimpleNamespace(stalled=False), False),
        (None, SimpleNamespace(stalled=True), True),
    ],
    ids=["regular", "with a queue", "durable", "stalled"],
)
def test_where_nobody_can_tell_what_is_permitted_the_connection_ends(
    regular: Any, durable: Any, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stalled session has left to JetStream what one subscription would have brought for another."""
    monkeypatch.setattr(permitting, "denied_subscriptions", lambda client: {"a/#"})
    monkeypatch.setattr(permitting, "withdraw", lambda client, denied: f"withdraw {denied}")
    done: list[str] = []
    client: Any = SimpleNamespace(
        guarded=object(),
        will=None,
        regular_side=regular,
        durable_side=durable,
        end=lambda error: done.append(str(error)),
        do=done.append,
    )
    permitting._check(client)
    assert done == (["permissions have changed"] if ends else ["withdraw {'a/#'}"])
