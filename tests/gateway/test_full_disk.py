# SPDX-License-Identifier: Apache-2.0
"""The disk of the embedded nats-server is full: nothing is acknowledged, and all goes on when there is room again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mqtt_nats.gateway.full_disk import FULL_BYTES, FullDisk
from mqtt_nats.lifecycle.readiness import NO_SPACE
from tests.admin.support import address
from tests.conftest import GatewayFactory
from tests.harness import raw
from tests.harness.gateway import Gateway
from tests.harness.raw import Raw, publish
from tests.harness.waiting import eventually

DISK_MIB = 80
MESSAGES_MOST = 20_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system; only root can have one."""
    place = tmp_path / "disk"
    place.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a full disk needs Linux and root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small file system: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(port: int) -> list[bytes]:
    """Publish at QoS 1 until nothing is acknowledged any more; the payloads that were."""
    acknowledged: list[bytes] = []
    with Raw.connected(port, "filler") as client:
        for number in range(1, MESSAGES_MOST):
            payload = b"%d " % number + bytes(8000)
            client.send(publish("full", payload, qos=1, id=number))
            try:
                one = client.receive(3)
            except TimeoutError:
                return acknowledged
            if one is None:
                return acknowledged
            assert one.kind == raw.PUBACK
            acknowledged.append(payload)
    raise AssertionError("the disk was never full")


@pytest.mark.long
def test_it_goes_on_when_there_is_room(disk: Path, gateway_factory: GatewayFactory) -> None:
    """Nothing that was acknowledged is lost, for a session that is away; operators see why nothing is stored."""
    arguments = ["--embedded", "--embedded-port", "0", "--data", str(disk / "data"), "--admin-listen", "127.0.0.1:0"]
    gateway: Gateway = gateway_factory("", *arguments)
    with Raw.connected(gateway.port, "away", clean=False) as client:
        assert client.subscribe(("full", 1)) == [1]
    ballast = disk / "ballast"  # of another program: nats-server takes at most three quarters of the disk by itself
    ballast.write_bytes(bytes((DISK_MIB - 15) * 1024 * 1024))
    acknowledged = fill(gateway.port)
    assert len(acknowledged) > 100
    eventually(lambda: "JetStream storage is full" in gateway.log, 10)

    def reason() -> str:
        return httpx.get(f"{address(gateway)}/readyz", timeout=5).text

    eventually(lambda: "JetStream storage is full" in reason(), 20)
    ballast.unlink()
    eventually(lambda: "nats-server was restarted" in gateway.log, 20)
    eventually(lambda: httpx.get(f"{address(gateway)}/readyz", timeout=5).status_code == 200, 30)
    with Raw.connected(gateway.port, "away", clean=False) as client:
        found: list[bytes] = []
        while len(found) < len(acknowledged):
            one = client.expect(raw.PUBLISH)
            client.send(raw.ack(raw.PUBACK, one.id))
            found.append(one.payload)
        assert found == acknowledged
    with Raw.connected(gateway.port, "later") as client:
        client.send(publish("full", b"again", qos=1, id=1))
        client.expect(raw.PUBACK)
    assert gateway.log.count("JetStream storage is full: the disk") == 1


class TestTheDisk:
    """Small decisions, with a log of our own."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> Path:
        path = tmp_path / "nats-server.log"
        path.write_text("[INF] Starting\n")
        return path

    def test_a_disk_with_room(self, tmp_path: Path, log: Path) -> None:
        looked_at = FullDisk(tmp_path, log)
        assert not looked_at.check_disk()
        assert not looked_at.full

    def test_the_log_tells_of_a_failed_write(self, tmp_path: Path, log: Path) -> None:
        """There is room again before anybody looks."""
        looked_at = FullDisk(tmp_path, log)
        looked_at.check_disk()
        with log.open("a") as file:
            file.write(f"[ERR] write: {NO_SPACE}\n")
        assert looked_at.check_disk()
        assert looked_at.full
        looked_at.restarted()
        assert not looked_at.check_disk()

    def test_a_disk_without_room(self, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The log is on it too: the line may be missing."""
        usual = os.statvfs(tmp_path)
        empty = os.statvfs_result((usual.f_bsize, usual.f_frsize, usual.f_blocks, 0, 0, *list(usual)[5:]))
        looked_at = FullDisk(tmp_path, log)
        monkeypatch.setattr(os, "statvfs", lambda path: empty)
        assert not looked_at.check_disk()
        assert looked_at.full
        monkeypatch.setattr(os, "statvfs", lambda path: usual)
        assert looked_at.check_disk()

    def test_a_directory_that_is_gone(self, tmp_path: Path, log: Path) -> None:
        looked_at = FullDisk(tmp_path / "nowhere", log)
        assert not looked_at.check_disk()
        assert not looked_at.full
        assert FULL_BYTES > 0
