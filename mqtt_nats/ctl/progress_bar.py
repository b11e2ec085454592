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

BAR_STEPS: Final = 1000
"""Steps of the whole bar; the total number may change meanwhile."""


class Bar:
    """Progress bar that appears with the first total number; until then a line with the number done."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: ProgressBar[Any] | None = None
        self._position = ""
        """The numbers beside the bar."""
        self._steps = 0
        """Steps of the bar that are shown."""
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
            self._bar = click.progressbar(
                length=BAR_STEPS, label=self._label, file=sys.stderr, item_show_func=lambda _: self._position
            )
            self._bar.__enter__()
        done = min(done, total)
        self._position = f"{done:,}/{total:,}"
        steps = max(done * BAR_STEPS // total - self._steps, 0)
        self._steps += steps
        self._bar.update(steps)

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
