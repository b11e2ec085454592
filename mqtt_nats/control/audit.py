# SPDX-License-Identifier: Apache-2.0
"""Audit trail: the last deeds of administrators over HTTP. Each deed is a line of the log too."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.base.logs import unlimited
from mqtt_nats.control.selection import Refusal, Total

if TYPE_CHECKING:
    from mqtt_nats.control.server import Control

log = logging.getLogger("mqtt_nats.audit")

DEEDS_MOST: Final = 1000
"""Most deeds of administrators in memory, and as many of viewers, to whom none is permitted; the log has all of the
administrators'."""

TEXT_MOST: Final = 500
"""Most characters of the arguments, and of the outcome."""

ADMINISTRATOR: Final = "administrator"
"""The role that permits deeds."""


class Deed:
    """Something that an administrator has asked for. ``outcome`` is empty until it has ended."""

    def __init__(self, who: str, role: str, address: str, operation: str, arguments: str) -> None:
        self.time = time.time()
        """Unix time in seconds."""
        self.who, self.role, self.address = who, role, address
        self.operation = operation
        """Name of the verb, such as ``clients.kick``."""
        self.arguments = _short(arguments)
        self.outcome = ""
        # Nobody hides a deed behind many others: the log has each one of those who may do something.
        self._extra = unlimited() if role == ADMINISTRATOR else None
        text = "%s by %s (%s) from %s over HTTP: %s"
        log.warning(text, operation, who, role, address, self.arguments, extra=self._extra)

    def end(self, outcome: str) -> None:
        """Note the end of a deed: ``done``, or why not."""
        self.outcome = _short(outcome)
        if outcome != DONE:
            text = "%s by %s from %s: %s"
            log.warning(text, self.operation, self.who, self.address, self.outcome, extra=self._extra)

    def state(self) -> dict[str, Any]:
        """Return the deed as JSON values."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


DONE: Final = "done"


class Deeds:
    """The last deeds at one gateway, the newest last."""

    def __init__(self) -> None:
        self._permitted: deque[Deed] = deque(maxlen=DEEDS_MOST)
        self._refused: deque[Deed] = deque(maxlen=DEEDS_MOST)

    def begin(self, who: str, role: str, address: str, operation: str, arguments: str) -> Deed:
        """Note that an administrator asks for something. The caller ends the deed."""
        deed = Deed(who, role, address, operation, arguments)
        (self._permitted if role == ADMINISTRATOR else self._refused).append(deed)
        return deed

    def latest(self) -> list[Deed]:
        """Return the deeds, the newest first."""
        every = [*reversed(self._permitted), *reversed(self._refused)]
        return sorted(every, key=lambda deed: -deed.time)


def _short(text: str) -> str:
    """Return the text on one line, shortened; characters that are not printable are escaped."""
    seen = "".join(one if one.isprintable() else f"\\u{{{ord(one):x}}}" for one in text[:TEXT_MOST])
    return seen if len(text) <= TEXT_MOST else f"{seen}…"


async def answer(control: Control, question: dict[str, Any]) -> AsyncIterator[Any]:
    """Yield the number of deeds, of ``who`` or of all, and the newest ones: ``most`` of them, 0 = all.

    Raises:
        Refusal: the question comes from the account of a tenant.
    """
    if control.powers.deeds is None:
        raise Refusal("deeds of administrators are shown in the gateway's own account only")
    who, most = question.get("who"), int(question.get("most") or 0)
    found = [deed for deed in control.powers.deeds.latest() if not who or deed.who == who]
    yield Total(len(found))
    for deed in found[:most] if most else found:
        yield deed.state()
