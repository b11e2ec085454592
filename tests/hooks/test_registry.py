# SPDX-License-Identifier: Apache-2.0
"""Registry of hooks: wrong callbacks are refused, and a point without callbacks costs nothing."""

from __future__ import annotations

from typing import Any

import pytest

from mqtt_nats.hooks.chain import Point
from mqtt_nats.hooks.points import CLIENT_AUTHORIZE, CLIENT_CONNECTED, SESSION_CREATED
from mqtt_nats.hooks.registry import Hooks


def ignore(event: Any) -> None:
    """A callback of a notice."""


async def wait(event: Any, verdict: Any) -> None:
    """A callback that may wait."""


@pytest.fixture
def hooks() -> Hooks:
    return Hooks(lambda work, name: work.close())


@pytest.mark.parametrize(
    ("point", "callback", "timeout", "error"),
    [
        (CLIENT_CONNECTED, "no function", 1.0, "cannot be called"),
        (CLIENT_CONNECTED, ignore, 0.0, "timeout is not positive"),
        (CLIENT_CONNECTED, ignore, float("nan"), "timeout is not positive"),
        (CLIENT_AUTHORIZE, wait, 1.0, "client.authorize cannot be async"),
    ],
)
def test_a_wrong_callback_is_refused(hooks: Hooks, point: Any, callback: Any, timeout: float, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        hooks.add(point, callback, timeout=timeout)
    assert not hooks.in_use


def test_the_path_of_messages_is_told_of_the_first_and_the_last_callback(hooks: Hooks) -> None:
    changed: list[tuple[Point, bool]] = []
    hooks.call_on_change(lambda point: changed.append((point, hooks.in_use)))
    entry = hooks.add(CLIENT_CONNECTED, ignore)
    assert hooks.noticing(CLIENT_CONNECTED) is not None
    assert hooks.remove(entry)
    assert not hooks.remove(entry)
    assert hooks.noticing(CLIENT_CONNECTED) is None
    assert changed == [(CLIENT_CONNECTED, True), (CLIENT_CONNECTED, False)]


def test_an_unloaded_plugin_takes_its_callbacks_and_no_others(hooks: Hooks) -> None:
    for owner in ("one", "other"):
        hooks.add(CLIENT_CONNECTED, ignore, owner=owner)
    hooks.add(SESSION_CREATED, ignore, owner="one")
    assert hooks.remove_all("one") == 2
    assert [(one.point, one.owner) for one in hooks.accounts()] == [("client.connected", "other")]
    assert hooks.in_use
