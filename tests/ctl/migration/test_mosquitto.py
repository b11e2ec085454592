# SPDX-License-Identifier: Apache-2.0
"""``migrate mosquitto`` on configurations of others: what a gateway gets, and what has no counterpart."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mqtt_nats.access.acl import Identity, Rules
from mqtt_nats.access.acl_file import load as load_rules
from mqtt_nats.access.passwords import PasswordUsers
from mqtt_nats.access.passwords import load as load_users
from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import Ack, AckRun, Publish
from mqtt_nats.config.settings import Settings
from mqtt_nats.ctl.migration.command import migrate
from mqtt_nats.ctl.migration.transfer.mqtt_client import Broker, connected
from tests.harness.process import LoggedProcess
from tests.harness.waiting import eventually, free_port
from tests.interop.test_carrying import MOSQUITTO, listens

INPUTS = Path(__file__).with_name("inputs")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(migrate, [str(one) for one in arguments])


def moved(name: str, output: Path) -> tuple[dict[str, Any], str]:
    """The settings for the configuration of that name, and what the command says."""
    done = run("mosquitto", INPUTS / name, "--output", output, "--all")
    assert done.exit_code == 0, done.output
    return tomllib.loads((output / "gateway.toml").read_text(encoding="utf-8")), done.output


def said(output: str, place: str) -> str:
    """What is said of a file and line, which must be one finding."""
    (found,) = [line for line in output.splitlines() if f"{place}: " in line]
    return found.partition(f"{place}: ")[2]


def startable(output: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings as a gateway reads them, with an empty file for each certificate."""
    text = (output / "gateway.toml").read_text(encoding="utf-8")
    for word in text.split('"')[1::2]:
        if word.endswith((".pem", ".key", ".crt")):
            (output / Path(word).name).touch()
            text = text.replace(word, Path(word).name)
    (output / "gateway.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(output)
    return Settings.load({}, output / "gateway.toml")


def test_listeners_and_included_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, output = moved("station/mosquitto.conf", tmp_path / "new")
    assert [(one["listen"], one["type"], one["allow_anonymous"]) for one in settings["listeners"]] == [
        ("*:9001", "ws", True),
        ("*:9002", "wss", True),
        ("*:1883", "tcp", True),
        ("*:8883", "tls", True),
    ]
    assert settings["listeners"][3]["tls_cert"] == "/etc/station/certs/station.pem"
    assert settings["session_expiry_interval"] == "4h"
    assert settings["acl_subscribe"] == "deliver"
    assert said(output, "mosquitto.conf:2").startswith("not needed: persistence: ")
    assert said(output, "station.conf:18").startswith("moved: listener 8883: ")
    assert said(output, "station.conf:25").startswith("changes: persistent_client_expiration: ")
    assert startable(tmp_path / "new", monkeypatch).listeners[1].origins == ("*",)


def test_users_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash is carried over, a password that is not hashed is named without showing it."""
    settings, output = moved("home/mosquitto.conf", tmp_path / "new")
    assert settings["password_file"] == "passwords"
    assert [one["allow_anonymous"] for one in settings["listeners"]] == [False]
    users = PasswordUsers(load_users(tmp_path / "new" / "passwords"))
    assert users.verify("1002003004", b"pencil") is not None
    assert users.find("my-dashboard") is None
    assert said(output, "passwordfile:2").startswith("missing: user 'my-dashboard': the user is left out: ")
    assert ":secret" not in output
    startable(tmp_path / "new", monkeypatch)
    for name in ("gateway.toml", "acl.toml", "passwords"):
        assert (tmp_path / "new" / name).stat().st_mode & 0o777 == 0o600


def test_limits_and_settings_of_listeners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, output = moved("factory/mosquitto.conf", tmp_path / "new")
    certificates, plain = settings["listeners"]
    assert certificates["use_identity"] == "cn"
    assert certificates["tls_minimum"] == "1.3"
    assert certificates["tls_client_ca"] == "/mosquitto/config/certs/ca.crt"
    assert (plain["allow_anonymous"], plain["max_connections"], plain["max_qos"]) == (True, 50, 1)
    assert (settings["max_inflight"], settings["max_backlog"], settings["max_queued"]) == (10, 20, 20)
    assert settings["max_packet_size"] == 65_536 + 65_540
    assert settings["server_keep_alive"] == 120
    bound = "changes: max_keepalive: server_keep_alive = 120: the upper bound for 5.0 clients, as there. 3.1.1 clients"
    assert said(output, "factory/mosquitto.conf:26").startswith(bound)
    assert said(output, "acl_file:16").startswith("missing: $share/group/firmware/#: ")
    assert said(output, "acl_file:17").startswith("missing: firmware/%u: ")
    startable(tmp_path / "new", monkeypatch)


VERNEMQ = """listener 1883
password_file {0}/vmq.passwd
acl_file {0}/vmq.acl
"""


def test_the_files_of_vernemq(tmp_path: Path) -> None:
    """They have the formats of mosquitto, so a mosquitto.conf of three lines that names them is enough."""
    hashed = (INPUTS / "home" / "passwordfile").read_text(encoding="utf-8").splitlines()[0].partition(":")[2]
    (tmp_path / "vmq.passwd").write_text(f"lamp:{hashed}\n")
    (tmp_path / "vmq.acl").write_text(
        "# anonymous\ntopic read news/#\nuser lamp\ntopic home/lamp/#\npattern write up/%c\npattern read %m/%u/#\n"
    )
    (tmp_path / "mosquitto.conf").write_text(VERNEMQ.format(tmp_path))
    done = run("mosquitto", tmp_path / "mosquitto.conf", "--output", tmp_path / "new")
    assert done.exit_code == 0, done.output
    assert PasswordUsers(load_users(tmp_path / "new" / "passwords")).verify("lamp", b"pencil") is not None
    rules = load_rules(tmp_path / "new" / "acl.toml")
    lamp = rules.permissions(Identity("lamp", "c-1"))
    assert lamp.may_publish("home/lamp/on", 0, False)
    assert lamp.may_publish("up/c-1", 0, False)
    assert not lamp.may_publish("up/c-2", 0, False)
    assert rules.permissions(Identity(None, "x")).may_subscribe("news/#", 0)
    assert said(done.output, "vmq.acl:6").startswith("missing: %m/%u/#: %m is the mountpoint of VerneMQ")


@pytest.mark.parametrize("value", ["0", "65535"])
def test_a_keep_alive_without_bound(tmp_path: Path, value: str) -> None:
    (tmp_path / "m.conf").write_text(f"listener 1883\nallow_anonymous true\nmax_keepalive {value}\n")
    done = run("mosquitto", tmp_path / "m.conf", "--output", tmp_path / "new", "--all")
    assert "not needed: max_keepalive: there is no upper bound by default" in done.output
    assert "server_keep_alive" not in (tmp_path / "new" / "gateway.toml").read_text()


def test_bridges_and_plugins(tmp_path: Path) -> None:
    """They have no counterpart; no password is shown. Without users nobody could log in, which is said."""
    settings, output = moved("sensors/mosquitto.conf", tmp_path / "new")
    assert settings["max_packet_size"] == 1_048_576
    assert settings["sys_interval"] == 30
    assert "missing: connection cloud: a gateway cannot be a bridge" in output
    assert "not needed: topic u/# out 1" in output
    assert "missing: auth_plugin: " in output
    assert "missing: auth_opt_backends: an option of a plugin" in output
    assert "there is no password_file" in output
    assert "bridge-secret" not in output
    settings, _ = moved("station/local.conf", tmp_path / "local")
    assert settings["listeners"] == [{"listen": "localhost:1886", "type": "tcp", "allow_anonymous": True}]


def test_options_behind_a_bridge_are_those_of_all_clients(tmp_path: Path) -> None:
    """mosquitto gives a bridge its own options only: users, limits and listeners may stand behind it."""
    (tmp_path / "users").write_text("")
    text = (
        "connection cloud\naddress mqtt.example.com\npassword_file users\nallow_anonymous false\n"
        "max_inflight_messages 7\nlistener 1884\ntopic a/# out\nmax_connections 3"
    )
    (tmp_path / "m.conf").write_text(text)
    settings, output = moved(str(tmp_path / "m.conf"), tmp_path / "new")
    assert settings["password_file"] == "passwords"
    assert settings["max_inflight"] == 7
    (listener,) = settings["listeners"]
    assert (listener["allow_anonymous"], listener["max_connections"]) == (False, 3)
    assert said(output, "m.conf:7").startswith("not needed: topic a/# out: stays in mosquitto")


def test_a_listener_ends_with_its_file(tmp_path: Path) -> None:
    """An included file is about the default listener again, which one of its options opens."""
    directory = tmp_path / "conf.d"
    directory.mkdir()
    (directory / "a.conf").write_text("listener 2901")
    (directory / "b.conf").write_text("protocol websockets")
    (tmp_path / "m.conf").write_text(f"include_dir {directory}")
    settings, output = moved(str(tmp_path / "m.conf"), tmp_path / "new")
    assert [(one["listen"], one["type"]) for one in settings["listeners"]] == [
        ("*:1883", "ws"),
        ("*:2901", "tcp"),
    ]
    assert "this option opens the default listener of mosquitto" in output


@pytest.mark.parametrize("line", ["protocol mqtt", "max_connections -1", "require_certificate false"])
def test_a_default_value_opens_no_listener(tmp_path: Path, line: str) -> None:
    (tmp_path / "m.conf").write_text(f"{line}\nlistener 2901")
    settings, _ = moved(str(tmp_path / "m.conf"), tmp_path / "new")
    assert [one["listen"] for one in settings["listeners"]] == ["*:2901"]


def test_only_what_needs_a_look_is_shown(tmp_path: Path) -> None:
    done = run("mosquitto", INPUTS / "station/mosquitto.conf", "--output", tmp_path / "new")
    assert "moved: " not in done.output
    assert "not needed: " not in done.output
    assert "changes: persistent_client_expiration: " in done.output
    assert "\nmoved 20, changes 2, missing 0, not needed 5; --all shows all\n" in done.output
    assert f"written: {tmp_path}/new/acl.toml" in done.output


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "acl.toml").write_text("mine")
    arguments = ("mosquitto", INPUTS / "home/mosquitto.conf", "--output", tmp_path)
    done = run(*arguments)
    assert isinstance(done.exception, StartupError)
    assert str(done.exception) == f"{tmp_path}/acl.toml exists: --force replaces it"
    assert not (tmp_path / "gateway.toml").exists()
    assert (tmp_path / "acl.toml").read_text() == "mine"
    assert run(*arguments, "--force").exit_code == 0
    assert (tmp_path / "acl.toml").read_text() != "mine"


@pytest.mark.parametrize(
    ("text", "place", "finding"),
    [
        ("listener 1883\nfrobnicate true", ":2", "missing: frobnicate: this option is not known here"),
        ("listener 0 /run/mosquitto.sock", ":1", "missing: listener 0 /run/mosquitto.sock: only TCP ports"),
        ("listener 1883\nmax_inflight_messages many", ":2", "missing: max_inflight_messages: 'many' is no number"),
        ("listener 1883\nmax_inflight_messages 0", ":2", "changes: max_inflight_messages: never unlimited"),
        ("listener 1883\nmax_queued_messages 0", ":2", "changes: max_queued_messages: max_backlog is unlimited"),
        (
            "listener 1883\nmax_packet_size 0",
            ":2",
            "changes: max_packet_size: mosquitto takes packets of 256 MB; max_packet_size = 8000000. A",
        ),
        ("persistent_client_expiration soon", ":1", "missing: persistent_client_expiration: 'soon' is no period"),
        ("listener 1883\nprotocol http_api", ":2", "missing: protocol: http_api is not served"),
        ("global_max_connections 10", ":1", "changes: global_max_connections: max_connections is set"),
        ("listener 1883\nstart_type lazy", ":2", "missing: start_type: an option of a bridge, and no connection"),
        ("listener 1883\ntopic a/# out", ":2", "missing: topic: an option of a bridge, and no connection"),
    ],
)
def test_single_lines(tmp_path: Path, text: str, place: str, finding: str) -> None:
    file = tmp_path / "m.conf"
    file.write_text(text)
    done = run("mosquitto", file, "--output", tmp_path / "new", "--all")
    assert said(done.output, f"m.conf{place}").startswith(finding) or finding in done.output


def test_without_a_listener_only_this_machine_connects(tmp_path: Path) -> None:
    (tmp_path / "m.conf").write_text("")
    run("mosquitto", tmp_path / "m.conf", "--output", tmp_path / "new")
    assert Settings.load({}, tmp_path / "new" / "gateway.toml").listen == "127.0.0.1:1883"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("include_dir nowhere", "include_dir nowhere is neither there nor beside the file"),
        ("include_dir .", "more than 200 files are included"),
        ("password_file nowhere", "cannot read nowhere: No such file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.conf").write_text(text)
    done = run("mosquitto", tmp_path / "m.conf", "--output", tmp_path / "new")
    assert isinstance(done.exception, StartupError)
    assert named in str(done.exception)


# -- beside the real one ------------------------------------------------------------------------------

USERS = (None, "factory-backend", "factory-dashboard", "somebody", "station")
TOPICS = (
    "device/dev-1/status", "device/other/status", "device/secret/status", "firmware/a", "firmware/drafts/a",
    "firmware/status", "plans/a", "readwrite plans/a", "station/set/x", "station/get/x",
    "station/command/dev-1/messages/1", "station/command/dev-2/messages/1", "station/system/messages/1",
)  # fmt: skip


@pytest.fixture(params=["factory/acl_file", "station/conf.d/mosquitto.acl", "home/aclfile"])
def judged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, Rules]]:
    """A mosquitto with an ACL file, and the rules that a gateway gets for this file."""
    if MOSQUITTO is None:
        pytest.skip("mosquitto is not installed")
    port = free_port()
    config = tmp_path / "m.conf"
    acl = INPUTS / request.param
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nuser root\nacl_file {acl}\n")
    assert run("mosquitto", config, "--output", tmp_path / "new").exit_code == 0
    process = LoggedProcess("mosquitto", tmp_path / "mosquitto.log")
    try:
        process.start([MOSQUITTO, "-c", str(config)])
        eventually(lambda: listens(port))
        yield port, load_rules(tmp_path / "new" / "acl.toml")
    finally:
        process.discard()


async def permitted(port: int, user: str | None, topics: tuple[str, ...]) -> dict[str, bool]:
    """Which topics mosquitto lets this user publish, by the reason code of PUBACK (5.0)."""
    found = {}
    broker = Broker("127.0.0.1", port, user, None if user is None else b"x", None)
    async with connected(broker, 5, "dev-1") as connection:
        for topic in topics:
            key = len(topic).to_bytes(2) + topic.encode()
            await connection.send(Publish(1, False, False, key, 1, b""))
            answer = await connection.receive()
            assert isinstance(answer, Ack | AckRun)
            found[topic] = not isinstance(answer, Ack) or answer.reason < 0x80
    return found


@pytest.mark.processes
def test_the_rules_decide_as_mosquitto_does(judged: tuple[int, Rules]) -> None:
    port, rules = judged
    for user in USERS:
        known = asyncio.run(permitted(port, user, TOPICS))
        ours = rules.permissions(Identity(user, "dev-1"))
        assert {topic: ours.may_publish(topic, 1, False) for topic in TOPICS} == known, user
