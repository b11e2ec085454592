# SPDX-License-Identifier: Apache-2.0
"""docs/backup.md: its commands as written take all of a service that is in use to a new nats-server."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Final

import pytest

from mqtt_nats.codec import Ack, Subscription, Will
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.nats import ROOT
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.shell import BUILD_WAIT, Shell, find_nats_cli

PAGE: Final = (ROOT / "docs" / "backup.md").read_text(encoding="utf-8")

KEEP: Final = 3600
"""Seconds for which sessions are kept."""

WAITING: Final = [b"%d" % number for number in range(50)]
"""Messages that wait for an absent client."""

WILL: Final = Will("gone/there", b"lost", 1, False)
"""Will of a client that is connected during the backup."""

LEASE: Final = ("--gateway-lease", "2")


@pytest.fixture
def nats_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the nats CLI on PATH."""
    monkeypatch.setenv("PATH", str(Path(find_nats_cli()).parent), prepend=":")


def commands(title: str) -> list[str]:
    """The commands under a heading of the page."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return "".join(re.findall(r"```sh\n(.*?)```", section, re.DOTALL)).splitlines()


@pytest.mark.long
@pytest.mark.timeout(BUILD_WAIT + 120)
@pytest.mark.usefixtures("nats_cli")
async def test_all_streams_are_restored_into_a_new_server(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """Sessions, their messages and PUBRELs, retained messages and wills are there, and new messages arrive."""
    back_up, restore, serve, *look = commands("Everything, with the nats CLI")
    old = nats_factory()
    gateway = gateway_factory(old, *LEASE)
    async with (
        await RawClient5.connect5(gateway.port, "absent", session_expiry_interval=KEEP) as absent,
        await RawClient5.connect5(gateway.port, "exact", session_expiry_interval=KEEP) as exact,
        await RawClient.connect(gateway.port, "there", clean=False, will=WILL) as there,
        await RawClient.connect(gateway.port, "publisher") as publisher,
    ):
        assert await absent.subscribe5(Subscription("home/#", 1), Subscription("gone/#", 1)) == (1, 1)
        await absent.disconnect5()
        assert await exact.subscribe5(Subscription("exact", 2)) == (2,)
        assert await there.subscribe("home/#", qos=1) == (1,)
        await publisher.deliver("kept", b"before", 1, retain=True)
        await publisher.deliver_all("home/kitchen", WAITING, 1)
        for payload in WAITING:
            await there.receive("home/kitchen", payload)
        await publisher.deliver("exact", b"once", 2)
        packet_id = (await exact.message("exact", b"once")).packet_id
        exact.ack(PUBREC, packet_id)
        await exact.expect_ack(PUBREL, packet_id)
        await asyncio.to_thread(Shell({}, old.url, tmp_path).run, back_up)
    gateway.kill()
    old.discard()

    new = nats_factory()
    shell = Shell({}, new.url, tmp_path)
    await asyncio.to_thread(shell.run, restore)
    assert shell.arguments(serve)[2:] == ["mqtt_nats", "serve", "--nats", new.url]
    port = gateway_factory(new, *LEASE).port
    shown = "".join([await asyncio.to_thread(shell.run, command) for command in look])
    for name in ("absent", "exact", "there", "$MQTT_msgs", "$MQTT_sess"):
        assert name in shown
    async with (
        await RawClient.connect(port, "reader") as reader,
        await RawClient5.connect5(port, "absent", clean=False, session_expiry_interval=KEEP) as absent,
        await RawClient5.connect5(port, "exact", clean=False, session_expiry_interval=KEEP) as exact,
        await RawClient.connect(port, "there", clean=False) as there,
    ):
        assert [one.session_present for one in (absent, exact, there)] == [True] * 3
        for payload in WAITING:
            await absent.receive("home/kitchen", payload)
        await absent.receive("gone/there", b"lost")
        await exact.expect_ack(PUBREL, packet_id)
        exact.ack(PUBCOMP, packet_id)
        await reader.subscribe("kept", qos=1)
        await reader.receive("kept", b"before", retain=True)
        await reader.deliver("home/kitchen", b"after", 1)
        await absent.receive("home/kitchen", b"after")
        await there.receive("home/kitchen", b"after")
        await reader.deliver("exact", b"after", 2)
        asked = await exact.expect(Ack)  # whether the client knows this identifier from after the backup
        assert asked.kind == PUBREL
        exact.ack(PUBCOMP, asked.packet_id)
        await exact.receive("exact", b"after", packet_id=asked.packet_id)
