# SPDX-License-Identifier: Apache-2.0
"""The program of docs/migrating.md, from a mosquitto with retained messages to a gateway."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.bystanders import Paho
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT
from tests.harness.process import LoggedProcess
from tests.harness.waiting import eventually, free_port

MOSQUITTO = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")

MESSAGES = {f"home/room{number}/state": b"%d \0 \xff" % number for number in range(300)}


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[int]:
    """Its port."""
    if MOSQUITTO is None:
        pytest.skip("mosquitto is not installed")
    port = free_port()
    config = tmp_path / "mosquitto.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nuser root\npersistence false\n")
    process = LoggedProcess("mosquitto", tmp_path / "mosquitto.log")
    try:
        process.start([MOSQUITTO, "-c", str(config)])
        eventually(lambda: listens(port))
        yield port
    finally:
        process.discard()


def test_retained_messages_are_carried_over(mosquitto: int, gateway: Gateway, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "carry.py"
    script.write_text(program)
    with Paho(mosquitto) as publisher:
        for number, (topic, payload) in enumerate(MESSAGES.items()):
            publisher.client.publish(topic, payload, number % 3, retain=True)
        eventually(lambda: len(publisher.acknowledged) == len(MESSAGES))
    done = subprocess.run(
        [sys.executable, str(script), f"127.0.0.1:{mosquitto}", f"127.0.0.1:{gateway.port}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("300 retained messages\n", "")
    with Paho(gateway.port) as reader:
        reader.subscribe("home/#", 2)
        eventually(lambda: len(reader.received) == len(MESSAGES))
        assert {topic: tuple(rest) for topic, *rest in reader.received} == {
            topic: (payload, number % 3, True) for number, (topic, payload) in enumerate(MESSAGES.items())
        }
