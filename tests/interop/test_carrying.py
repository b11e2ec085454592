# SPDX-License-Identifier: Apache-2.0
"""Retained messages and sessions that `mqtt-nats migrate` carries over, from a mosquitto to a gateway."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from mqtt_nats.access.passwords import set_password
from mqtt_nats.base.errors import StartupError
from mqtt_nats.ctl.migration.transfer.mosquitto_db import Database, Session, read_sessions
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
def mosquitto(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    """Its port. It stores its database in the directory of the test at each change, or has a parameter's options."""
    if MOSQUITTO is None:
        pytest.skip("mosquitto is not installed")
    port = free_port()
    config = tmp_path / "mosquitto.conf"
    persistence = f"persistence true\npersistence_location {tmp_path}/\nautosave_interval 1\nautosave_on_changes true\n"
    options = getattr(request, "param", persistence)
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nuser root\n{options}\n")
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


class LivePublisher:
    """Publishes 50 messages in a second at a broker, every second one retained, all at QoS 1, until it is closed."""

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
        with Paho(self._port) as publisher:
            while not self._end.wait(0.02):
                self.count += 1
                publisher.publish(f"live/{self.count % 10}", b"%d" % self.count, 1, retain=self.count % 2 == 0)


@pytest.mark.parametrize("mosquitto", ["persistence false"], indirect=True)
def test_retained_messages_of_a_broker_in_use(mosquitto: int, gateway: Gateway) -> None:
    """Live messages neither keep the command from its end nor are copied.

    There are more at QoS 1 and 2 than mosquitto queues for one subscription (20 and 1,000).
    """
    wanted = {f"used/{number}": (b"%d" % number, number % 3, True) for number in range(4000)}
    with Paho(mosquitto) as publisher, LivePublisher(mosquitto) as live:
        for topic, (payload, qos, _) in wanted.items():
            publisher.client.publish(topic, payload, qos, retain=True)
        eventually(lambda: len(publisher.acknowledged) == len(wanted))
        began = live.count
        done = migrate("retained", url(mosquitto), url(gateway.port), "--filter", "used/#", "--filter", "live/#")
        assert live.count > began
    assert (done.stdout, done.stderr, done.returncode) == ("4005 retained messages carried over\n", "", 0)
    with Paho(gateway.port) as reader:
        reader.subscribe("used/#", 2)
        eventually(lambda: len(reader.received) == len(wanted))
        assert {topic: tuple(rest) for topic, *rest in reader.received} == wanted
    with Paho(gateway.port) as reader:
        reader.subscribe("live/#", 2)
        eventually(lambda: len(reader.received) == 5)
        assert {topic for topic, *_ in reader.received} == {f"live/{number}" for number in range(0, 10, 2)}


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


@pytest.mark.skipif(shutil.which("mosquitto_sub") is None, reason="mosquitto's clients are not installed")
def test_a_list_of_sessions(gateway: Gateway, tmp_path: Path) -> None:
    listed = tmp_path / "sessions"
    listed.write_text("# client, user, QoS, filter\nbell\t-\t1\thome/lamp\nbell\t-\t0\tnews/#\n")
    assert read_sessions(listed) == Database({"bell": Session(None, {"home/lamp": 1, "news/#": 0})})
    done = migrate("sessions", listed, url(gateway.port))
    assert (done.stdout, done.stderr) == ("1 sessions carried over\n", "")
    away(gateway.port, "bell", None, "home/lamp")


def publish(port: int, topic: str, payload: str, qos: int, *more: str, user: str = "") -> None:
    names = ["-u", user, "-P", "x"] if user else []
    command = ["mosquitto_pub", "-p", str(port), "-t", topic, "-m", payload, "-q", str(qos), *names, *more]
    subprocess.run(command, check=True, timeout=30)


