# SPDX-License-Identifier: Apache-2.0
"""What is said of acknowledgements on the smaller side, and that the cables of a cluster can be pulled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.experiments.partition import Cut, acknowledged_meanwhile
from tests.chaos.history import Event
from tests.harness.namespaces import NamespaceCluster, namespace_obstacle
from tests.harness.partition import SplitCluster
from tests.harness.waiting import aeventually

PATIENCE = 60.0
"""Seconds for an election, on a machine that has other things to do."""


def test_an_acknowledgement_on_the_smaller_side_is_found() -> None:
    events = [
        Event(1, "p0", "connected", {"conn": 1, "port": 11}),
        Event(2, "p1", "connected", {"conn": 2, "port": 12}),
        Event(5, "p0", "acked", {"conn": 1, "n": 1}),
        Event(15, "p1", "acked", {"conn": 2, "n": 1}),
        Event(16, "p0", "acked", {"conn": 1, "n": 2}),
        Event(25, "p0", "acked", {"conn": 1, "n": 3}),
    ]
    assert acknowledged_meanwhile(events, [Cut(11, 10, 20)]) == ["acknowledged while cut off: p0 2 on port 11"]
    assert acknowledged_meanwhile(events, []) == []


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [SplitCluster, NamespaceCluster])
async def test_a_server_that_is_isolated(kind: type[SplitCluster | NamespaceCluster], tmp_path: Path) -> None:
    """The others soon have another leader; when it is back it follows."""
    if kind is NamespaceCluster and (obstacle := namespace_obstacle()):
        pytest.skip(obstacle)
    cluster = kind(tmp_path)
    try:
        for server in cluster.servers:
            server.start()
        await aeventually(lambda: cluster.info(""), PATIENCE)
        apart, other = cluster.servers[0], cluster.servers[1]
        await aeventually(lambda: cluster.answers(apart), PATIENCE)
        cluster.isolate(0)

        async def silent() -> bool:
            return not await cluster.answers(apart)

        await aeventually(silent, PATIENCE)
        await aeventually(lambda: cluster.answers(other), PATIENCE)
        cluster.heal()
        await aeventually(lambda: cluster.answers(apart), PATIENCE)
    finally:
        cluster.discard()
