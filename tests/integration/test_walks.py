# SPDX-License-Identifier: Apache-2.0
"""The modules that run for an event are those that its walk in docs/internals/architecture.md names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from mqtt_nats.sessions.session import State
from tests.architecture.test_internals import QOS2_ASIDE, walks
from tests.base.support import PATIENCE, Inside, running
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import eventually

KEPT = prop(SESSION_EXPIRY, 600)

PUBLISHING = ("ingress", "protocol")
"""Packages in which nothing else runs meanwhile."""

CONNECTING = ("access", "client", "lifecycle", "sessions", "delivery", "ingress")
MEANWHILE = {
    "client/disconnect",
    "lifecycle/deadline",
    "lifecycle/failover",
    "lifecycle/pause_detection",
    "lifecycle/readiness",
    "lifecycle/timers",
}
"""Modules of these packages that may run meanwhile: for the end of the former connection, and now and then."""

OBJECTS = {
    "access/acl",
    "access/authenticator",
    "client/account",
    "client/message_hooks",
    "delivery/position_writer",
    "delivery/receiver",
    "delivery/states",
    "ingress/interceptors",
    "ingress/publish",
    "ingress/publisher",
    "ingress/qos2",
    "sessions/consumer_binding",
    "sessions/guard",
    "sessions/message_stream",
    "sessions/services",
    "sessions/session",
}
"""Objects that the steps of CONNECT make or ask: the parts of `Client`, the account, permissions, topics of presence,
the state of durable delivery, the head of the stream, the registry."""


def named_by(title: str) -> set[str]:
    """The modules that a walk names."""
    (found,) = (set(modules) for one, modules in walks() if one == title)
    return found


@contextmanager
def modules_run(inside: Inside, packages: tuple[str, ...]) -> Iterator[set[str]]:
    """The modules of these packages of which a function is called in the gateway's thread meanwhile."""
    seen: set[str] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        name = str(frame.f_globals.get("__name__", "")).split(".")
        if event == "call" and name[0] == "mqtt_nats" and name[1] in packages:
            seen.add("/".join(name[1:]))

    inside.call(lambda: sys.setprofile(profile))
    try:
        yield seen
    finally:
        inside.call(lambda: sys.setprofile(None))


@pytest.mark.sources  # compiled functions are not reported
def test_a_publish_at_qos_2_runs_no_module_that_its_walk_leaves_out(nats_server: NatsServer) -> None:
    with (
        running(nats_server.url) as inside,
        Raw.connected(inside.ports[0], "walk") as client,
        modules_run(inside, PUBLISHING) as seen,
    ):
        client.send(raw.publish("walk", b"x", qos=2, id=7))
        client.expect(raw.PUBREC, PATIENCE)
        client.send(raw.ack(raw.PUBREL, 7))
        client.expect(raw.PUBCOMP, PATIENCE)
    assert seen - QOS2_ASIDE == {one for one in named_by("PUBLISH at QoS 2") if one.startswith(PUBLISHING)}


@pytest.mark.sources  # compiled functions are not reported
def test_a_resume_runs_the_modules_of_its_walk_and_no_others(nats_server: NatsServer) -> None:
    """With a message that waits, of a session with nothing special; the second walk names the rest."""
    with running(nats_server.url) as inside:
        port = inside.ports[0]
        with Raw5.open(port, "walk", KEPT) as client:
            assert client.subscribed(("walk", 1)) == (1,)
        with Raw5.open(port, "publisher") as publisher:
            publisher.deliver("walk", b"x")
        eventually(lambda: not inside.connections, PATIENCE)  # else the claim would have a former connection to end
        with modules_run(inside, CONNECTING) as seen, Raw5.open(port, "walk", KEPT, clean=False) as client:
            assert client.present
            client.expect(raw5.PUBLISH, PATIENCE)
            eventually(lambda: inside.client("walk").state is State.LIVE, PATIENCE)
            ran = seen.copy()
    usual = {one for one in named_by("CONNECT with resume") if one.split("/")[0] in CONNECTING}
    some = named_by("Further steps of some resumes")
    assert usual - ran == set()
    assert ran - usual - some - OBJECTS - MEANWHILE == set()
