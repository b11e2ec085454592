# SPDX-License-Identifier: Apache-2.0
"""Parts of a mosquitto.conf: which listener or bridge an option belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.ctl.migration.mosquitto_conf import Configuration, nearby, read_configuration


def configuration(tmp_path: Path, text: str) -> Configuration:
    path = tmp_path / "mosquitto.conf"
    path.write_text(text, encoding="utf-8")
    return read_configuration(path)


def test_an_option_belongs_to_the_listener_before_it(tmp_path: Path) -> None:
    found = configuration(tmp_path, "max_qos 1\nlistener 1883\nmax_qos 0\nlistener 8883\ncertfile c.pem\n")
    assert found.common.value("max_qos") == "1"
    assert [one.value("max_qos") for one in found.listeners] == ["0", None]
    assert found.listeners[1].value("certfile") == "c.pem"


@pytest.mark.parametrize("per_listener", [True, False])
def test_users_and_rules_are_of_a_listener_if_it_is_said_anywhere(tmp_path: Path, per_listener: bool) -> None:
    text = f"listener 1883\nacl_file a\nper_listener_settings {str(per_listener).lower()}\n"
    found = configuration(tmp_path, text)
    assert (found.listeners[0].value("acl_file"), found.common.value("acl_file")) == (
        ("a", None) if per_listener else (None, "a")
    )


def test_a_bridge_has_its_topics(tmp_path: Path) -> None:
    found = configuration(tmp_path, "connection one\naddress there\ntopic a/# out\ntopic b in 1\n")
    (bridge,) = found.bridges
    assert (bridge.value("address"), [one.value for one in bridge.topics]) == ("there", ["a/# out", "b in 1"])


def test_a_listener_ends_with_its_file(tmp_path: Path) -> None:
    """mosquitto reads the files of an included directory by name, upper and lower case alike."""
    parts = tmp_path / "conf.d"
    parts.mkdir()
    (parts / "b.conf").write_text("max_qos 1\n", encoding="utf-8")
    (parts / "A.conf").write_text("listener 1\n", encoding="utf-8")
    (parts / "c.txt").write_text("listener 2\n", encoding="utf-8")
    found = configuration(tmp_path, "listener 3\ninclude_dir /nowhere/conf.d\nmax_qos 0\n")
    assert [(one.head.value if one.head else "", one.value("max_qos")) for one in found.listeners] == [
        ("3", "0"),
        ("1", None),
    ]
    assert found.common.value("max_qos") == "1"


def test_includes_without_an_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "again.conf").write_text(f"include_dir {tmp_path / 'loop'}\n", encoding="utf-8")
    with pytest.raises(StartupError, match="files are included"):
        configuration(tmp_path, "include_dir loop\n")
    with pytest.raises(StartupError, match="neither there nor beside"):
        configuration(tmp_path, "include_dir none\n")


@pytest.mark.parametrize(
    ("text", "opens"),
    [
        ("max_qos 2\nprotocol mqtt\n", None),
        ("persistence true\n", None),
        ("port 1884\n", "port"),
        ("max_qos 1\n", "max_qos"),
    ],
)
def test_options_that_open_the_default_listener(tmp_path: Path, text: str, opens: str | None) -> None:
    default = configuration(tmp_path, f"{text}listener 1\n").opens_default
    assert (default.name if default else None) == opens


def test_files_of_a_copied_configuration_are_beside_it(tmp_path: Path) -> None:
    (tmp_path / "acl").touch()
    conf = tmp_path / "mosquitto.conf"
    assert nearby(conf, "/etc/mosquitto/acl") == tmp_path / "acl"
    assert nearby(conf, "/etc/mosquitto/users") == Path("/etc/mosquitto/users")
