# SPDX-License-Identifier: Apache-2.0
"""A stream that does not store: it has no leader, or is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# Seconds until something is tried, at first and when it was refused several times; and those for an answer.
PROBE_FIRST = 0.25
PROBE_REFUSED = 1.0
PROBE_MOST = 2.0


class StreamOutage:
    """What is sent to the stream meanwhile: one store at a time, until one of them is answered.

    See docs/internals/rules.md#no-leader.
    """

    __slots__ = ("_delay", "_probe", "looking", "patience", "probed", "silences", "stream", "told", "unanswered")

    def __init__(self, stream: bytes) -> None:
        self.stream = stream
        """The one that does not store; what goes with it waits too: see :func:`mqtt_nats.backbone.frames.group_of`."""
        self.probed = b""
        """Token of what was tried last."""
        self.patience = PROBE_MOST
        """Seconds for which its answer is waited for."""
        self.unanswered = False
        """Nothing has come for it."""
        self.silences = 0
        """How often nothing has come."""
        self.told = False
        """The log says that there is an outage."""
        self.looking: asyncio.Task[None] | None = None
        """Finds out what is stored already, before anything is sent again."""
        self._delay = PROBE_FIRST
        self._probe: asyncio.TimerHandle | None = None

    def later(self, probe: Callable[[StreamOutage], None]) -> None:
        """Try again after a while, unless that is to happen already."""
        if self._probe is None and self.looking is None:
            self._probe = asyncio.get_running_loop().call_later(self._delay, self._due, probe)
            self._delay = min(self._delay * 2, PROBE_REFUSED)

    def try_(self, token: bytes, probe: Callable[[StreamOutage], None]) -> None:
        """Something is tried: no answer at all is one more failure."""
        self.probed = token
        self.unanswered = True
        self.patience = PROBE_MOST
        self._probe = asyncio.get_running_loop().call_later(self.patience, self._due, probe)

    def _due(self, probe: Callable[[StreamOutage], None]) -> None:
        self._probe = None
        probe(self)

    def refused(self, token: bytes) -> None:
        """Something is answered, but not stored."""
        if token == self.probed:
            self.unanswered = False
            self.silences = 0
            self._cancel()

    def end(self) -> None:
        """Nothing is tried, and nothing looked for, any more."""
        if self.looking is not None:
            self.looking.cancel()
            self.looking = None
        self.probed = b""
        self._cancel()

    def _cancel(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
