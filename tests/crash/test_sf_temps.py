# SPDX-License-Identifier: Apache-2.0
"""The example `examples/sf_temps.py` while its subscriber and both gateways are killed, again and again."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.sf_temps import compare
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT
from tests.harness.process import LoggedProcess
from tests.harness.waiting import eventually

SCRIPT = ROOT / "examples" / "sf_temps.py"
READINGS = 8759
RATE = 250  # readings per second: each kill is over, also on a busy machine, before all have come

SUBSCRIBER_KILLS = (300, 1100, 2000, 3000, 3600, 5000, 6200, 6800)
GATEWAY_KILLS = (700, 2000, 3300, 4500, 5600, 6600)
"""After how many readings in the history; where both have a number, both die at once."""


class Station:
    """The publisher and the subscriber as processes, on two gateways."""

    def __init__(self, directory: Path, gateways: list[Gateway], qos: int) -> None:
        self.history = directory / "history.jsonl"
        self.publisher = LoggedProcess("publisher", directory / "publisher.log")
        self.subscriber = LoggedProcess("subscriber", directory / "subscriber.log")
        ports = [gateway.port for gateway in gateways]
        self._common = ["--qos", str(qos), "--count", str(READINGS)]
        self._forth = ",".join(f"127.0.0.1:{port}" for port in ports)

    def subscribe(self) -> None:
        """Start the subscriber."""
        command = [sys.executable, str(SCRIPT), "subscribe", *self._common, "--gateways", self._forth]
        self.subscriber.start([*command, "--history", str(self.history)], cwd=ROOT)

    def publish(self) -> None:
        """Start the publisher."""
        command = [sys.executable, str(SCRIPT), "publish", *self._common, "--gateways", self._forth]
        self.publisher.start([*command, "--rate", str(RATE)], cwd=ROOT)

    @property
    def received(self) -> int:
        """Readings in the history, repetitions included."""
        return self.history.read_bytes().count(b'"reading"') if self.history.exists() else 0

    def discard(self) -> None:
        """End both."""
        self.publisher.discard()
        self.subscriber.discard()


@pytest.fixture
def gateways(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> list[Gateway]:
    """Two gateways on one nats-server."""
    nats = nats_factory()
    return [gateway_factory(nats), gateway_factory(nats)]


@pytest.fixture
def station(tmp_path: Path, gateways: list[Gateway], qos: int) -> Iterator[Station]:
    """The two processes of the example, ended with the test."""
    station = Station(tmp_path, gateways, qos)
    try:
        yield station
    finally:
        station.discard()


@pytest.mark.slow
@pytest.mark.parametrize("qos", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_every_reading_survives_the_kills(station: Station, gateways: list[Gateway], qos: int) -> None:
    station.subscribe()
    eventually(lambda: "subscribed" in station.subscriber.text)
    station.publish()
    gateways_killed = 0
    down: Gateway | None = None
    for mark in sorted({*SUBSCRIBER_KILLS, *GATEWAY_KILLS}):
        eventually(lambda mark=mark: station.received >= mark, 30, what=f"reading {mark}")  # type: ignore[misc]
        assert station.received < READINGS, "everything had arrived before the kill"
        kill_subscriber = mark in SUBSCRIBER_KILLS
        if kill_subscriber:
            station.subscriber.send(signal.SIGKILL)
        if mark in GATEWAY_KILLS:
            down = gateways[gateways_killed % 2]
            down.kill()
            gateways_killed += 1
        if kill_subscriber:
            station.subscriber.wait()
            station.subscribe()
        if down is not None:
            down.start()
            down = None
    assert station.publisher.wait(60) == 0, station.publisher.text
    assert station.subscriber.wait(60) == 0, station.subscriber.text

    result = compare(station.history, READINGS)
    published = json.loads(station.publisher.text)
    assert published["published"] == READINGS
    assert published["connections"] > 1, "no kill has hit the publisher's gateway"
    assert result["received"] == READINGS
    assert result["lost"] == result["altered"] == result["out_of_order"] == []
    unexplained = set(result["repeated_without_dup"]) - set(published["resent"])
    assert not unexplained
    if qos == 2:
        assert result["repeated"] == []
