# SPDX-License-Identifier: Apache-2.0
"""Outage of a stream that does not store: it has no leader, does not answer, or has no room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# Seconds until the first probe, maximum seconds until the next after refusals, seconds to wait for an answer.
PROBE_FIRST = 0.25
PROBE_REFUSED = 1.0
PROBE_MOST = 2.0

# The same after an election: the advisory comes a moment before the leader takes messages.
ELECTED_FIRST = 0.03
ELECTED_MOST = 0.5

# Number of unanswered probes between two calls of `on_silent`; the first call comes after two probes.
SILENCES = 30


class StreamOutage:
    """Outage of a stream: one store at a time is sent as a probe, until a probe is answered.

    See docs/internals/backbone.md#no-leader.
    """

    __slots__ = (
        *("_delay", "_elected", "_probe", "full", "looking", "patience", "probed", "silences", "stream", "told"),
        *("unanswered", "warned"),
    )

    def __init__(self, stream: bytes) -> None:
        self.stream = stream
        """Stream that does not store; the streams of its :func:`mqtt_nats.backbone.frames.group_of` wait, too."""
        self.probed = b""
        """Token of the last probe."""
        self.patience = PROBE_MOST
        """Seconds to wait for the answer of the last probe."""
        self.unanswered = False
        """Whether the last probe has no answer yet."""
        self.silences = 0
        """Number of consecutive probes without an answer."""
        self.full = False
        """Whether the last store was refused for want of room, and not for want of a leader."""
        self.told = False
        """Whether the outage was logged."""
        self.warned = False
        """Whether the outage was logged as a warning: its end is one, too."""
        self.looking: asyncio.Task[None] | None = None
        """Task that looks for messages stored already, before any is sent again; None = no such task."""
        self._delay = PROBE_FIRST
        self._elected = False
        self._probe: asyncio.Handle | None = None

    def later(self, probe: Callable[[StreamOutage], None]) -> None:
        """Schedule a probe after the present delay, unless a probe or a search is under way."""
        if self._probe is None and self.looking is None:
            self._probe = asyncio.get_running_loop().call_later(self._delay, self._due, probe)
            self._delay = min(self._delay * 2, PROBE_REFUSED)

    def elected(self, probe: Callable[[StreamOutage], None]) -> None:
        """Probe at once, since the stream has a new leader; soon again if that is too early."""
        self._cancel()
        self.unanswered = False  # the former leader had the last probe
        self._delay = ELECTED_FIRST
        self._elected = True
        self._probe = asyncio.get_running_loop().call_soon(self._due, probe)

    def note_probe(self, token: bytes, probe: Callable[[StreamOutage], None]) -> None:
        """Note a probe; without an answer the next probe follows after `patience`."""
        self.probed = token
        self.unanswered = True
        self.patience = ELECTED_MOST if self._elected else PROBE_MOST
        self._elected = False
        self._probe = asyncio.get_running_loop().call_later(self.patience, self._due, probe)

    def _due(self, probe: Callable[[StreamOutage], None]) -> None:
        self._probe = None
        probe(self)

    def note_full(self, full: bool) -> bool:
        """Note whether a store was refused for want of room; return whether that is new, and the caller warns of it."""
        new = full and not self.full
        self.full, self.warned = full, self.warned or full
        return new

    def begin_telling(self, *, warned: bool) -> bool:
        """Return whether the outage has not been logged yet; the caller logs it, as a warning if ``warned``."""
        first, self.told = not self.told, True
        self.warned = self.warned or (first and warned)
        return first

    def count_silence(self) -> int:
        """Return the number of consecutive probes without an answer, the last one included."""
        self.silences += 1
        return self.silences

    def begin_looking(self, stream: bytes, task: asyncio.Task[None]) -> None:
        """Note the task that looks for messages of ``stream`` stored already."""
        self.stream, self.looking = stream, task

    def end_looking(self) -> None:
        """Note that the task has ended."""
        self.looking = None

    def refused(self, token: bytes) -> None:
        """Note that a store was answered with a refusal."""
        if token == self.probed:
            self.unanswered = False
            self.silences = 0
            self._cancel()

    def cancel_probes(self) -> None:
        """Cancel the next probe and the search."""
        if self.looking is not None:
            self.looking.cancel()
            self.looking = None
        self.probed = b""
        self._cancel()

    def _cancel(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
