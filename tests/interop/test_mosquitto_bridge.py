# SPDX-License-Identifier: Apache-2.0
"""mosquitto as a bridge to a gateway, with the configuration of docs/bridges.md."""

from __future__ import annotations

import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.backbone.certificates import Authority
from tests.conftest import GatewayFactory
from tests.harness import raw
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.process import LoggedProcess
from tests.harness.raw import Raw, publish
from tests.harness.waiting import eventually, free_port
from tests.transport.support import ports, tls, write_config

MOSQUITTO = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")

pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")

VERSIONS = ["mqttv31", "mqttv311", "mqttv50"]


class Site:
    """A mosquitto that is a bridge to a gateway."""

    def __init__(self, directory: Path, address: str, *, version: str, clean: bool, more: str = "") -> None:
        self.port = free_port()
        self.client_id = f"site-{secrets.token_hex(4)}"
        self.process = LoggedProcess("mosquitto", directory / "mosquitto.log")
        page = (ROOT / "docs" / "bridges.md").read_text(encoding="utf-8")
        config = re.findall(r"```conf\n(.*?)```", page, re.DOTALL)[0]
        for key, value in {
            "address": address,
            "remote_clientid": self.client_id,
            "bridge_protocol_version": version,
            "cleansession": str(clean).lower(),
        }.items():
            config, count = re.subn(rf"^{key} .*$", f"{key} {value}", config, flags=re.MULTILINE)
            assert count == 1, key
        config = re.sub(r"^(topic .*) 1$", r"\1 2", config, flags=re.MULTILINE)
        self._config = directory / "mosquitto.conf"
        self._config.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\nuser root\npersistence false\n"
            f"log_type all\n{config}restart_timeout 1\n{more}"
        )

    def start(self) -> None:
        """Run it until it accepts clients."""
        assert MOSQUITTO is not None
        self.process.start([MOSQUITTO, "-c", str(self._config)])
        eventually(lambda: listens(self.port), what="mosquitto")

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.discard()

    def client(self) -> Raw:
        """A client at the site."""
        return Raw.connected(self.port)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Start a mosquitto: ``site(address, version=..., clean=...)``."""
    sites: list[Site] = []

    def start(address: str, *, version: str = "mqttv311", clean: bool = False, more: str = "") -> Site:
        directory = tmp_path / f"site{len(sites)}"
        directory.mkdir()
        found = Site(directory, address, version=version, clean=clean, more=more)
        sites.append(found)
        found.start()
        return found

    yield start
    for each in sites:
        each.kill()


def messages(client: Raw, last: tuple[str, bytes]) -> list[tuple[str, bytes, bool]]:
    """Topic, payload and RETAIN of what comes, until the last that is expected."""
    found: list[tuple[str, bytes, bool]] = []
    while not found or found[-1][:2] != last:
        one = client.receive()
        assert one is not None
        if one.kind == raw.PUBREL:
            client.send(raw.ack(raw.PUBCOMP, one.id))
        elif one.kind == raw.PUBLISH:
            if one.qos:
                client.send(raw.ack(raw.PUBACK if one.qos == 1 else raw.PUBREC, one.id))
            found.append((one.topic, one.payload, bool(one.first & 1)))
    return found


def send(client: Raw, topic: str, payload: bytes, qos: int, retain: bool = False) -> None:
    """Publish and complete the handshake, whatever comes in between."""
    client.send(publish(topic, payload, qos=qos, id=100, flags=int(retain)))
    for kind in {0: [], 1: [raw.PUBACK], 2: [raw.PUBREC, raw.PUBCOMP]}[qos]:
        while True:
            one = client.receive()
            assert one is not None
            if one.kind == kind:
                break
        if kind == raw.PUBREC:
            client.send(raw.ack(raw.PUBREL, 100))


def state(port: int, client_id: str) -> bytes:
    """What the gateway has retained of a bridge's connection; empty: nothing."""
    topic = f"$SYS/broker/connection/{client_id}/state"
    with Raw.connected(port) as client:
        client.subscribe((topic, 0))
        found = [one for one in client.ping() if one.kind == raw.PUBLISH]
        assert all(one.topic == topic and one.first & 1 for one in found)
        return found[0].payload if found else b""


def retained(port: int, topic: str) -> bytes:
    """What a broker has retained; empty: nothing."""
    with Raw.connected(port) as client:
        client.subscribe((topic, 0))
        found = [one for one in client.ping() if one.kind == raw.PUBLISH]
        return found[0].payload if found else b""


def connected(port: int, one: Site) -> None:
    """Wait until a bridge is connected, and its subscriptions are live."""
    eventually(lambda: state(port, one.client_id) == b"1", what="state of the bridge")
    with one.client() as client, Raw.connected(port) as here:
        client.subscribe(("down/ready", 0))

        def heard() -> bool:
            here.send(publish("down/ready", b"?"))
            here.ping()
            return any(found.kind == raw.PUBLISH for found in client.ping())

        eventually(heard, what="the bridge's subscriptions")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "durable"])
