# SPDX-License-Identifier: Apache-2.0
"""The audit trail of a gateway: bounded, and in the log."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest

from mqtt_nats.base.logs import RECORDS_BURST, Budgeted
from mqtt_nats.control.deeds import DEEDS_MOST, DONE, TEXT_MOST, Deeds, answer
from mqtt_nats.control.selection import Refusal, Total
from mqtt_nats.control.server import Powers
from tests.control.fakes import FakeControl, as_control


async def answers(deeds: Deeds | None, **question: Any) -> list[Any]:
    control = as_control(FakeControl(Powers({}, None, deeds)))
    return [one async for one in answer(control, question)]


async def test_the_newest_are_kept() -> None:
    deeds = Deeds()
    for number in range(DEEDS_MOST + 5):
        deeds.begin(f"who-{number % 2}", "administrator", "::1", "publish", f"{number}").end(DONE)
    total, *found = await answers(deeds, most=2)
    assert total == Total(DEEDS_MOST)
    assert [one["arguments"] for one in found] == [f"{DEEDS_MOST + 4}", f"{DEEDS_MOST + 3}"]
    total, *found = await answers(deeds, who="who-1")
    assert total == Total(DEEDS_MOST // 2)
    assert {one["who"] for one in found} == {"who-1"}


async def test_a_deed_is_logged_and_short(caplog: pytest.LogCaptureFixture) -> None:
    deeds = Deeds()
    deed = deeds.begin("alice", "administrator", "10.0.0.1", "clients.kick", "x" * 10_000)
    assert [one["outcome"] for one in (await answers(deeds))[1:]] == [""]
    deed.end("not connected: nobody")
    (found,) = (await answers(deeds))[1:]
    assert len(found["arguments"]) == TEXT_MOST + 1
    assert found["outcome"] == "not connected: nobody"
    assert "clients.kick by alice (administrator) from 10.0.0.1 over HTTP: xxx" in caplog.text
    assert "clients.kick by alice from 10.0.0.1: not connected: nobody" in caplog.text


async def test_a_text_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever names a key of the arguments must not write lines of the log, nor turn the text around."""
    deed = Deeds().begin("alice", "administrator", "::1", "publish", '{"a\u202e":1}')
    deed.end("a\nWARNING mqtt_nats.audit: drain by bob: there is no such argument")
    assert deed.arguments == '{"a\\u{202e}":1}'
    assert deed.outcome.startswith("a\\u{a}WARNING")
    assert "\nWARNING mqtt_nats.audit: drain" not in caplog.text


async def test_viewers_displace_no_deed_of_administrators() -> None:
    deeds = Deeds()
    deeds.begin("alice", "administrator", "::1", "drain", "{}").end(DONE)
    for _ in range(DEEDS_MOST + 5):
        deeds.begin("grafana", "viewer", "::1", "publish", "{}").end("publish is for administrators")
    total, *found = await answers(deeds)
    assert total == Total(DEEDS_MOST + 1)
    assert found[0]["who"] == "grafana"
    assert [one["operation"] for one in found if one["who"] == "alice"] == ["drain"]


def test_each_deed_of_an_administrator_is_in_the_log() -> None:
    """However many there are; what is refused to viewers has the budget of other records."""
    stream = io.StringIO()
    handler = Budgeted(stream, lambda: 0.0)
    log = logging.getLogger("mqtt_nats.audit")
    log.addHandler(handler)
    try:
        deeds = Deeds()
        for number in range(200):
            deeds.begin("grafana", "viewer", "::1", "publish", f"{number}")
            deeds.begin("alice", "administrator", "::1", "publish", f"{number}").end("refused")
    finally:
        log.removeHandler(handler)
    lines = stream.getvalue().splitlines()
    assert sum("by alice (administrator)" in line for line in lines) == 200
    assert sum("by alice from ::1: refused" in line for line in lines) == 200
    assert sum("by grafana" in line for line in lines) == RECORDS_BURST


async def test_tenants_do_not_see_deeds() -> None:
    with pytest.raises(Refusal, match="own account only"):
        await answers(None)
