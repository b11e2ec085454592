# SPDX-License-Identifier: Apache-2.0
"""Retained messages and sessions that `mqtt-nats migrate` carries over, from a mosquitto to a gateway."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtt_nats.access.passwords import set_password
from mqtt_nats.base.errors import StartupError
from mqtt_nats.ctl.migration.transfer.mosquitto_db import Session, read_sessions
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
    """Its port. It stores its database in the directory of the test when it ends."""
    if MOSQUITTO is None:
        pytest.skip("mosquitto is not installed")
    port = free_port()
    config = tmp_path / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\nuser root\npersistence true\n"
        f"persistence_location {tmp_path}/\nautosave_interval 1\nautosave_on_changes true\n"
    )
    process = LoggedProcess("mosquitto", tmp_path / "mosquitto.log")
    try:
        process.start([MOSQUITTO, "-c", str(config)])
        eventually(lambda: listens(port))
        yield port
    finally:
        process.discard()


def migrate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mqtt_nats", "migrate", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def url(port: int) -> str:
    return f"mqtt://127.0.0.1:{port}"


# -- retained messages ------------------------------------------------------------------------------


def test_who_is_not_let_in_hears_of_it(
    mosquitto: int, nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    users = tmp_path / "users"
    set_password(users, "ann", "secret")
    gateway = gateway_factory(nats_server, "--password-file", str(users))
    done = migrate("retained", url(mosquitto), url(gateway.port))
    assert done.returncode == 1
    refused = f"mqtt-nats: 127.0.0.1:{gateway.port} refuses the client: not authorized (return code 5); name the user"
    assert refused in done.stderr
    (tmp_path / "password").write_text("secret\n")
    new = f"mqtt://ann@127.0.0.1:{gateway.port}"
    done = migrate("retained", url(mosquitto), new, "--new-password-file", tmp_path / "password")
    assert (done.stdout, done.stderr) == ("0 retained messages carried over\n", "")


def test_retained_messages_are_carried_over(mosquitto: int, gateway: Gateway) -> None:
    """With payload and QoS; those that the gateway has already are newer, and stay."""
    with Paho(gateway.port) as publisher:
        publisher.client.publish("home/room7/state", b"newer", 1, retain=True)
        eventually(lambda: len(publisher.acknowledged) == 1)
    with Paho(mosquitto) as publisher:
        for number, (topic, payload) in enumerate(MESSAGES.items()):
            publisher.client.publish(topic, payload, number % 3, retain=True)
        eventually(lambda: len(publisher.acknowledged) == len(MESSAGES))
    done = migrate("retained", url(mosquitto), url(gateway.port))
    expected = "299 retained messages carried over; 1 were there already and stay\n"
    assert (done.stdout, done.stderr, done.returncode) == (expected, "", 0)
    wanted = {topic: (payload, number % 3, True) for number, (topic, payload) in enumerate(MESSAGES.items())}
    assert retained(gateway) == wanted | {"home/room7/state": (b"newer", 1, True)}
    done = migrate("retained", url(mosquitto), url(gateway.port), "--replace", "--filter", "home/room7/#")
    assert done.stdout == "1 retained messages carried over\n"
    assert retained(gateway) == wanted


def retained(gateway: Gateway) -> dict[str, tuple[object, ...]]:
    with Paho(gateway.port) as reader:
        reader.subscribe("home/#", 2)
        eventually(lambda: len(reader.received) == len(MESSAGES))
        return {topic: tuple(rest) for topic, *rest in reader.received}


def test_properties_are_carried_over(mosquitto: int, gateway: Gateway) -> None:
    """Those of the message, as MQTT 5.0 has them; the rest of its expiry too."""
    topic = "home/door"
    properties = ("content-type text/plain", "user-property a b", "message-expiry-interval 1000")
    given = [part for one in properties for part in ("-D", "publish", *one.split())]
    publish = ["mosquitto_pub", "-V", "5", "-p", str(mosquitto), "-t", topic, "-q", "1", "-r", "-m", "shut", *given]
    subprocess.run(publish, check=True, timeout=30)
    assert migrate("retained", url(mosquitto), url(gateway.port)).stdout == "1 retained messages carried over\n"
    found = subprocess.run(
        ["mosquitto_sub", "-V", "5", "-p", str(gateway.port), "-t", topic, "-C", "1", "-F", "%p %C %P %E"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout.split()
    assert found[:3] == ["shut", "text/plain", "a:b"]
    assert 900 <= int(found[3]) <= 1000


# -- sessions ---------------------------------------------------------------------------------------


def away(port: int, client_id: str, user: str | None, *filters: str) -> None:
    """Leave a durable session behind."""
    names = [] if user is None else ["-u", user, "-P", "x"]
    wanted = [part for one in filters for part in ("-t", one)]
    command = ["mosquitto_sub", "-p", str(port), "-i", client_id, "-c", "-q", "1", "-E", *names, *wanted]
    subprocess.run(command, check=True, timeout=30)


def test_sessions_are_carried_over(
    mosquitto: int, nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """From the database of a mosquitto; each belongs to its user, and what its rules deny is named."""
    away(mosquitto, "lamp", "ann", "home/lamp/#", "secret/#")
    away(mosquitto, "door", None, "home/door")
    database = tmp_path / "mosquitto.db"
    eventually(lambda: database.exists() and b"home/door" in database.read_bytes())
    key = tmp_path / "key.json"
    made = migrate("key", key)
    assert made.returncode == 0, made.stderr
    assert key.stat().st_mode & 0o777 == 0o600
    port = free_port()
    users = tmp_path / "users"
    set_password(users, "ann", "pencil")
    (tmp_path / "acl.toml").write_text('[[rules]]\neffect = "allow"\ntopics = "home/#"\n')
    config = tmp_path / "gateway.toml"
    settings = made.stdout.replace("127.0.0.1:18830", f"127.0.0.1:{port}")
    assert tomllib.loads(settings)["listeners"][0]["listen"] == f"127.0.0.1:{port}"
    config.write_text(f'acl_file = "{tmp_path}/acl.toml"\npassword_file = "{users}"\n{settings}')
    gateway = gateway_factory(nats_server, "--config", str(config))
    done = migrate("sessions", database, url(port), "--key", key)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "not carried over: session 'lamp': the subscription 'secret/#' is refused",
        "2 sessions carried over",
    ]
    ann = ["-p", str(gateway.port), "-u", "ann", "-P", "pencil", "-q", "1"]
    subprocess.run(["mosquitto_pub", *ann, "-t", "home/lamp/1", "-m", "on"], check=True, timeout=30)
    back = ["mosquitto_sub", *ann, "-i", "lamp", "-c", "-t", "home/lamp/#", "-C", "1", "-W", "20"]
    assert subprocess.run(back, check=True, capture_output=True, text=True, timeout=30).stdout == "on\n"
    done = migrate("sessions", database, url(port), "--key", key)
    assert "0 sessions carried over; 2 were there already and stay" in done.stdout


def test_a_list_of_sessions(gateway: Gateway, tmp_path: Path) -> None:
    listed = tmp_path / "sessions"
    listed.write_text("# client, user, QoS, filter\nbell\t-\t1\thome/lamp\nbell\t-\t0\tnews/#\n")
    assert read_sessions(listed) == {"bell": Session(None, {"home/lamp": 1, "news/#": 0})}
    done = migrate("sessions", listed, url(gateway.port))
    assert (done.stdout, done.stderr) == ("1 sessions carried over\n", "")
    away(gateway.port, "bell", None, "home/lamp")


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"lamp home/#\n", "line 1: expected client id, user or -, QoS and filter, with tabs"),
        (b"lamp\t-\t3\thome/#\n", "line 1: expected client id"),
        (b"\x00\xb5\x00mosquitto db\0\0\0\0\0\0\0\4", "its format is 4, and 5 and 6 are known"),
        (b"\x00\xb5\x00mosquitto db\0\0\0\0\0\0\0\6\0\0\0\6\0\0\0\7", "it ends within a chunk"),
        (b"\x00\xb5\x00mosquitto db\0\0\0\0\0\0\0\6\0\0\0\6\0\0\0\1x", "is no database of mosquitto that can be"),
        (b"\x00\xb5\x00mosquitto db", "is no database of mosquitto that can be read"),
    ],
)
def test_lists_that_are_refused(tmp_path: Path, data: bytes, named: str) -> None:
    file = tmp_path / "sessions"
    file.write_bytes(data)
    with pytest.raises(StartupError) as caught:
        read_sessions(file)
    assert named in str(caught.value)
