# SPDX-License-Identifier: Apache-2.0
"""The modules that run for a publish at QoS 2 are those that its walk in docs/internals/architecture.md names."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from tests.architecture.test_internals import QOS2_ASIDE, walks
from tests.base.support import PATIENCE, running
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw

PACKAGES = ("ingress", "protocol")
"""Packages in which nothing else runs meanwhile."""


@pytest.mark.sources  # compiled functions are not reported
def test_a_publish_at_qos_2_runs_no_module_that_its_walk_leaves_out(nats_server: NatsServer) -> None:
    seen: set[str] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        name = str(frame.f_globals.get("__name__", "")).split(".")
        if event == "call" and name[0] == "mqtt_nats" and name[1] in PACKAGES:
            seen.add("/".join(name[1:]))

    with running(nats_server.url) as inside, Raw.connected(inside.ports[0], "walk") as client:
        inside.call(lambda: sys.setprofile(profile))
        try:
            client.send(raw.publish("walk", b"x", qos=2, id=7))
            client.expect(raw.PUBREC, PATIENCE)
            client.send(raw.ack(raw.PUBREL, 7))
            client.expect(raw.PUBCOMP, PATIENCE)
        finally:
            inside.call(lambda: sys.setprofile(None))
    (named,) = (set(modules) for title, _, modules in walks() if title == "PUBLISH at QoS 2")
    assert seen - QOS2_ASIDE == {one for one in named if one.startswith(PACKAGES)}
