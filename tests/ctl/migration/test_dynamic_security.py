# SPDX-License-Identifier: Apache-2.0
"""``migrate mosquitto`` on the file of the plugin dynamic security, compared with a mosquitto that has loaded it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from mqtt_nats.access.acl import Identity, Rules
from mqtt_nats.access.acl_file import load as load_rules
from mqtt_nats.access.passwords import PasswordUsers
from mqtt_nats.access.passwords import load as load_users
from mqtt_nats.ctl.migration.dynamic_security import read_dynamic_security
from mqtt_nats.ctl.migration.findings import Migration
from mqtt_nats.ctl.migration.mosquitto_conf import Directive
from tests.ctl.migration.test_mosquitto import run, said
from tests.harness.process import LoggedProcess
from tests.harness.waiting import eventually, free_port
from tests.interop.test_carrying import MOSQUITTO, listens

PLUGIN: Final = next(
    (str(one) for one in Path("/usr/lib").glob("*/mosquitto_dynamic_security.so")), "mosquitto_dynamic_security.so"
)

ENTRIES: Final = (
    ("sensor", "publishClientSend", "up/#", True, 0),
    ("sensor", "publishClientSend", "up/secret/#", False, 5),
    ("sensor", "subscribeLiteral", "down/+/all", True, 0),
    ("sensor", "subscribePattern", "down/#", False, 0),
    ("reader", "subscribePattern", "up/#", True, 0),
    ("reader", "publishClientReceive", "up/secret/#", False, 0),
    ("reader", "subscribePattern", "down/#", True, 0),
    ("guest", "subscribePattern", "news/#", True, 0),
)

TOPICS: Final = ("up/1", "up/secret/1", "down/1/all", "news/a", "x")
FILTERS: Final = ("up/+", "up/#", "down/+/all", "down/1/all", "news/#", "#", "x")

STRICTER: Final = {("desk", "up/+"), ("desk", "up/#"), ("desk", "#"), ("lamp", "#")}
"""Filters that overlap a denial here: mosquitto denies single messages, or other filters only."""


def document(defaults: dict[str, bool] | None = None) -> dict[str, Any]:
    """The users `lamp` (role `sensor`), `desk` (group `desks` with `reader`, then `sensor`); a group of anonymous."""
    roles: dict[str, list[dict[str, Any]]] = {"sensor": [], "reader": [], "guest": []}
    for role, kind, topic, allow, priority in ENTRIES:
        roles[role].append({"acltype": kind, "topic": topic, "allow": allow, "priority": priority})
    roles["sensor"].append({"acltype": "unsubscribePattern", "topic": "#", "allow": True})
    roles["sensor"].append({"acltype": "publishClientSend", "topic": "$CONTROL/dynamic-security/#", "allow": True})
    return {
        "defaultACLAccess": defaults
        or {"publishClientSend": False, "publishClientReceive": True, "subscribe": False, "unsubscribe": True},
        "clients": [],
        "groups": [
            {
                "groupname": "desks",
                "roles": [{"rolename": "sensor", "priority": 1}, {"rolename": "reader", "priority": 2}],
                "clients": [{"username": "desk"}],
            },
            {"groupname": "guests", "roles": [{"rolename": "guest"}], "clients": []},
        ],
        "roles": [{"rolename": name, "acls": acls} for name, acls in roles.items()],
        "anonymousGroup": "guests",
    }


HASH: Final = {
    "password": "vjhWZ/b7K9MQFKi4I8pDJMQcQhpY9M5rb22xtALhY0wFNMPKNUHHufGXvti4M0KesPjVoWtQYIkNB8DV0jweGA==",
    "salt": "dHdlbHZlIGJ5dGVz",
    "iterations": 101,
}
"""Of the password `pencil`."""


def configured(tmp_path: Path, found: dict[str, Any], port: int = 1883) -> Path:
    found["clients"] = [
        {"username": "lamp", "roles": [{"rolename": "sensor"}], **HASH},
        {"username": "desk", "textname": "Desk", "roles": [], **HASH},
        {"username": "bound", "clientid": "only", "roles": [{"rolename": "guest"}], **HASH},
        {"username": "off", "disabled": True, "roles": [], **HASH},
        {"username": "unset", "roles": []},
    ]
    (tmp_path / "dynamic-security.json").write_text(json.dumps(found))
    config = tmp_path / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\nuser root\nplugin {PLUGIN}\n"
        f"plugin_opt_config_file {tmp_path}/dynamic-security.json\n"
    )
    return config


def test_users(tmp_path: Path) -> None:
    """Their passwords stay valid; disabled ones, and those without a password, are left out."""
    done = run("mosquitto", configured(tmp_path, document()), "--output", tmp_path / "new", "--all")
    assert done.exit_code == 0, done.output
    users = PasswordUsers(load_users(tmp_path / "new" / "passwords"))
    assert users.verify("lamp", b"pencil") is not None
    assert users.verify("lamp", b"pen") is None
    assert users.find("off") is None
    assert users.find("unset") is None
    assert said(done.output, "mosquitto.conf:5") == (
        "moved: plugin_opt_config_file: users to passwords, roles and groups to acl.toml"
    )
    assert "missing: user 'off': the user is disabled, and is left out" in done.output
    assert "missing: user 'unset': the user has no password, and is left out" in done.output
    rules = load_rules(tmp_path / "new" / "acl.toml")
    assert rules.permissions(Identity("bound", "only")).may_subscribe("news/#", 0)
    assert not rules.permissions(Identity("bound", "another")).may_subscribe("news/#", 0)


@pytest.mark.processes
@pytest.mark.skipif(MOSQUITTO is None or not Path(PLUGIN).exists(), reason="mosquitto or its plugin is not installed")
@pytest.mark.parametrize("open_by_default", [False, True])
def test_the_decisions_of_mosquitto(tmp_path: Path, open_by_default: bool) -> None:
    """What the rules allow, a running mosquitto allows; and what it allows that they deny is a denial's doing."""
    defaults = dict.fromkeys(("publishClientSend", "publishClientReceive", "subscribe", "unsubscribe"), True)
    port = free_port()
    config = configured(tmp_path, document(defaults if open_by_default else None), port)
    done = run("mosquitto", config, "--output", tmp_path / "new")
    assert done.exit_code == 0, done.output
    rules = load_rules(tmp_path / "new" / "acl.toml")
    process = LoggedProcess("mosquitto", tmp_path / "mosquitto.log")
    try:
        assert MOSQUITTO is not None
        process.start([MOSQUITTO, "-c", str(config)])
        eventually(lambda: listens(port))
        for user in ("lamp", "desk", None):
            compare(port, user, rules)
    finally:
        process.discard()


