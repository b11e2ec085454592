# SPDX-License-Identifier: Apache-2.0
"""``migrate nats`` on the configuration of a nats-server with an MQTT listener."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.ctl.migration.nats_conf import read_nats
from tests.ctl.migration.test_mosquitto import INPUTS, run, said

CONFIG = INPUTS / "exports" / "nats.conf"


def test_what_changes() -> None:
    done = run("nats", CONFIG, "--all")
    assert done.exit_code == 0, done.output
    assert said(done.output, "nats.conf:18") == "moved: mqtt.listen: listen of the gateway"
    assert said(done.output, "nats.conf:26").startswith("changes: mqtt.reject_qos2_publish: ")
    assert said(done.output, "nats.conf:27") == "missing: mqtt.flux_capacitor: this option is not known here"
    assert said(done.output, "nats.conf:29").startswith("changes: mappings: repeat the mappings")
    assert done.output.count('add "STANDARD", and have nats-server read the file again') == 2
    assert "user admin" not in done.output
    assert "passw0rd" not in done.output
    assert "nothing" not in run("nats", CONFIG).output
    assert "moved: mqtt" not in run("nats", CONFIG).output


def test_names_of_accounts_are_as_they_are_written(tmp_path: Path) -> None:
    """nats-server tells upper from lower case in them, but not in its options."""
    file = tmp_path / "n.conf"
    file.write_text(
        "MQTT { Port: 1883 }\nJetStream: enabled\n"
        "accounts { Plant { Users [ {user: a, allowed_connection_types: [MQTT]} ] } plant { users [ {user: b} ] } }\n"
    )
    output = run("nats", file, "--all").output
    assert "moved: mqtt.Port: listen of the gateway" in output
    assert "changes: account Plant: user a: add" in output
    assert "changes: account Plant, account plant: one gateway serves one account" in output


def test_variables_of_an_included_file(tmp_path: Path) -> None:
    (tmp_path / "more.conf").write_text("HOST = h\n")
    file = tmp_path / "n.conf"
    file.write_text("include 'more.conf'\nmqtt { host: $HOST }\n")
    mqtt = read_nats(file).get("mqtt")
    assert mqtt is not None
    assert mqtt.value["host"].value == "h"


def test_values_and_variables(tmp_path: Path) -> None:
    (tmp_path / "more.conf").write_text('port = 1884; perms: { publish: "a b" }\n')
    file = tmp_path / "n.conf"
    file.write_text(
        "// comment\nmqtt { include 'more.conf', host: h }\nLIST = 7\n"
        "user: {name: $LIST, rights: $NOT_SET}\na.b.>: [1 2,3]\n"
    )
    found = read_nats(file)
    mqtt = found.get("mqtt")
    assert mqtt is not None
    assert {name: one.value for name, one in mqtt.value.items() if name != "perms"} == {"port": "1884", "host": "h"}
    user = found.get("user")
    assert user is not None
    assert [one.value for one in user.value.values()] == ["7", "$NOT_SET"]
    rest = found.get("a.b.>")
    assert rest is not None
    assert [one.value for one in rest.value] == ["1", "2", "3"]
    assert rest.line == 5


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("port: 4222", "there is no mqtt block"),
        ("mqtt {", "the end: expected a key"),
        ("mqtt: [", "the end: expected a value"),
        ('mqtt { host: "x', "line 1: '\"' is not expected"),
        ("mqtt { } }", "line 1: expected a key"),
        ("a: " + "{a: " * 100, "too many levels"),
        ("a: " + "[" * 100, "too many levels"),
        ("include 'n.conf'", "files are included without end"),
        ("include 'other.conf'", "No such file"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "n.conf"
    file.write_text(text)
    done = run("nats", file)
    assert isinstance(done.exception, StartupError), done.exception
    assert named in str(done.exception)
