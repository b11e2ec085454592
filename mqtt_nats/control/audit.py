# SPDX-License-Identifier: Apache-2.0
"""Audit trail: the last actions of administrators over HTTP. Each action is a line of the log too."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.base.logs import unlimited
from mqtt_nats.control.selection import Refusal, Total

if TYPE_CHECKING:
    from mqtt_nats.control.server import Control

log = logging.getLogger("mqtt_nats.audit")

ACTIONS_MOST: Final = 1000
"""Most actions of administrators in memory, and as many refused ones of viewers; the log has every action of
administrators."""

TEXT_MOST: Final = 500
"""Most characters of the arguments, and of the outcome."""

ADMINISTRATOR: Final = "administrator"
"""The role that permits actions."""


class Action:
    """Something that an administrator has asked for. ``outcome`` is empty until it has ended."""

    def __init__(self, who: str, role: str, address: str, operation: str, arguments: str) -> None:
        self.time = time.time()
        """Unix time in seconds."""
        self.who, self.role, self.address = who, role, address
        self.operation = operation
        """Name of the verb, such as ``clients.kick``."""
        self.arguments = _short(arguments)
        self.outcome = ""
        # Nobody hides an action behind many others: the log has each one of those who may do something.
        self._extra = unlimited() if role == ADMINISTRATOR else None
        text = "%s by %s (%s) from %s over HTTP: %s"
        log.warning(text, operation, who, role, address, self.arguments, extra=self._extra)

    def end(self, outcome: str) -> None:
        """Note the end of an action: ``done``, or why not."""
        self.outcome = _short(outcome)
        if outcome != DONE:
            text = "%s by %s from %s: %s"
            log.warning(text, self.operation, self.who, self.address, self.outcome, extra=self._extra)

    def state(self) -> dict[str, Any]:
        """Return the action as JSON values."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


DONE: Final = "done"


class AuditTrail:
    """The last actions of administrators at one gateway, the newest last."""

    def __init__(self) -> None:
        self._permitted: deque[Action] = deque(maxlen=ACTIONS_MOST)
        self._refused: deque[Action] = deque(maxlen=ACTIONS_MOST)

    def begin(self, who: str, role: str, address: str, operation: str, arguments: str) -> Action:
        """Note that an administrator asks for something. The caller ends the action."""
        action = Action(who, role, address, operation, arguments)
        (self._permitted if role == ADMINISTRATOR else self._refused).append(action)
        return action

    def latest(self) -> list[Action]:
        """Return the actions, the newest first."""
        every = [*reversed(self._permitted), *reversed(self._refused)]
        return sorted(every, key=lambda action: -action.time)


def _short(text: str) -> str:
    """Return the text on one line, shortened; characters that are not printable are escaped."""
    seen = "".join(one if one.isprintable() else f"\\u{{{ord(one):x}}}" for one in text[:TEXT_MOST])
    return seen if len(text) <= TEXT_MOST else f"{seen}…"


async def answer(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """Yield the number of actions, of ``who`` or of all, and the newest ones: ``most`` of them, 0 = all.

    Raises:
        Refusal: the question comes from the account of a tenant.
    """
    if control.powers.audit_trail is None:
        raise Refusal("actions of administrators are shown in the gateway's own account only")
    who, most = question.get("who"), int(question.get("most") or 0)
    found = [action for action in control.powers.audit_trail.latest() if not who or action.who == who]
    yield Total(len(found))
    for action in found[:most] if most else found:
        yield action.state()