def compare(port: int, user: str | None, rules: Rules) -> None:
    names = [] if user is None else ["-u", user, "-P", "pencil"]
    ours = rules.permissions(Identity(user, "c"))
    for topic in TOPICS:
        command = ["mosquitto_pub", "-V", "5", "-p", str(port), *names, "-q", "1", "-t", topic, "-m", "x"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        theirs = "Not authorized" not in done.stderr + done.stdout and done.returncode == 0
        assert ours.may_publish(topic, 1, False) is theirs, (user, topic)
    for topic_filter in FILTERS:
        command = ["mosquitto_sub", "-V", "5", "-p", str(port), *names, "-t", topic_filter, "-E"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        theirs = "denied" not in done.stderr.lower() and "not authorized" not in done.stderr.lower()
        allowed = ours.may_subscribe(topic_filter, 0)
        assert theirs or not allowed, (user, topic_filter)
        if (user, topic_filter) not in STRICTER:
            assert allowed is theirs, (user, topic_filter)


@pytest.mark.parametrize("text", ["", "[]", '{"clients": [{}]}', '{"roles": [{"rolename": "a", "acls": [1]}]}', None])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | None) -> None:
    """It is reported; nobody can log in, and nothing is allowed."""
    config = configured(tmp_path, document())
    if text is None:
        (tmp_path / "dynamic-security.json").unlink()
    else:
        (tmp_path / "dynamic-security.json").write_text(text)
    done = run("mosquitto", config, "--output", tmp_path / "new")
    assert done.exit_code == 0, done.exception
    assert "missing: plugin_opt_config_file: " in done.output
    assert not load_rules(tmp_path / "new" / "acl.toml").permissions(Identity(None, "c")).may_publish("a", 0, False)


def test_the_order_of_roles_and_entries(tmp_path: Path) -> None:
    """By priority, those without one by their names; in a role literal filters before patterns."""
    configured(tmp_path, document())
    migration = Migration()
    config = Directive(tmp_path / "mosquitto.conf", 5, "plugin_opt_config_file", "dynamic-security.json")
    read_dynamic_security(tmp_path / "dynamic-security.json", config, migration)
    found = [
        (one["effect"], one["access"], one["topics"]) for one in migration.rules or () if one.get("user") == ["lamp"]
    ]
    assert found == [
        ("allow", "subscribe", [{"eq": "down/+/all"}]),
        ("deny", "publish", ["up/secret/#"]),
        ("allow", "publish", ["up/#"]),
        ("deny", "subscribe", ["down/#"]),
    ]


def test_the_plugin_without_its_file(tmp_path: Path) -> None:
    config = tmp_path / "mosquitto.conf"
    config.write_text(f"listener 1883\nallow_anonymous false\nplugin {PLUGIN}\n")
    done = run("mosquitto", config, "--output", tmp_path / "new")
    assert "missing: plugin: plugin_opt_config_file is missing" in done.output
    config.write_text("listener 1883\nallow_anonymous false\nplugin other.so\nplugin_opt_config_file /x\n")
    done = run("mosquitto", config, "--output", tmp_path / "new", "--force")
    assert "missing: plugin_opt_config_file: an option of a plugin that is not known here" in done.output


@pytest.mark.parametrize("topic", ["$share/g/up/#", "a/#/b"])
def test_what_has_no_counterpart_allows_nothing(tmp_path: Path, topic: str) -> None:
    found = document()
    found["roles"][0]["acls"] = [
        {"acltype": "publishClientSend", "topic": topic, "allow": False, "priority": 9},
        {"acltype": "publishClientSend", "topic": "up/#", "allow": True},
        {"acltype": "subscribePattern", "topic": topic, "allow": True},
    ]
    done = run("mosquitto", configured(tmp_path, found), "--output", tmp_path / "new")
    assert done.output.count(f"missing: role 'sensor': {topic!r}: ") == 2
    lamp = load_rules(tmp_path / "new" / "acl.toml").permissions(Identity("lamp", "c"))
    assert not lamp.may_publish("up/1", 0, False)


def test_deliveries_that_are_denied_by_default(tmp_path: Path) -> None:
    """A subscription is allowed only if the deliveries of its filter are."""
    found = document({"publishClientSend": False, "publishClientReceive": False, "subscribe": True})
    found["roles"][1]["acls"].append({"acltype": "publishClientReceive", "topic": "down/#", "allow": True})
    done = run("mosquitto", configured(tmp_path, found), "--output", tmp_path / "new")
    desk = load_rules(tmp_path / "new" / "acl.toml").permissions(Identity("desk", "c"))
    assert desk.may_subscribe("down/1", 0)
    assert not desk.may_subscribe("up/1", 0)
    assert not desk.may_subscribe("else", 0)
    assert "no publishClientReceive allows it" in done.output
