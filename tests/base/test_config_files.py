# SPDX-License-Identifier: Apache-2.0
"""Configuration files: errors with the line, and values for display without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtt_nats.base.config_files import entries_of, is_json, lines_of, nearest, read_file, without_secrets
from mqtt_nats.base.errors import StartupError


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("nats://user:pass@word@one:4222", "nats://one:4222"),
        ("https://one/jwks?key=secret", "https://one/jwks?(hidden)"),
        ("https://one/#secret", "https://one/#(hidden)"),
        ("https://one/?", "https://one/?"),
        ("a plain text with a ? and @", "a plain text with a ? and @"),
        ({"urls": ["nats://token@one", "nats://two"]}, {"urls": ["nats://one", "nats://two"]}),
        (7, 7),
    ],
)
def test_a_value_for_display_has_no_secrets(value: object, shown: object) -> None:
    assert without_secrets(value) == shown


def test_lines_of_settings() -> None:
    """Also behind a text of several lines that looks like a setting."""
    text = 'name = "one"\nnote = """\nworkers = 2\n"""\nworkers = 3\n\n[tenants.acme]\nname = "x"\n'
    assert lines_of(text, ["name", "workers", "tenants"]) == {"name": [1], "workers": [5], "tenants": [7]}


def test_lines_of_entries() -> None:
    text = 'tenants.acme = {}\n[tenants.other]\nname = "acme"\n'
    assert entries_of(text, {"tenants": {"acme": {}, "other": {}}}) == {"tenants.acme": [1], "tenants.other": [2]}


def test_an_unknown_setting_names_its_line_and_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text('name = "one"\nworker = 2\nzzz = 1\n', encoding="utf-8")
    values, where, unknown = read_file(path, ["name", "workers"])
    assert (values, where["worker"]) == ({"name": "one"}, [2])
    assert unknown == [
        f"unknown setting 'worker' in {path}, line 2: did you mean 'workers'?",
        f"unknown setting 'zzz' in {path}, line 3: docs/configuration.md lists the settings",
    ]


@pytest.mark.parametrize(
    ("content", "error"), [(b"name = ", "is not valid TOML"), (b"\xff", "is not UTF-8 text"), (None, "No such file")]
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None, error: str) -> None:
    path = tmp_path / "gateway.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartupError, match=error):
        read_file(path, [])


def test_small_helpers() -> None:
    assert nearest("qos", ["retain"]) == ""
    assert [is_json(text) for text in ("[1]", "", None, "{")] == [True, True, True, False]
