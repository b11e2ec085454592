# SPDX-License-Identifier: Apache-2.0
"""What one thing is that can be asked of the gateways and streams: by the command line and by the HTTP API alike."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.errors import StartupError

UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


TEXT_LENGTH: Final = 65_535
"""Characters of a text that is given; no string of MQTT is longer."""

OVER_HTTP: Final[ContextVar[bool]] = ContextVar("mqtt_nats_over_http", default=False)
"""Whether a gateway asks for somebody, and not somebody at this machine."""


class Refused(StartupError):
    """What was asked for cannot be done; one line that says why, and the HTTP status that says the same."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class Arguments(BaseModel):
    """What is given with a question."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_max_length=TEXT_LENGTH)


def _nothing(asked: Any, found: Any) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Verb:
    """One question, or one change.

    ``run`` raises Refused, ApiError, NoResponders and RequestTimeout. Its inbox is on a connection that gets its own
    messages too, or a gateway that asks all would not hear itself. An argument that ``path`` names may hold slashes:
    they are percent-encoded there. ``show`` makes of a result what a person reads. ``positional`` are the arguments
    that the command line takes without a name, besides those of ``path``, all in the order of the model. With ``lines``
    the result is not one object, but lines as they come, for HTTP alone. ``lacking`` says in one line, of the arguments
    and the result, what was not done of what was asked for; the command line then fails, when it has printed the rest.
    What ``waits`` is cancelled when who asks over HTTP has gone.
    """

    name: str
    method: Literal["GET", "POST", "DELETE"]
    path: str
    arguments: type[Arguments]
    run: Callable[[RequestInbox, Any], Awaitable[Any]]
    summary: str
    show: Callable[[Any], str]
    positional: tuple[str, ...] = ()
    lines: bool = False
    lacking: Callable[[Any, Any], str] = _nothing
    waits: bool = False

    @property
    def in_path(self) -> tuple[str, ...]:
        """The arguments that the path names."""
        return tuple(re.findall(r"\{([a-z_]+)\}", self.path))


def seconds(text: str) -> float:
    """``90``, ``90s``, ``15m``, ``2h`` or ``7d``; ``always`` is 0.

    Raises:
        Refused: it is none of these.
    """
    if text == "always":
        return 0.0
    found = re.fullmatch(r"([0-9]{1,9})([smhd]?)", text)
    if found is None or not int(found[1]):
        raise Refused(f"{text!r} is no time such as 90s, 15m, 2h, 7d or always")
    return float(int(found[1]) * UNITS[found[2] or "s"])


def _length(given: object) -> object:
    if not isinstance(given, str):
        return given
    try:
        return seconds(given)
    except Refused as error:
        raise ValueError(str(error)) from None


Length = Annotated[float, BeforeValidator(_length, json_schema_input_type=float | str), Field(ge=0, le=1e11)]
"""Seconds, also as ``90s``, ``15m``, ``2h``, ``7d``; 0 and ``always``: without an end."""
