# SPDX-License-Identifier: Apache-2.0
"""Resource usage of a process, in the names and units of Prometheus."""

from __future__ import annotations

import sys
import time

import pytest

from mqtt_nats.observability.process_usage import process_usage


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is read from /proc")
def test_units() -> None:
    """Seconds, bytes and Unix time; an interpreter with these tests has some megabytes."""
    found = process_usage()
    assert 0 < found["cpu_seconds_total"] < 1_000_000
    assert time.time() - 86_400 * 30 < found["start_time_seconds"] <= time.time() + 1
    assert 2**22 < found["resident_memory_bytes"] < found["virtual_memory_bytes"]
    assert 2 < found["open_fds"] <= found["max_fds"]
