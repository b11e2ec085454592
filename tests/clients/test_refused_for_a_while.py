# SPDX-License-Identifier: Apache-2.0
"""More clients of MQTT.js than `connect_rate` lets in at once: all are connected in the end, with its defaults."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.clients.build import MissingError
from tests.clients.kit import CLIENTS
from tests.conftest import GatewayFactory
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually

COUNT = 40
PATIENCE = 120.0

PROGRAM = """
const mqtt = require("mqtt");
const [address, version] = process.argv.slice(1);
for (let number = 0; number < COUNT; number++) {
  const client = mqtt.connect(address, { protocolVersion: Number(version) });
  client.once("connect", () => console.log("connected"));
  client.on("error", (error) => console.log("error", error.code));
}
""".replace("COUNT", str(COUNT))


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.parametrize("version", ["4", "5"])
def test_all_are_connected_in_the_end(
    nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path, version: str
) -> None:
    (library,) = (client for client in CLIENTS if client.name == "MQTT.js")
    try:
        command = library.prepare()
    except MissingError as error:
        pytest.skip(str(error))
    gateway = gateway_factory(nats_server, "--temporary-refusals", "close", "--connect-rate", "2")
    output = tmp_path / "output"
    with output.open("wb") as lines:
        words = [command.words[0], "-e", PROGRAM, f"mqtt://127.0.0.1:{gateway.port}", version]
        node = subprocess.Popen(words, stdout=lines, stderr=lines, env={**os.environ, **command.env})
    try:
        eventually(lambda: output.read_text().count("connected") == COUNT, PATIENCE)
        assert not re.search(r"error \d", output.read_text()), "CONNACK with a code"
        assert "is refused: too many connections in a short time" in gateway.log
    finally:
        node.kill()
        node.wait()
