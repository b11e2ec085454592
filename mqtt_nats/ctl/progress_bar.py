# SPDX-License-Identifier: Apache-2.0
"""Progress bar on a terminal."""

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
    """Progress bar that appears with the first total number."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: ProgressBar[Any] | None = None
        self._done = 0

    def __call__(self, done: int, total: int | None) -> None:
        """Show the progress: ``done`` of ``total``."""
        if total is None or not total:
            return
        if self._bar is None:
            self._bar = click.progressbar(length=total, label=self._label, file=sys.stderr, show_pos=True)
            self._bar.__enter__()
        self._bar.length = total
        self._bar.update(max(min(done, total) - self._done, 0))
        self._done = max(self._done, min(done, total))

    def close(self) -> None:
        """Close the bar and restore the terminal."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)


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
