# SPDX-License-Identifier: Apache-2.0
"""A whole mosquitto in use moves to a gateway: configuration, users, rules, retained and waiting messages, sessions.

It has TLS, a bridge, patterns, the plugin dynamic security, a list of devices of 1.15 MB as zigbee2mqtt retains it, and
a publisher at 50 messages per second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from mqtt_nats.ctl.migration.transfer.mosquitto_db import Database, read_sessions
from tests.backbone.certificates import Authority
from tests.conftest import GatewayFactory
from tests.ctl.migration.test_dynamic_security import HASH, PLUGIN
from tests.gateway.test_payload_limits import ZIGBEE
from tests.harness.nats import NatsServer
from tests.harness.process import LoggedProcess
from tests.harness.waiting import eventually, free_port
from tests.interop.test_carrying import MOSQUITTO, listens, migrate

CONFIG: Final = """user root
per_listener_settings false
allow_anonymous false
password_file {0}/users
acl_file {0}/acl
plugin {plugin}
plugin_opt_config_file {0}/dynamic-security.json
persistence true
persistence_location {0}/
autosave_interval 1800

listener {plain} 127.0.0.1

listener {tls} 127.0.0.1
certfile {0}/broker.pem
keyfile {0}/broker-key.pem

connection site
address 127.0.0.1:{site}
topic site/# out 1
"""

ACL: Final = """user mover
topic readwrite #
user zigbee
topic readwrite zigbee2mqtt/#
user plant
topic write live/#
pattern readwrite own/%u/#
"""

DYNAMIC: Final = {
    "defaultACLAccess": {"publishClientSend": False, "publishClientReceive": True, "subscribe": False},
    "clients": [{"username": "dyn", "roles": [], **HASH}],
    "groups": [{"groupname": "readers", "roles": [{"rolename": "news"}], "clients": [{"username": "dyn"}]}],
    "roles": [{"rolename": "news", "acls": [{"acltype": "subscribePattern", "topic": "news/#", "allow": True}]}],
}

USERS: Final = ("mover", "zigbee", "plant", "ann")
PASSWORD: Final = "pencil"


class Broker:
    """The mosquitto that moves."""

    def __init__(self, directory: Path, site: int) -> None:
        self.directory = directory
        self.plain, self.tls = free_port(), free_port()
        authority = Authority(directory)
        authority.issue("broker")
        self.ca = authority.file
        for name in USERS:
            more = [] if (directory / "users").exists() else ["-c"]
            subprocess.run(["mosquitto_passwd", *more, "-b", directory / "users", name, PASSWORD], check=True)
        (directory / "acl").write_text(ACL)
        (directory / "dynamic-security.json").write_text(json.dumps(DYNAMIC))
        (directory / "password").write_text(PASSWORD + "\n")
        self.config = directory / "mosquitto.conf"
        ports = {"plain": self.plain, "tls": self.tls, "site": site}
        self.config.write_text(CONFIG.format(directory, plugin=PLUGIN, **ports))
        self.process = LoggedProcess("mosquitto", directory / "mosquitto.log")

    def start(self) -> None:
        assert MOSQUITTO is not None
        self.process.start([MOSQUITTO, "-c", str(self.config)])
        eventually(lambda: listens(self.plain) and listens(self.tls))

    def saved(self) -> Database:
        """Its database, which it writes now."""
        os.kill(self.process.pid, signal.SIGUSR1)
        database = self.directory / "mosquitto.db"
        return read_sessions(database) if database.exists() else Database()


class Plant:
    """A publisher of 50 messages per second, all of them retained."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._end = threading.Event()
        self.count = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        eventually(lambda: self.count > 50)
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        client = mqtt.Client(CallbackAPIVersion.VERSION2)
        client.username_pw_set("plant", PASSWORD)
        client.connect("127.0.0.1", self._port)
        client.loop_start()
        while not self._end.wait(0.02):
            self.count += 1
            client.publish(f"live/{self.count % 10}", b"%d" % self.count, 1, retain=True)
        client.disconnect()
        client.loop_stop()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    if MOSQUITTO is None or not Path(PLUGIN).exists():
        pytest.skip("mosquitto or its plugin is not installed")
    site = free_port()
    (tmp_path / "site.conf").write_text(f"listener {site} 127.0.0.1\nallow_anonymous true\nuser root\n")
    other = LoggedProcess("site", tmp_path / "site.log")
    made = Broker(tmp_path, site)
    try:
        other.start([MOSQUITTO, "-c", str(tmp_path / "site.conf")])
        made.start()
        yield made
    finally:
        made.process.discard()
        other.discard()


def command(program: str, port: int, user: str, topic: str, *more: str | Path) -> list[str]:
    return [program, "-h", "127.0.0.1", "-p", str(port), "-u", user, "-P", PASSWORD, "-t", topic, *map(str, more)]


def ran(arguments: list[str]) -> str:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True).stdout


