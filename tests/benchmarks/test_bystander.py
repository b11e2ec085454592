# SPDX-License-Identifier: Apache-2.0
"""The client whose messages are timed beside an event."""

from __future__ import annotations

import os
import signal
import time

import pytest

from benchmarks import bystander, peers
from benchmarks.bystander import Delay, Trip


def test_percentile() -> None:
    assert bystander.percentile([]) == 0
    assert bystander.percentile([0.5]) == 0.5
    assert bystander.percentile([1.0] * 99 + [9.0]) == pytest.approx(1.08)


def test_delay_of_some_time() -> None:
    """A trip counts where it has begun."""
    trips = [Trip(0.9, 5.0), Trip(1.0, 0.1), Trip(1.9, 0.3), Trip(2.0, 4.0)]
    found = bystander.delay(trips, 1.0, 2.0)
    assert found.p99 == pytest.approx(0.298)
    assert found.longest == 0.3
    assert bystander.delay(trips, 2.0) == Delay(4.0, 4.0)
    with pytest.raises(peers.PeerError, match="has published nothing"):
        bystander.delay(trips, 1.1, 1.9)
    assert str(Delay(0.0124, 0.3)) == "12 ms, 300 ms"


@pytest.mark.processes
def test_a_delay_is_seen_by_all_messages_of_its_time() -> None:
    """The bystander publishes on while nothing comes back, so a delay does not count as a single message."""
    with peers.running("relay") as broker, bystander.bystander(broker.port) as client:
        assert client.trips()
        (pid,) = broker.processes.values()
        os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        time.sleep(1)
        os.kill(pid, signal.SIGCONT)
        late = [one for one in client.trips() if one.begun >= begun and one.seconds > 0.2]
        assert len(late) > 10
        assert bystander.delay(late, begun).longest > 0.8


@pytest.mark.processes
def test_a_lost_connection() -> None:
    with peers.running("relay") as broker, bystander.bystander(broker.port) as client:
        (pid,) = broker.processes.values()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(peers.PeerError, match="lost its connection"):
            client.trips()