def came(port: int, client_id: str, count: int, *options: str) -> list[str]:
    """What comes to a client that returns, and that no more comes.

    Messages that it has acknowledged may come once more to a connection that follows at once: nats-server may change a
    consumer before it has processed the acknowledgements on their way.
    """
    command = ["mosquitto_sub", "-p", str(port), "-i", client_id, "-c", "-q", "2", "-t", "never", "-F", "%t %p %q"]
    found: list[str] = []
    if count:
        wanted = [*command, "-C", str(count), "-W", "20", *options]
        found = subprocess.run(wanted, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()

    def more() -> list[str]:
        again = [*command, "-W", "1", *options]
        return subprocess.run(again, capture_output=True, text=True, timeout=30, check=False).stdout.splitlines()

    late = more()
    assert set(late) <= {one for one in found if one.endswith(" 1")}, late
    assert not late or more() == []
    return found


def test_waiting_messages_are_carried_over(
    mosquitto: int, nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """QoS 1 and 2, in order, with properties and the rest of their expiry; to each session only what waits for it.

    Clients and sessions that the gateway has already, and a session of mosquitto whose client has had a message that
    waits for another one, get none of them again.

    A session of a 5.0 client keeps its expiry and the options of its subscriptions.
    """
    gateway = gateway_factory(nats_server, "--carried-messages")
    away(gateway.port, "moved", None, "wait/#")
    publish(gateway.port, "wait/retained", "the client has had it at mosquitto", 1, "-r")
    away(mosquitto, "first", None, "wait/#")
    expiring = ("-D", "publish", "message-expiry-interval")
    for number in range(51):
        publish(mosquitto, f"wait/{number % 3}", str(number), 1 + number % 2)
    publish(mosquitto, "wait/short", "gone", 1, "-V", "5", *expiring, "1")
    publish(mosquitto, "wait/long", "kept", 1, "-V", "5", *expiring, "1000", "-D", "publish", "content-type", "text")
    new = ["-V", "5", "-x", "5000", "-D", "subscribe", "subscription-identifier", "7"]
    command = ["mosquitto_sub", "-p", str(mosquitto), "-i", "second", "-c", "-q", "2", "-E", "-t", "wait/+", *new]
    subprocess.run(command, check=True, timeout=30)
    publish(mosquitto, "wait/0", "both", 2)
    away(mosquitto, "third", None, "wait/#")
    away(mosquitto, "other", None, "else")
    database = tmp_path / "mosquitto.db"

    def saved() -> tuple[int, int]:
        found = read_sessions(database) if database.exists() else Database()
        return len(found.messages), len(found.sessions)

    eventually(lambda: saved() == (53, 4))
    with Paho(gateway.port) as connected:
        connected.subscribe("wait/#", 1)
        eventually(lambda: len(connected.received) == 1)  # the retained message
        done = migrate("sessions", database, url(gateway.port))
        said = "4 sessions carried over\n53 waiting messages carried over"
        assert (done.stdout.partition("; 1 have expired")[0].rstrip(), done.stderr, done.returncode) == (said, "", 0)
        publish(gateway.port, "wait/last", "new", 1)
        eventually(lambda: connected.received[-1][0] == "wait/last")
        assert len(connected.received) == 2
    wanted = [f"wait/{number % 3} {number} 1" for number in range(51)]
    last = "wait/last new 1"
    assert came(gateway.port, "first", 54) == [*wanted, "wait/long kept 1", "wait/0 both 1", last]
    assert sorted(came(gateway.port, "second", 2, *new[:4])) == ["wait/0 both 2", last]
    assert came(gateway.port, "third", 1) == [last]
    assert came(gateway.port, "moved", 2) == ["wait/retained the client has had it at mosquitto 1", last]
    done = migrate("sessions", database, url(gateway.port))
    said = (
        "0 sessions carried over; 4 were there already and stay\n0 waiting messages carried over; 53 wait for sessions"
    )
    assert done.stdout.startswith(f"{said} that were there already")
    assert came(gateway.port, "first", 0) == []


def test_waiting_messages_are_published_by_their_publishers(
    mosquitto: int, nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """The rules of a gateway hold for each of them; what they deny is named."""
    away(mosquitto, "bulb", "ann", "home/#")
    for number, user in enumerate(("bob", "eve", "bob")):
        publish(mosquitto, "home/lamp", f"{user}{number}", 1, user=user)
    database = tmp_path / "mosquitto.db"
    eventually(lambda: database.exists() and len(read_sessions(database).messages) == 3)
    key = tmp_path / "key.json"
    port = free_port()
    settings = migrate("key", key).stdout.replace("127.0.0.1:18830", f"127.0.0.1:{port}")
    (tmp_path / "acl.toml").write_text(
        '[[rules]]\neffect = "allow"\nuser = "ann"\naccess = "subscribe"\ntopics = ["home/#", "never"]\n'
        '[[rules]]\neffect = "allow"\nuser = "bob"\naccess = "publish"\ntopics = "home/#"\n'
    )
    users = tmp_path / "users"
    set_password(users, "ann", "x")
    config = tmp_path / "gateway.toml"
    config.write_text(f'acl_file = "{tmp_path}/acl.toml"\npassword_file = "{users}"\n{settings}')
    gateway = gateway_factory(nats_server, "--config", str(config))
    done = migrate("sessions", database, url(port), "--key", key)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "1 sessions carried over",
        "not carried over: home/lamp: refused: not authorized (reason code 0x87)",
        "2 waiting messages carried over",
    ]
    assert came(gateway.port, "bulb", 2, "-u", "ann", "-P", "x") == ["home/lamp bob0 1", "home/lamp bob2 1"]


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