def filled(broker: Broker) -> None:
    """What zigbee2mqtt retains, sessions of two users, and the messages that wait for them."""
    devices = broker.directory / "devices"
    devices.write_bytes(b"x" * ZIGBEE)
    ran(command("mosquitto_pub", broker.plain, "zigbee", "zigbee2mqtt/bridge/devices", "-q", "1", "-r", "-f", devices))
    away = ("-c", "-E", "-q", "2")
    ran(command("mosquitto_sub", broker.plain, "ann", "own/ann/#", "-i", "plc", *away))
    ran(command("mosquitto_sub", broker.plain, "dyn", "news/#", "-i", "desk", "-V", "5", "-x", "5000", *away))
    for number in range(6):
        qos = str(1 + number % 2)
        ran(command("mosquitto_pub", broker.plain, "ann", "own/ann/set", "-q", qos, "-m", str(number)))
    ran(command("mosquitto_pub", broker.plain, "mover", "news/today", "-q", "1", "-m", "fine"))


def converted(broker: Broker, key: Path) -> tuple[Path, int, int]:
    """The configuration of the gateway with other ports, and these: TLS, and the listener for the key."""
    output = broker.directory / "gateway"
    done = migrate("mosquitto", broker.config, "--output", output)
    assert done.returncode == 0, done.stderr
    for said in (
        "missing: connection site: a gateway cannot be a bridge",
        "changes: plugin: its users, groups and roles are moved",
        "changes: no max_packet_size: mosquitto takes packets of 256 MB; max_packet_size = 8000000",
    ):
        assert said in done.stdout
    made = migrate("key", key).stdout
    plain, tls, carrying = free_port(), free_port(), free_port()
    text = (output / "gateway.toml").read_text().replace(f":{broker.plain}", f":{plain}")
    text = text.replace(f":{broker.tls}", f":{tls}") + made.replace(":18830", f":{carrying}")
    text = text.replace('"passwords"', f'"{output}/passwords"').replace('"acl.toml"', f'"{output}/acl.toml"')
    (output / "gateway.toml").write_text(text)
    return output / "gateway.toml", tls, carrying


def test_a_broker_in_use_moves(broker: Broker, nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    filled(broker)
    key = broker.directory / "key.json"
    config, tls, carrying = converted(broker, key)
    gateway = gateway_factory(nats_server, "--config", str(config))
    secure = ("--cafile", broker.ca)
    names = ("--old-ca", broker.ca, "--new-ca", broker.ca)
    passwords = [f"--{which}-password-file={broker.directory}/password" for which in ("old", "new")]
    with Plant(broker.plain) as plant:
        began = plant.count
        urls = [f"mqtts://mover@127.0.0.1:{port}" for port in (broker.tls, tls)]
        done = migrate("retained", *urls, *names, *passwords)
        assert plant.count > began
    assert (done.stdout, done.stderr, done.returncode) == ("11 retained messages carried over\n", "", 0)
    eventually(lambda: len(broker.saved().messages) == 7)
    broker.process.discard()
    done = migrate("sessions", broker.directory / "mosquitto.db", f"mqtt://127.0.0.1:{carrying}", "--key", key)
    lost, *carried = done.stdout.splitlines()
    assert lost.startswith("not carried over: session 'local.")
    assert lost.endswith(".site': the subscription 'site/#' is refused"), "the bridge stays with its mosquitto"
    assert carried == ["3 sessions carried over", "7 waiting messages carried over"]
    # Clients come back, over TLS, with their passwords and rights.
    zigbee = command("mosquitto_sub", tls, "zigbee", "zigbee2mqtt/#", "-q", "1", "-C", "1", "-F", "%r %q %l", *secure)
    assert ran(zigbee) == f"1 1 {ZIGBEE}\n"
    back = ("-c", "-q", "2", "-F", "%t %p", "-W", "20")
    plc = ran(command("mosquitto_sub", tls, "ann", "own/ann/#", "-i", "plc", "-C", "6", *back, *secure)).splitlines()
    assert sorted(plc) == [f"own/ann/set {number}" for number in range(6)]
    assert [one for one in plc if int(one[-1]) % 2] == [f"own/ann/set {number}" for number in (1, 3, 5)]
    assert [one for one in plc if not int(one[-1]) % 2] == [f"own/ann/set {number}" for number in (0, 2, 4)]
    new = ("-V", "5", "-x", "5000")
    assert ran(command("mosquitto_sub", tls, "dyn", "news/#", "-i", "desk", "-C", "1", *back, *new, *secure)) == (
        "news/today fine\n"
    )
    for user, topic in (("ann", "own/bob/set"), ("plant", "own/ann/set"), ("dyn", "news/today")):
        denied = command("mosquitto_pub", tls, user, topic, "-V", "5", "-q", "1", "-m", "x", *secure)
        found = subprocess.run(denied, capture_output=True, text=True, timeout=30, check=False)
        assert "Not authorized" in found.stderr + found.stdout
    assert "Limits in bytes" not in gateway.log
