# SPDX-License-Identifier: Apache-2.0
"""For what the clients of an experiment wait before they are judged."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.workload import Workload


def test_wills_of_connections_that_nobody_knows_of_are_no_others(tmp_path: Path) -> None:
    """A will whose CONNACK was lost with its gateway comes besides those that are due."""
    workload = Workload(tmp_path, [1], restless=1.0)
    workload.subscribers[0].wills_due.add(("w-s0", -7))
    workload.watcher.delivered.add(("w-s0", -6))
    assert not workload.has_wills()
    workload.watcher.delivered.add(("w-s0", -7))
    assert workload.has_wills()


def test_messages_that_nobody_acknowledged_are_no_others(tmp_path: Path) -> None:
    workload = Workload(tmp_path, [1])
    workload.publishers[0].acknowledged.add(("w-p0", 2))
    for client in (*workload.subscribers, workload.members[0]):
        client.delivered.add(("w-p0", 1))
    assert not workload.has_all()
    assert not workload.groups_have_all()
    for client in (*workload.subscribers, workload.members[1]):
        client.delivered.add(("w-p0", 2))
    assert workload.has_all()
    assert workload.groups_have_all()
