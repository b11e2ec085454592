# SPDX-License-Identifier: Apache-2.0
"""The audit trail of a gateway: bounded, and in the log."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest

from mqtt_nats.base.logs import RECORDS_BURST, Budgeted
from mqtt_nats.control.audit import ACTIONS_MOST, DONE, TEXT_MOST, AuditTrail, answer
from mqtt_nats.control.selection import Refusal, Total
from mqtt_nats.control.server import Powers
from tests.control.fakes import FakeControl, as_control


async def answers(trail: AuditTrail | None, **question: Any) -> list[Any]:
    control = as_control(FakeControl(Powers({}, None, trail)))
    return [one async for one in answer(control, question)]


async def test_the_newest_are_kept() -> None:
    trail = AuditTrail()
    for number in range(ACTIONS_MOST + 5):
        trail.begin(f"who-{number % 2}", "administrator", "::1", "publish", f"{number}").end(DONE)
    total, *found = await answers(trail, most=2)
    assert total == Total(ACTIONS_MOST)
    assert [one["arguments"] for one in found] == [f"{ACTIONS_MOST + 4}", f"{ACTIONS_MOST + 3}"]
    total, *found = await answers(trail, who="who-1")
    assert total == Total(ACTIONS_MOST // 2)
    assert {one["who"] for one in found} == {"who-1"}


async def test_an_action_is_logged_and_short(caplog: pytest.LogCaptureFixture) -> None:
    trail = AuditTrail()
    action = trail.begin("alice", "administrator", "10.0.0.1", "clients.kick", "x" * 10_000)
    assert [one["outcome"] for one in (await answers(trail))[1:]] == [""]
    action.end("not connected: nobody")
    (found,) = (await answers(trail))[1:]
    assert len(found["arguments"]) == TEXT_MOST + 1
    assert found["outcome"] == "not connected: nobody"
    assert "clients.kick by alice (administrator) from 10.0.0.1 over HTTP: xxx" in caplog.text
    assert "clients.kick by alice from 10.0.0.1: not connected: nobody" in caplog.text


async def test_a_text_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever names a key of the arguments must not write lines of the log, nor turn the text around."""
    action = AuditTrail().begin("alice", "administrator", "::1", "publish", '{"a\u202e":1}')
    action.end("a\nWARNING mqtt_nats.audit: drain by bob: there is no such argument")
    assert action.arguments == '{"a\\u{202e}":1}'
    assert action.outcome.startswith("a\\u{a}WARNING")
    assert "\nWARNING mqtt_nats.audit: drain" not in caplog.text


async def test_viewers_displace_no_action_of_administrators() -> None:
    trail = AuditTrail()
    trail.begin("alice", "administrator", "::1", "drain", "{}").end(DONE)
    for _ in range(ACTIONS_MOST + 5):
        trail.begin("grafana", "viewer", "::1", "publish", "{}").end("publish is for administrators")
    total, *found = await answers(trail)
    assert total == Total(ACTIONS_MOST + 1)
    assert found[0]["who"] == "grafana"
    assert [one["operation"] for one in found if one["who"] == "alice"] == ["drain"]


def test_each_action_of_an_administrator_is_in_the_log() -> None:
    """However many there are; what is refused to viewers has the budget of other records."""
    stream = io.StringIO()
    handler = Budgeted(stream, lambda: 0.0)
    log = logging.getLogger("mqtt_nats.audit")
    log.addHandler(handler)
    try:
        trail = AuditTrail()
        for number in range(200):
            trail.begin("grafana", "viewer", "::1", "publish", f"{number}")
            trail.begin("alice", "administrator", "::1", "publish", f"{number}").end("refused")
    finally:
        log.removeHandler(handler)
    lines = stream.getvalue().splitlines()
    assert sum("by alice (administrator)" in line for line in lines) == 200
    assert sum("by alice from ::1: refused" in line for line in lines) == 200
    assert sum("by grafana" in line for line in lines) == RECORDS_BURST


async def test_tenants_do_not_see_actions() -> None:
    with pytest.raises(Refusal, match="own account only"):
        await answers(None)
