# SPDX-License-Identifier: Apache-2.0
"""Messages above a megabyte: two limits in two programs, what is said when they disagree, and large ones that work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqtt_nats.client.connect import HEADED
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.payload_limits import ADVISED, SERVER_PAYLOAD_MOST, USUAL, advice, disagreement, wanted_payload
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.bystanders import Paho
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually

ZIGBEE = 1_146_253
"""Bytes of the list of 230 devices that zigbee2mqtt retains."""


def settings(**given: Any) -> Settings:
    return Settings.load(given)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ("64KiB", USUAL),
        ("1MiB", USUAL + HEADED),
        ("2MiB", 2 * USUAL + HEADED),
        ("64MiB", SERVER_PAYLOAD_MOST),
        ("200MiB", SERVER_PAYLOAD_MOST),
    ],
)
def test_what_the_embedded_server_takes(size: str, wanted: int) -> None:
    assert wanted_payload(settings(max_packet_size=size)) == wanted


def test_a_listener_with_larger_packets_counts(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('[[listeners]]\nlisten = "127.0.0.1:1"\nmax_packet_size = "3MiB"\n', encoding="utf-8")
    found = Settings.load({}, file)
    assert wanted_payload(found) == 3 * USUAL + HEADED
    assert disagreement(found, 3 * USUAL) == ""
    assert disagreement(found, USUAL).startswith("max_packet_size is 3,145,728 bytes, and nats-server takes 1,048,576 ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ""),
        ({"max_packet_size": "2MiB"}, "max_packet_size is 2,097,152 bytes: nats-server needs max_payload of 2,102,272"),
        ({"max_packet_size": "2MiB", "embedded": True}, ""),
        ({"max_packet_size": ADVISED + 1, "embedded": True}, "max_packet_size is 8,388,609 bytes: nats-server advises"),
        (
            {"max_packet_size": SERVER_PAYLOAD_MOST, "embedded": True},
            "max_packet_size is 67,108,864 bytes, and nats-server takes at",
        ),
        (
            {"max_packet_size": SERVER_PAYLOAD_MOST},
            "max_packet_size is 67,108,864 bytes, and nats-server takes at most 67,108,864",
        ),
    ],
)
def test_what_check_config_says(given: dict[str, Any], said: str) -> None:
    found = advice(settings(**given))
    assert found.startswith(said)
    assert bool(found) == bool(said)


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_the_shipped_server_takes_large_messages(
    nats_server: NatsServer, gateway_factory: GatewayFactory, qos: int
) -> None:
    """Retained, and for subscribers: the list of devices, and seven megabytes."""
    gateway = gateway_factory(nats_server, "--max-packet-size", "8MB")
    assert "max_payload" not in gateway.log
    with Paho(gateway.port) as reader, Paho(gateway.port) as publisher:
        reader.subscribe(f"bridge{qos}/#", qos)
        for topic, size in ((f"bridge{qos}/devices", ZIGBEE), (f"bridge{qos}/large", 7_000_000)):
            publisher.publish_acknowledged(topic, b"x" * size, qos, retain=True)
        eventually(lambda: len(reader.received) == 2)
        assert [len(payload) for _, payload, *_ in reader.received] == [ZIGBEE, 7_000_000]
        with Paho(gateway.port) as later:
            later.subscribe(f"bridge{qos}/devices", qos)
            eventually(lambda: later.received)
            assert [(len(payload), level, kept) for _, payload, level, kept in later.received] == [(ZIGBEE, qos, True)]


def test_the_embedded_server_takes_them_too(gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    more = ("--embedded", "--embedded-port", "0", "--data", str(tmp_path / "data"), "--max-packet-size", "2MiB")
    gateway = gateway_factory("", *more)
    with Paho(gateway.port) as publisher, Paho(gateway.port) as reader:
        publisher.publish_acknowledged("bridge/devices", b"x" * ZIGBEE, 1, retain=True)
        reader.subscribe("bridge/devices", 1)
        eventually(lambda: reader.received)
    assert "max_payload" not in gateway.log


@pytest.mark.parametrize(
    ("config", "size"), [("max_payload: 1MB", "8MB"), ("max_payload: 8MB", "1MiB")], ids=["nats-server", "gateway"]
)
def test_the_log_names_the_settings(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, config: str, size: str
) -> None:
    """A 3.1.1 client learns nothing when it is disconnected, and sends the message at each connection."""
    gateway = gateway_factory(nats_factory(config=config), "--max-packet-size", size)
    disagree = "max_packet_size is 8,000,000 bytes, and nats-server takes 1,048,576 with headers (max_payload)"
    assert (disagree in gateway.log) == (size == "8MB")
    remedy = "set max_payload of nats-server to 8,005,120 [gateway="
    assert (remedy in gateway.log) == (size == "8MB"), "the line is cut"
    with Paho(gateway.port, "zigbee2mqtt") as publisher:
        publisher.publish("bridge/devices", b"x" * ZIGBEE, 1, retain=True)
        eventually(lambda: len(publisher.disconnections) > 1)
    limits = f"max_packet_size {8_000_000 if size == '8MB' else USUAL} of the gateway, max_payload "
    (line,) = [one for one in gateway.log.splitlines() if "Limits in bytes" in one]
    assert "WARNING" in line
    assert "zigbee2mqtt" in line
    assert limits in line
