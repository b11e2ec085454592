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

from mqtt_nats.access.passwords import set_password
from tests.conftest import GatewayFactory
from tests.harness.bystanders import Paho
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
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


def carry(directory: Path, old: int, new: int) -> subprocess.CompletedProcess[str]:
    """Run the program of the page."""
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = directory / "carry.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, str(script), f"127.0.0.1:{old}", f"127.0.0.1:{new}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_who_is_not_let_in_hears_of_it(
    mosquitto: int, nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    users = tmp_path / "users"
    set_password(users, "ann", "secret")
    gateway = gateway_factory(nats_server, "--password-file", str(users))
    done = carry(tmp_path, mosquitto, gateway.port)
    assert done.returncode == 1
    assert f"127.0.0.1:{gateway.port} does not let us in: Not authorized" in done.stderr


def test_retained_messages_are_carried_over(mosquitto: int, gateway: Gateway, tmp_path: Path) -> None:
    with Paho(mosquitto) as publisher:
        for number, (topic, payload) in enumerate(MESSAGES.items()):
            publisher.client.publish(topic, payload, number % 3, retain=True)
        eventually(lambda: len(publisher.acknowledged) == len(MESSAGES))
    done = carry(tmp_path, mosquitto, gateway.port)
    assert (done.stdout, done.stderr, done.returncode) == ("300 retained messages\n", "", 0)
    with Paho(gateway.port) as reader:
        reader.subscribe("home/#", 2)
        eventually(lambda: len(reader.received) == len(MESSAGES))
        assert {topic: tuple(rest) for topic, *rest in reader.received} == {
            topic: (payload, number % 3, True) for number, (topic, payload) in enumerate(MESSAGES.items())
        }
