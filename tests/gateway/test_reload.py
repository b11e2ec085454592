# SPDX-License-Identifier: Apache-2.0
"""Files that are read again while a gateway runs, where something is wrong with one of them."""

import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.gateway import Gateway


def test_what_fails_in_one_part_is_told_and_the_others_are_read(caplog: pytest.LogCaptureFixture) -> None:
    gateway = Gateway(Settings(listen="127.0.0.1:0"))
    read: list[str] = []

    def refused() -> None:
        raise StartupError("FILE, line 1: expected a rule")

    def broken() -> None:
        raise RuntimeError("secret")

    gateway.reloads = [refused, broken, lambda: read.append("last")]
    first, second = gateway.reload()
    assert read == ["last"]
    assert first == "FILE, line 1: expected a rule"
    assert second.startswith("RuntimeError at test_reload.py:")
    assert "the former files stay in use: FILE" in caplog.text
