# SPDX-License-Identifier: Apache-2.0
"""Devices with passwords that all come back at once: everybody gets in, and how long it takes."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.generator.packets import connect
from mqtt_nats.access.passwords import hash_password
from mqtt_nats.access.settings import DEVICE_COST, PEOPLE_COST, Cost
from tests.conftest import GatewayFactory
from tests.harness.nats import NatsServer

pytestmark = pytest.mark.anyio

CLIENTS = 100
"""Some three seconds of computation: on a machine with much else to do, less than the longest wait of a CONNECT."""

DEVICES = 2000
SECONDS_MOST = 10.0
ACCEPTED = bytes((0x20, 2, 0, 0))


def users(path: Path, count: int, cost: Cost) -> Path:
    path.write_text(
        "".join(f"device-{number}:{hash_password(b'pw-%d' % number, cost)}\n" for number in range(count)),
        encoding="utf-8",
    )
    return path


async def log_in(port: int, number: int) -> tuple[bytes, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    name = f"device-{number}"
    writer.write(connect(name, clean=True, user=name, password=f"pw-{number}"))
    return await reader.readexactly(4), writer


async def storm(port: int, count: int) -> tuple[list[bytes], float]:
    """Log all devices in at once, and end their connections; the CONNACKs, and the seconds until the last."""
    begun = time.monotonic()
    found = await asyncio.gather(*(log_in(port, number) for number in range(count)))
    seconds = time.monotonic() - begun
    for _, writer in found:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for _, writer in found))
    return [answer for answer, _ in found], seconds


def report(seconds: Sequence[float], what: str) -> None:
    print(f"\n{what}: {DEVICES} log-ins in {', '.join(f'{one:.1f}' for one in seconds)} s")


@pytest.mark.long
async def test_costly_hashes_make_clients_wait_and_refuse_nobody(
    nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """More log-ins than are verified at the same time: all clients are let in, in their turn."""
    gateway = gateway_factory(nats_server, "--password-file", str(users(tmp_path / "users", CLIENTS, PEOPLE_COST)))
    answers, _ = await storm(gateway.port, CLIENTS)
    assert answers == [ACCEPTED] * CLIENTS


@pytest.mark.soak
async def test_all_devices_of_a_site_are_in_within_ten_seconds(
    nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """With a hash of the default cost for each device, and then from the cache of verified passwords."""
    file = users(tmp_path / "users", DEVICES, DEVICE_COST)
    gateway = gateway_factory(nats_server, "--password-file", str(file))
    process = psutil.Process(gateway.pid)
    took, used = [], []
    for _ in range(2):
        before = sum(process.cpu_times()[:2])
        answers, seconds = await storm(gateway.port, DEVICES)
        assert answers == [ACCEPTED] * DEVICES
        took.append(seconds)
        used.append(sum(process.cpu_times()[:2]) - before)
    report(took, f"{DEVICE_COST}, at first and from the cache")
    report(used, "CPU of the gateway")
    assert max(took) < SECONDS_MOST
