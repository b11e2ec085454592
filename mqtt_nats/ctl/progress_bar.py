# SPDX-License-Identifier: Apache-2.0
"""Progress bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from mqtt_nats.ctl.gateway_requests import PROGRESS

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar


CLEAR: Final = "\r\x1b[K"
"""Terminal control: back to the begin of the line, and clear it."""


class Bar:
    """Progress bar that appears with the first total number; until then a line with the number done."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: ProgressBar[Any] | None = None
        self._done = 0
        self._counts = False
        """Whether the line with a number is shown."""

    def __call__(self, done: int, total: int | None) -> None:
        """Show the progress: ``done`` of ``total``."""
        if total is None or not total:
            if self._bar is None and done:
                self._counts = True
                click.echo(f"{CLEAR}{self._label}: {done:,} read", err=True, nl=False)
            return
        if self._bar is None:
            self._clear()
            self._bar = click.progressbar(length=total, label=self._label, file=sys.stderr, show_pos=True)
            self._bar.__enter__()
        self._bar.length = total
        self._bar.update(max(min(done, total) - self._done, 0))
        self._done = max(self._done, min(done, total))

    def close(self) -> None:
        """Close the bar and restore the terminal."""
        self._clear()
        if self._bar is not None:
            self._bar.__exit__(None, None, None)

    def _clear(self) -> None:
        if self._counts:
            self._counts = False
            click.echo(CLEAR, err=True, nl=False)


@contextmanager
def bar(name: str) -> Iterator[None]:
    """Show the progress of the command ``name`` if standard error is a terminal."""
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
