# SPDX-License-Identifier: Apache-2.0
"""SIGHUP: it reads files again, and ends a gateway whose terminal is gone."""

from __future__ import annotations

import io
import sys

import pytest

from mqtt_nats.gateway.sighup import ReloadSignal


class Terminal(io.StringIO):
    """An open terminal, until it is closed."""

    def isatty(self) -> bool:
        return not self.closed


def test_a_closed_terminal_is_serious(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdin", terminal)
    signal = ReloadSignal()
    assert not signal.serious, "`kill -HUP` from another terminal"
    terminal.close()
    assert signal.serious


@pytest.mark.parametrize("stdin", [None, io.StringIO()], ids=["none", "a file"])
def test_a_service_has_no_terminal_that_could_go(monkeypatch: pytest.MonkeyPatch, stdin: io.StringIO | None) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    signal = ReloadSignal()
    if stdin is not None:
        stdin.close()
    assert not signal.serious


def test_it_does_nothing_before_the_gateway_has_said_what() -> None:
    signal, calls = ReloadSignal(), []
    signal.act()
    signal.call(lambda: calls.append("reload"))
    signal.act()
    assert calls == ["reload"]
