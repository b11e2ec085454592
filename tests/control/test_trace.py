# SPDX-License-Identifier: Apache-2.0
"""A trace ends by itself, and tells no more than its budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mqtt_nats.config.settings import Settings
from mqtt_nats.control import trace as control_trace
from mqtt_nats.ctl.commands import trace as tracing
from mqtt_nats.ctl.commands.trace import line
from mqtt_nats.ctl.gateway_requests import tell
from mqtt_nats.hooks.points import MESSAGE_PUBLISH
from tests.ctl.test_trace import Watching
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import NatsServer
from tests.harness.raw5 import Raw5
from tests.harness.waiting import eventually


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer) -> Iterator[InProcess]:
    with running(Settings(listen="127.0.0.1:0", nats=(nats_server.url,))) as found:
        yield found


def untraced(gateway: InProcess) -> bool:
    return gateway.call(lambda: gateway.account.services.hooks.deciding(MESSAGE_PUBLISH)) is None


def watching(server: NatsServer, topic: str) -> Watching:
    return Watching(server, topic=topic)


def published(seen: Watching) -> int:
    return len([one for one in seen.events if one["event"] == "published"])


def test_it_ends_by_itself(gateway: InProcess, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long somebody looks: it is not begun again by who goes on asking for it."""
    monkeypatch.setattr(tracing, "TRACE_RENEWAL_S", 0.1)
    asked = 0

    def counted(*given: Any) -> None:
        nonlocal asked
        asked += 1
        tell(*given)

    monkeypatch.setattr(tracing, "tell", counted)
    monkeypatch.setattr(control_trace, "LASTS_MOST", 1.0)
    with watching(nats_server, "limited/#") as seen:
        assert seen.one(event="ended")["reason"] == "its time is over"
        before = asked
        eventually(lambda: asked > before + 5, what="it is asked for again")
        assert untraced(gateway)
        with Raw5.open(gateway.port, "c-limited") as client:
            client.deliver("limited/x", b"x", qos=1)
        assert not published(seen)
    assert "ended  its time is over" in "\n".join(map(line, seen.events))


def test_events_of_a_second(gateway: InProcess, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is more is counted."""
    monkeypatch.setattr(control_trace, "EVENTS_WAITING_MOST", 10)
    monkeypatch.setattr(control_trace, "EVENTS_PER_SECOND", 2.0)
    with watching(nats_server, "flood/#") as seen, Raw5.open(gateway.port, "c-flood") as client:
        sent = 0

        def lost() -> bool:
            nonlocal sent
            client.deliver("flood/x", b"%d" % sent, qos=1)
            sent += 1
            return any(one["event"] == "lost" for one in seen.events)

        eventually(lost)
        assert seen.one(event="lost")["count"] >= 1
        assert published(seen) < sent
    eventually(lambda: untraced(gateway))


def test_events_in_all(gateway: InProcess, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number ends it."""
    monkeypatch.setattr(control_trace, "EVENTS_MOST", 5)
    with watching(nats_server, "flood/#") as seen, Raw5.open(gateway.port, "c-flood") as client:
        for number in range(8):
            client.deliver("flood/x", b"%d" % number, qos=1)
        assert seen.one(event="ended")["reason"] == "its budget of 5 events is used up"
        assert published(seen) == 5
        assert untraced(gateway)


def test_gateways_and_who_looks_agree() -> None:
    assert tracing.LASTS_MOST == control_trace.LASTS_MOST
