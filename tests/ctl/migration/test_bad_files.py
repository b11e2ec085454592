# SPDX-License-Identifier: Apache-2.0
"""Any bytes are read, or refused with one line; nothing else happens."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mqtt_nats.access.acl_file import load
from mqtt_nats.base.errors import StartupError
from mqtt_nats.ctl.migration.erlang_terms import read_terms
from mqtt_nats.ctl.migration.nats_conf import read_nats
from mqtt_nats.ctl.migration.transfer.mosquitto_db import MAGIC, read_sessions
from tests.ctl.migration.test_mosquitto import run

T = TypeVar("T")

NATS_PARTS = st.sampled_from(
    ["{", "}", "[", "]", ":", "=", ",", '"', "'", "$A", "a", "mqtt", "#", "//", "\n", " ", "\\"]
)
TERM_PARTS = st.sampled_from(["{", "}", "[", "]", ",", ".", '"', "<<", ">>", "'", "allow", "all", "%", "\n", " ", "1"])
LINES = st.sampled_from(
    [
        "user ann",
        "topic read a/#",
        "topic deny #",
        "pattern write %u/%c",
        "topic",
        "pattern",
        "topic a/#/b",
        "user",
        "x",
    ]
)
EXAMPLES = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


def outcome(read: Callable[[T], object], given: T) -> str:
    """The text of the error with which it is refused; empty where it is read."""
    try:
        read(given)
    except (StartupError, ValueError) as error:
        return str(error)
    return ""


@EXAMPLES
@given(st.binary(max_size=200), st.sampled_from([5, 6]), st.sampled_from([1, 2, 3, 5, 6]))
def test_databases(tmp_path: Path, data: bytes, version: int, kind: int) -> None:
    file = tmp_path / "db"
    chunk = kind.to_bytes(4) + len(data).to_bytes(4) + data
    file.write_bytes(MAGIC + bytes(4) + version.to_bytes(4) + chunk)
    assert outcome(read_sessions, file).isprintable()


@EXAMPLES
@given(st.lists(NATS_PARTS, max_size=40))
def test_configurations_of_nats(tmp_path: Path, parts: list[str]) -> None:
    file = tmp_path / "n.conf"
    file.write_text("".join(parts))
    assert outcome(read_nats, file).isprintable()


@EXAMPLES
@given(st.lists(TERM_PARTS, max_size=40))
def test_terms(parts: list[str]) -> None:
    assert re.match("line|the end|$", outcome(lambda text: list(read_terms(text)), "".join(parts)))


@settings(EXAMPLES, max_examples=50)
@given(st.lists(LINES, max_size=10))
def test_access_rules(tmp_path: Path, lines: list[str]) -> None:
    """What is written can be read by a gateway, whatever the lines are."""
    (tmp_path / "acl").write_text("\n".join(lines))
    (tmp_path / "m.conf").write_text(f"listener 1883\nallow_anonymous true\nacl_file {tmp_path}/acl\n")
    done = run("mosquitto", tmp_path / "m.conf", "--output", tmp_path / "new", "--force")
    assert done.exit_code == 0, done.exception
    load(tmp_path / "new" / "acl.toml")
