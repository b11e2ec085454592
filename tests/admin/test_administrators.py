# SPDX-License-Identifier: Apache-2.0
"""Tokens of named administrators: what a file may say, and who has a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtt_nats.admin.access.administrators import CERTIFICATE, LOCAL, SETTING, Administrator, Administrators
from mqtt_nats.admin.listener import check_files
from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.settings import Settings
from tests.admin.support import TOKEN

GRAFANA = "token-of-grafana-0123456789"
ALICE = "token-of-alice-0123456789"

FILE = f"""
[grafana]
role = "viewer"
token = "{GRAFANA}"

[alice]
role = "administrator"
token = "{ALICE}"
"""


def settings(path: Path, text: str, token: str | None = None) -> Settings:
    file = path / "tokens.toml"
    file.write_text(text, encoding="utf-8")
    given = {"admin_listen": "127.0.0.1:0", "admin_tokens_file": str(file)}
    return Settings.load(given | ({"admin_token": token} if token else {}))


def test_each_token_is_of_one_administrator(tmp_path: Path) -> None:
    found = Administrators.load(settings(tmp_path, FILE, TOKEN))
    assert found.have_tokens
    assert found.of(GRAFANA.encode()) == Administrator("grafana", "viewer")
    assert found.of(ALICE.encode()) == Administrator("alice", "administrator")
    assert found.of(TOKEN.encode()) == SETTING
    for wrong in (None, b"", GRAFANA.encode()[:-1], b"\xff", b"grafana"):
        assert found.of(wrong) is None
    assert Administrators.load(settings(tmp_path, FILE)).of(TOKEN.encode()) is None


def test_without_tokens_everybody_who_is_let_in_is_one() -> None:
    here = Administrators.load(Settings.load({"admin_listen": "127.0.0.1:0"}))
    assert (here.have_tokens, here.of(None), here.of(b"any")) == (False, LOCAL, LOCAL)
    files = dict.fromkeys(("admin_tls_cert", "admin_tls_key", "admin_tls_client_ca"), __file__)
    there = Administrators.load(Settings.load({"admin_listen": "127.0.0.1:0", **files}))
    assert (there.have_tokens, there.of(None)) == (False, CERTIFICATE)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "dictionary should have at least 1 item"),
        ("alice", "is not valid TOML"),
        ('alice = "x"', "alice: input should be a table"),
        ("[alice]", "alice.role: field required; alice.token: field required"),
        (f'[alice]\nrole = "owner"\ntoken = "{ALICE}"', "alice.role: input should be 'viewer' or 'administrator'"),
        ('[alice]\nrole = "viewer"\ntoken = "short-secret"', "alice.token: needs 16 characters or more, and has 12"),
        (f'[alice]\nrole = "viewer"\ntoken = "{ALICE} "', "alice.token: it has white space"),
        (f'[alice]\nrole = "viewer"\ntoken = "{ALICE}"\nrule = 1', "alice.rule: "),
        (f'["al ice"]\nrole = "viewer"\ntoken = "{ALICE}"', "al ice: string should match pattern"),
        (f"{FILE}\n[bob]\nrole = 'viewer'\ntoken = '{ALICE}'", "bob: another administrator has the same token"),
        (f"[admin]\nrole = 'viewer'\ntoken = '{ALICE}'", "admin: the name is reserved"),
        (f"[local]\nrole = 'viewer'\ntoken = '{ALICE}'", "local: the name is reserved"),
        (f"[certificate]\nrole = 'viewer'\ntoken = '{ALICE}'", "certificate: the name is reserved"),
        (f"[bob]\nrole = 'viewer'\ntoken = '{TOKEN}'", "bob: another administrator has the same token"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(StartupError) as failure:
        check_files(settings(tmp_path, text, TOKEN))
    said = str(failure.value)
    assert problem in said
    assert str(tmp_path / "tokens.toml") in said
    assert "\n" not in said
    assert not any(secret in said for secret in (ALICE, TOKEN, "short-secret"))
