# SPDX-License-Identifier: Apache-2.0
"""A restriction that has no counterpart never makes a gateway that lets in more than the old broker."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.ctl.migration.test_mosquitto import run


@pytest.mark.parametrize(
    ("lines", "lost"),
    [
        ("certfile c.pem\nkeyfile k.pem\ncapath /ca\nrequire_certificate true", "require_certificate without cafile"),
        ("psk_hint home\npsk_file /psk", "TLS with pre-shared keys"),
        ("bind_interface lo", "bind_interface"),
    ],
)
def test_a_listener_of_mosquitto_is_left_out(tmp_path: Path, lines: str, lost: str) -> None:
    file = tmp_path / "mosquitto.conf"
    file.write_text(f"per_listener_settings true\nlistener 8883\n{lines}\nallow_anonymous true\nlistener 1883\n")
    done = run("mosquitto", file, "--output", tmp_path / "made", "--all")
    made = tomllib.loads((tmp_path / "made" / "gateway.toml").read_text())
    assert [one["listen"] for one in made["listeners"]] == ["*:1883"]
    assert f"missing: listener 8883: {lost}" in done.output


def test_rules_behind_a_denial_of_emqx_that_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "acl.conf"
    file.write_text(
        '{allow, {username, "ann"}, all, ["a/#"]}.\n'
        '{deny, {username, {re, "^guest"}}, all, ["secret/#"]}.\n'
        '{allow, {username, "bob"}, all, ["secret/#"]}.\n'
        "{allow, all}.\n"
    )
    done = run("emqx", file, "--output", tmp_path / "made", "--all")
    rules = tomllib.loads((tmp_path / "made" / "acl.toml").read_text())
    assert "default" not in rules, "deny is the default"
    assert [one["user"] for one in rules["rules"]] == ["ann"]
    assert done.output.count("a denial before it has no counterpart") == 2
