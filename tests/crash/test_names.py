# SPDX-License-Identifier: Apache-2.0
"""A gateway that starts under the name of a dead one publishes that one's wills before it accepts clients."""

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from mqtt_nats.codec import Subscription, Will
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.nats import ROOT
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio


def names(url: str) -> dict[str, dict[str, str]]:
    """The gateways by their names, as ``mqtt-nats ctl cluster status`` knows them."""
    command = [sys.executable, "-m", "mqtt_nats", "ctl", "--nats", url, "cluster", "status", "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60).stdout)
    return {one["name"]: one for one in found["gateways"]}


async def device(port: int, client_id: str, topic: str, clients: list[RawClient5]) -> None:
    """Connect a device that says that it is online, with a will that says that it is not."""
    client = await RawClient5.connect5(port, client_id, will=Will(topic, b"offline", 1, True))
    clients.append(client)
    await client.deliver(topic, b"online", 1, retain=True)


@pytest.fixture
async def clients() -> AsyncIterator[list[RawClient5]]:
    found: list[RawClient5] = []
    yield found
    for client in found:
        client.drop()


async def test_devices_come_back_under_other_client_ids_after_a_power_cut(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, clients: list[RawClient5]
) -> None:
    server = nats_factory()
    gateway = gateway_factory(server, "--name", "cellar")
    for number in range(5):
        await device(gateway.port, f"device-{number}-before", f"devices/{number}", clients)
    server.kill()
    gateway.kill()
    server.start()
    gateway.start()
    for number in range(5):
        await device(gateway.port, f"device-{number}-after", f"devices/{number}", clients)
    assert "had the name of this gateway and is dead" in gateway.log
    await aeventually(lambda: re.search(r"gateway \w+: 5 wills and \d+ sessions were taken over", gateway.log))
    async with await RawClient5.connect5(gateway.port, "watcher") as watcher:
        await watcher.subscribe5(Subscription("devices/+", 1))
        states = await watcher.messages(5)
        assert [one.payload for one in states] == [b"online"] * 5
        await watcher.quiet()


async def test_a_name_that_a_living_gateway_has(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    server = nats_factory()
    gateways = [gateway_factory(server, "--name", "attic"), gateway_factory(server), gateway_factory(server)]
    host = next(name for name in names(server.url) if name != "attic" and not name.endswith("-2"))
    assert set(names(server.url)) == {"attic", host, f"{host}-2"}
    twice = gateway_factory(server, "--name", "attic")
    assert "another gateway has the name attic" in twice.log
    command = [sys.executable, "-m", "mqtt_nats", "ctl", "--nats", server.url]
    status = subprocess.run([*command, "status", "--gateway", f"{host}-2"], capture_output=True, text=True, check=True)
    assert names(server.url)[f"{host}-2"]["id"] in status.stdout
    done = subprocess.run([*command, "status", "--gateway", "attic"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "have the name attic: give one of these ids" in done.stderr
    for one in gateways:
        assert one.term() == 0
