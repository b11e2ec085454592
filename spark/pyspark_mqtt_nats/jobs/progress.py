# SPDX-License-Identifier: Apache-2.0
"""Progress of a job on the terminal, and the request to end the job."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, TextIO

_REDRAW: Final = 0.2  # seconds, on a terminal
_REPEAT: Final = 10.0  # seconds, in a log


class Progress:
    """Progress line, overwritten on a terminal and repeated now and then elsewhere; and the request to stop.

    Several threads may write lines.
    """

    def __init__(self, job: str, output: TextIO | None = None) -> None:
        self.stopping = False
        self._job = job
        self._output = sys.stderr if output is None else output
        self._terminal = self._output.isatty()
        self._due = time.monotonic() + (0 if self._terminal else _REPEAT / 5)
        self._shown = 0
        self._writing = threading.RLock()

    def show(self, text: str) -> None:
        """The state of things, shown when it is time."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + (_REDRAW if self._terminal else _REPEAT)
        line = f"{self._job}: {text}"
        with self._writing:
            if self._terminal:
                # A line that goes over the edge would be left behind by the next one.
                line = line[: (terminal_width(self._output) or len(line) + 1) - 1]
                self._output.write("\r" + line.ljust(self._shown))
                self._shown = len(line)
            else:
                self._output.write(line + "\n")
            self._output.flush()

    def say(self, text: str) -> None:
        """A line that stays."""
        with self._writing:
            self.clear()
            self._output.write(f"{self._job}: {text}\n")
            self._output.flush()

    def clear(self) -> None:
        """Take the line away from the terminal."""
        with self._writing:
            if self._shown:
                self._output.write("\r" + " " * self._shown + "\r")
                self._output.flush()
                self._shown = 0

    @contextmanager
    def signals(self, first: Callable[[FrameType | None], None] | None = None) -> Iterator[None]:
        """SIGINT and SIGTERM set `stopping`; the second one raises KeyboardInterrupt.

        Args:
            first: is called at the first signal, with the frame that the signal has interrupted.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            if self.stopping:
                raise KeyboardInterrupt
            self.stopping = True
            if first is not None:
                first(frame)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                if signal.getsignal(number) is stop:  # a session has a handler of its own for SIGINT
                    signal.signal(number, handler)


def terminal_width(output: TextIO) -> int | None:
    """Return the number of columns of the terminal that an output is, None where it is none."""
    try:
        return os.get_terminal_size(output.fileno()).columns or None
    except OSError:  # also io.UnsupportedOperation
        return None


def count(number: float) -> str:
    """A number as people read it: 1,234,567."""
    return f"{number:,.0f}"


def plural(number: int, what: str) -> str:
    """A number of things: "1 message", "2,000 messages"."""
    return f"{count(number)} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"


def size(number: float) -> str:
    """A number of bytes as people read it."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def duration(seconds: float) -> str:
    """A time span as people read it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def rate(messages: float, seconds: float) -> str:
    """Messages a second as people read it."""
    return f"{count(messages / max(seconds, 1e-3))}/s"