def test_both_directions(gateway: Gateway, site: Callable[..., Site], version: str, clean: bool) -> None:
    """Each QoS each way, once, with RETAIN; what goes both ways does not come back."""
    bridge = site(f"127.0.0.1:{gateway.port}", version=version, clean=clean)
    connected(gateway.port, bridge)
    token = secrets.token_hex(4)
    with bridge.client() as there, Raw.connected(gateway.port) as here, bridge.client() as site_client:
        client = Raw.connected(gateway.port)
        here.subscribe((f"up/{token}", 2), (f"both/{token}", 2))
        there.subscribe((f"down/{token}", 2), (f"both/{token}", 2))
        for qos in (0, 1, 2):
            value, retain = b"%d" % qos, qos > 0
            send(site_client, f"up/{token}", value, qos, retain)
            assert messages(here, (f"up/{token}", value)) == [(f"up/{token}", value, False)]
            send(client, f"down/{token}", value, qos, retain)
            assert messages(there, (f"down/{token}", value)) == [(f"down/{token}", value, False)]
            # Once at each side: what came back would come before the next message.
            for sender in (site_client, client):
                send(sender, f"both/{token}", value, qos)
                for receiver in (here, there):
                    assert messages(receiver, (f"both/{token}", value)) == [(f"both/{token}", value, False)]
        # RETAIN came as it was published: the other side has retained it too, and forgets it when it is removed.
        assert retained(gateway.port, f"up/{token}") == b"2"
        assert retained(bridge.port, f"down/{token}") == b"2"
        send(site_client, f"up/{token}", b"", 1, True)
        send(client, f"down/{token}", b"", 1, True)
        eventually(lambda: not retained(gateway.port, f"up/{token}"), what="removal at the gateway")
        eventually(lambda: not retained(bridge.port, f"down/{token}"), what="removal at the site")
        client.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_site_goes_away_and_comes_back(gateway: Gateway, site: Callable[..., Site], version: str) -> None:
    bridge = site(f"127.0.0.1:{gateway.port}", version=version)
    connected(gateway.port, bridge)
    bridge.kill()
    eventually(lambda: state(gateway.port, bridge.client_id) == b"0", what="the will of the bridge")
    token = secrets.token_hex(4)
    with Raw.connected(gateway.port) as here:
        for number in range(10):
            send(here, f"down/{token}", b"%d" % number, 1 + number % 2, retain=number == 9)
    bridge.start()
    eventually(lambda: retained(bridge.port, f"down/{token}") == b"9", what="what has waited")
    assert state(gateway.port, bridge.client_id) == b"1"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_gateway_goes_away_and_comes_back(
    nats_server: NatsServer, gateway_factory: GatewayFactory, site: Callable[..., Site], version: str
) -> None:
    gateway = gateway_factory(nats_server)
    bridge = site(f"127.0.0.1:{gateway.port}", version=version)
    connected(gateway.port, bridge)
    gateway.kill()
    token = secrets.token_hex(4)
    with bridge.client() as there:
        for number in range(10):
            send(there, f"up/{token}", b"%d" % number, 1, retain=number == 9)
    gateway.start()
    eventually(lambda: retained(gateway.port, f"up/{token}") == b"9", what="what has waited at the site")
    connected(gateway.port, bridge)


def test_over_tls(
    nats_server: NatsServer, gateway_factory: GatewayFactory, site: Callable[..., Site], tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("127.0.0.1")
    config = write_config(tmp_path / "gateway.toml", tls(pair))
    gateway = gateway_factory(nats_server, "--config", config)
    (port,) = ports(gateway, "MQTTS")
    bridge = site(f"127.0.0.1:{port}", more=f"bridge_cafile {authority.file}\nbridge_insecure true\n")
    connected(gateway.port, bridge)


def test_more_waits_than_the_receive_maximum_is_by_default(
    nats_server: NatsServer, gateway_factory: GatewayFactory, site: Callable[..., Site]
) -> None:
    """With the setting that the page names a 5.0 bridge brings all of it."""
    gateway = gateway_factory(nats_server, env={"MQTT_NATS_RECEIVE_MAXIMUM": "65535"})
    more = "max_queued_messages 5000\nmax_inflight_messages 5000\n"
    bridge = site(f"127.0.0.1:{gateway.port}", version="mqttv50", more=more)
    connected(gateway.port, bridge)
    gateway.kill()
    token = secrets.token_hex(4)
    with bridge.client() as there:
        for number in range(2000):
            send(there, f"up/{token}", b"%d" % number, 1, retain=number == 1999)
    gateway.start()
    eventually(lambda: retained(gateway.port, f"up/{token}") == b"1999", what="what has waited at the site")
    assert "Received DISCONNECT" not in bridge.process.text
