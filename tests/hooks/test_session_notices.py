# SPDX-License-Identifier: Apache-2.0
"""Causes of the ends of connections, for metrics and the log."""

from __future__ import annotations

from typing import Any

from mqtt_nats.codec import ReasonCode
from mqtt_nats.hooks import SESSION_CREATED, Hooks, Session
from mqtt_nats.hooks.session_notices import CAUSES, DISCONNECTS, session


def test_each_cause_has_one_counter() -> None:
    assert len(set(DISCONNECTS)) == len(DISCONNECTS)
    assert set(CAUSES.values()) < set(DISCONNECTS)
    assert {"client", "taken over", "lost", "error"} < set(DISCONNECTS)


def test_errors_of_the_client_are_protocol_errors() -> None:
    """Reason codes from which the standard says that the client is at fault (section 4.13)."""
    for reason in (ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR, ReasonCode.PACKET_TOO_LARGE):
        assert CAUSES[reason] == "protocol error"


def test_a_notice_without_listeners_is_no_work() -> None:
    found: list[Any] = []
    hooks = Hooks(lambda work, name: work.close())
    session(hooks, SESSION_CREATED, "one", 1)
    entry = hooks.add(SESSION_CREATED, found.append)
    session(hooks, SESSION_CREATED, "two", 2)
    hooks.remove(entry)
    session(hooks, SESSION_CREATED, "three", 3)
    assert found == [Session("two", 2)]
