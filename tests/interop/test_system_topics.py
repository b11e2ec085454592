# SPDX-License-Identifier: Apache-2.0
"""`$SYS/#` without rules, with the clients of newcomers: mosquitto_sub, and the first example of paho's README."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.harness.bystanders import Paho
from tests.harness.gateway import Gateway
from tests.harness.waiting import eventually

COUNT = 52
"""Number of messages that mosquitto 2.0.11 sends at once."""


@pytest.mark.skipif(shutil.which("mosquitto_sub") is None, reason="mosquitto's clients are not installed")
def test_mosquitto_sub(gateway: Gateway) -> None:
    command = ["mosquitto_sub", "-p", str(gateway.port), "-t", "$SYS/#", "-v", "-C", str(COUNT), "-W", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    topics = {line.split(" ")[0] for line in done.stdout.splitlines()}
    assert "$SYS/broker/version" in topics
    assert [one for one in topics if "/clients/" in one and one.startswith("$SYS/brokers/")] == []


def test_the_first_example_of_paho(gateway: Gateway) -> None:
    with Paho(gateway.port) as client:
        client.subscribe("$SYS/#")
        eventually(lambda: len(client.received) >= COUNT)
