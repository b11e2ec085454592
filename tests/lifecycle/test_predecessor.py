# SPDX-License-Identifier: Apache-2.0
"""Whether the process of another gateway is gone, as far as this machine can tell; names of gateways."""

import subprocess
import sys
from typing import Any

import pytest

from mqtt_nats.lifecycle.predecessor import free_name, is_gone, own_process

HERE = {"host": "h", "pid": 7, "boot": "b", "namespace": 1, "begun": "5"}


@pytest.mark.parametrize(
    ("process", "gone"),
    [
        (None, None),
        ("text", None),
        ({}, None),
        ({"host": "h"}, None),
        (HERE | {"host": "other"}, None),
        (HERE | {"boot": "before"}, None),
        (HERE | {"pid": 0}, None),
        (HERE | {"pid": -1}, None),
        (HERE | {"namespace": 2}, None),
        (HERE | {"pid": "x"}, None),
    ],
)
def test_what_can_be_known(process: object, gone: bool | None) -> None:
    assert is_gone(process, HERE) is gone


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when a process was started")
def test_a_process_that_ends() -> None:
    own = own_process()
    assert is_gone(own, own) is False
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    other: dict[str, Any] = own | {"pid": process.pid, "begun": _begun(process.pid)}
    assert is_gone(other, own) is False
    assert is_gone(other | {"begun": "1"}, own) is True, "another process has its id now"
    process.communicate(b"")
    assert is_gone(other, own) is True


def _begun(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as status:
        return status.read().rpartition(")")[2].split()[19]


def test_a_process_that_this_user_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``hidepid``: it may live."""
    monkeypatch.setattr("mqtt_nats.lifecycle.predecessor._begun", lambda pid: "")
    own = own_process()
    assert is_gone(own, own) is None


@pytest.mark.parametrize(
    ("taken", "name"),
    [([], "host"), (["other"], "host"), (["host"], "host-2"), (["host", "host-2"], "host-3"), (["host-2"], "host")],
)
def test_a_name_that_nobody_has(taken: list[str], name: str) -> None:
    assert free_name("host", taken) == name
