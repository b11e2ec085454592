# SPDX-License-Identifier: Apache-2.0
"""A progress bar, for people who look at a terminal and wait."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from mqtt_nats.ctl.gateway_requests import PROGRESS

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar


class Bar:
    """Begins when there is something to show."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: ProgressBar[Any] | None = None
        self._done = 0

    def __call__(self, done: int, total: int | None) -> None:
        """So much is done, of so much."""
        if total is None or not total:
            return
        if self._bar is None:
            self._bar = click.progressbar(length=total, label=self._label, file=sys.stderr, show_pos=True)
            self._bar.__enter__()
        self._bar.length = total
        self._bar.update(max(min(done, total) - self._done, 0))
        self._done = max(self._done, min(done, total))

    def close(self) -> None:
        """Leave the terminal in order."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)


@contextmanager
def bar(name: str) -> Iterator[None]:
    """Show how far the command ``name`` is, where standard error is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    shown = Bar(name.replace(".", " "))
    token = PROGRESS.set(shown)
    try:
        yield
    finally:
        PROGRESS.reset(token)
        shown.close()
