# SPDX-License-Identifier: Apache-2.0
"""The benchmark of absent sessions: a few of them, made, left and back."""

from __future__ import annotations

import pytest

from benchmarks import absent

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("positions", "consumers"), [("consumers", 20), ("records", 0)])
def test_a_few_sessions(monkeypatch: pytest.MonkeyPatch, positions: str, consumers: int) -> None:
    """Each has its messages when it is back; only those with consumers have some while they are absent."""
    monkeypatch.setattr(absent, "IDLE", 0.1)
    row = absent.measure(20, positions, 10)
    assert (row.sessions, row.positions, row.back.sessions) == (20, positions, 10)
    assert row.consumers in (consumers, consumers + 1)  # and the gateway's shared reader
    assert row.records > 500
    assert min(row.made, row.restart[0], row.alone, row.back.took) > 0
    assert 0 < row.back.before.p99 <= row.back.before.longest
    assert 0 < row.back.meanwhile.p99 <= row.back.meanwhile.longest
    text = absent.document([row], "command")
    assert "## Absent sessions" in text
    assert f"| {positions}" in text
    assert f" {row.back.before} " in text
    assert f" {row.back.meanwhile} " in text


def test_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records have three replicas; figures of nats-server are those of one of three."""
    monkeypatch.setattr(absent, "IDLE", 0.1)
    monkeypatch.setattr(absent, "SETTLE", 0.5)
    row = absent.measure(20, "records", 10, 3)
    assert (row.servers, row.consumers, row.back.sessions) == (3, 1, 10)
    assert min(row.made, row.records, row.restart[0], row.back.took) > 0
    assert "| 3 " in absent.document([row], "command")
