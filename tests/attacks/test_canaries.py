# SPDX-License-Identifier: Apache-2.0
"""Every flood that a client can make, against a gateway with its default settings, while canaries publish.

The canaries, in a process of their own, lose nothing. On an otherwise idle machine, which the long form of the test
has, 99 of 100 of their messages arrive within :data:`DELAY_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import pytest

from mqtt_nats.lifecycle.connection_hooks import CONNECTIONS_PER_S
from tests.attacks import flooding
from tests.attacks.canary import Canaries
from tests.base.support import memory
from tests.conftest import GatewayFactory, NatsFactory

MIB: Final = 1024 * 1024

DELAY_S: Final = 0.5
"""What 99 of 100 messages of the canaries wait at most, on an idle machine of two cores."""

BUSY_DELAY_S: Final = 30.0
"""What half of them wait at most on a machine that is shared with other tests."""

LONG_S: Final = 30.0
SHORT_S: Final = 2.0

LOG_BYTES_PER_S: Final = 20_000
"""What the log grows by at most without records of connections, with a minute's worth for what may come at once."""


class Flood(NamedTuple):
    """One row: what is sent, and what the gateway may grow by."""

    attack: Callable[[int, float], None]
    mebibytes: int
    arguments: tuple[str, ...] = ()


FLOODS: Final = (
    Flood(flooding.deep_filters, 100),
    Flood(flooding.stored_sessions, 60),
    Flood(flooding.long_client_ids, 40),
    Flood(flooding.half_open, 100),
    Flood(flooding.overlapping_filters, 100),
    Flood(flooding.remembered_topics, 150, ("--acl-file", "{rules}")),
    Flood(flooding.refused_subscriptions, 40),
    Flood(flooding.malformed_packets, 40),
    Flood(flooding.wrong_passwords, 40, ("--password-file", "{users}", "--allow-anonymous")),
    Flood(flooding.new_connections, 40),
    Flood(flooding.tiny_packets, 100),
)

RULES: Final = 'default = "deny"\n[[rules]]\neffect = "allow"\ntopics = ["many/#", "canary-%c/#", "+/+"]\n'


@pytest.mark.parametrize("seconds", [SHORT_S, pytest.param(LONG_S, marks=pytest.mark.soak)], ids=["short", "long"])
@pytest.mark.parametrize("flood", FLOODS, ids=[one.attack.__name__ for one in FLOODS])
def test_canaries(
    flood: Flood,
    seconds: float,
    nats_factory: NatsFactory,
    gateway_factory: GatewayFactory,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("files")
    rules, users = directory / "rules.toml", directory / "users"
    rules.write_text(RULES, encoding="utf-8")
    users.write_text("", encoding="utf-8")
    arguments = [one.format(rules=rules, users=users) for one in flood.arguments]
    gateway = gateway_factory(nats_factory(), *arguments)
    with Canaries(gateway.port) as canaries:
        before, written = memory(gateway.pid), len(gateway.log)
        flood.attack(gateway.port, time.monotonic() + seconds)
        grown = (memory(gateway.pid) - before) / MIB
        log = gateway.log[written:]
        report = canaries.report()
    connections = [line for line in log.splitlines() if " INFO mqtt_nats.connections: " in line]
    logged = len(log) - sum(map(len, connections))
    print(
        f"{flood.attack.__name__}: {grown:.1f} MiB, {logged} bytes of log, "
        f"{len(connections)} records of connections, {report}"
    )
    assert (report.missing, report.repeated, report.disconnections) == (0, 0, [])
    assert logged < LOG_BYTES_PER_S * (seconds + 10)
    assert len(connections) <= 2 * CONNECTIONS_PER_S * (seconds + 10)  # to connect, and to disconnect
    assert grown < flood.mebibytes
    if seconds == LONG_S:
        assert report.high <= DELAY_S, report
    else:
        assert report.median <= BUSY_DELAY_S, report
