# SPDX-License-Identifier: Apache-2.0
"""Verbs: definitions of commands, from which the command line and the HTTP API are made."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.errors import StartupError
from mqtt_nats.base.limit_settings import parse_duration

TEXT_LENGTH: Final = 65_535
"""Most characters of a text argument; no MQTT string is longer."""

PATTERN_LENGTH: Final = 1000
"""Most characters of a pattern: the time to compile one may grow with the square of its length."""

OFFSET_MOST: Final = 100_000
"""Largest `offset` of a list: the keys of the entries before it are in memory. A search needs no such offset."""

Role = Literal["viewer", "administrator"]
"""Role of somebody who uses the HTTP API: a viewer changes nothing, and sees no messages."""

ADMINISTRATOR: Final[ContextVar[str]] = ContextVar("mqtt_nats_administrator", default="")
"""Name of the administrator for whose HTTP request the verb runs in a gateway; empty: for a command line."""


class Refused(StartupError):
    """The verb cannot be carried out; the text is one line with the reason, ``status`` the HTTP status."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class Arguments(BaseModel):
    """Arguments of a verb. A model is built when its verb is used: a command line uses one of them."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_max_length=TEXT_LENGTH, defer_build=True)


class Paged(Arguments):
    """Arguments of a list: which part of it is returned."""

    offset: int = Field(
        default=0,
        ge=0,
        le=OFFSET_MOST,
        description="Without so many at the beginning.",
        json_schema_extra={"metavar": "N"},
    )
    limit: int = Field(default=0, ge=0, description="So many at most; 0 for all.", json_schema_extra={"metavar": "N"})
    reverse: bool = Field(default=False, description="In the opposite order.")


def _nothing(asked: Any, found: Any) -> str:
    return ""


class PartsText(Protocol):
    """Text for a terminal of a result that comes in parts."""

    def part(self, found: Any) -> list[str]:
        """Return the lines of one part."""

    def footer(self, found: Any) -> list[str]:
        """Return the lines below the last part; ``found``: the result without its entries."""


class Parts(NamedTuple):
    """Result of a verb in parts: a long list begins to be printed before all of it is read, and is never in memory."""

    name: str
    """Key of the entries in the result. Of the other keys, lists are joined; of single values the last one counts."""
    run: Callable[[RequestInbox, Any], AsyncGenerator[dict[str, Any], None]]
    """Generator of the parts; it raises what ``Verb.run`` raises."""
    text: Callable[[], PartsText]


async def collected(parts: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    """Return the result that comes in parts."""
    whole: dict[str, Any] = {}
    async for one in parts:
        for key, value in one.items():
            if isinstance(value, list):
                whole.setdefault(key, []).extend(value)
            else:
                whole[key] = value
    return whole


@dataclass(frozen=True, slots=True)
class Verb:
    """Definition of one question or change.

    ``run`` raises Refused, ApiError, NoResponders and RequestTimeout. Its inbox must be on a connection that receives
    its own messages, so that a gateway that asks all gateways also asks itself. Slashes in an argument of ``path`` are
    percent-encoded. ``show`` formats a result as text; `Parts`: the command line
    prints the result part by part. ``positional``: arguments without a name on the command line,
    besides the arguments in ``path``, all in the order of the model. ``lines``: the result consists of lines that come
    one after the other, not of one object; for HTTP only. ``lacking`` returns one line, from arguments and result,
    about everything that was not done; the command line prints the result and then fails. ``waits``: the verb is
    cancelled when its HTTP client disconnects. ``confidential``: the result has messages or packets of clients, so
    viewers do not get it.
    """

    name: str
    method: Literal["GET", "POST", "DELETE"]
    path: str
    arguments: type[Arguments]
    run: Callable[[RequestInbox, Any], Awaitable[Any]]
    summary: str
    show: Callable[[Any], str] | Parts
    positional: tuple[str, ...] = ()
    lines: bool = False
    lacking: Callable[[Any, Any], str] = _nothing
    waits: bool = False
    confidential: bool = False

    @property
    def role(self) -> Role:
        """The least role that may use the verb over HTTP."""
        return "viewer" if self.method == "GET" and not self.confidential else "administrator"

    @property
    def in_path(self) -> tuple[str, ...]:
        """Names of the arguments in the path."""
        return tuple(re.findall(r"\{([a-z_]+)\}", self.path))


def seconds(text: str) -> float:
    """Return the seconds of a duration such as ``90s``, ``15m``, ``2h`` or ``7d``; ``always`` is 0.

    Raises:
        Refused: the text has another form.
    """
    if text == "always":
        return 0.0
    try:
        found = parse_duration(text)
    except ValueError:
        found = 0.0
    if not found:
        raise Refused(f"{text!r} is not a duration such as 90s, 15m, 2h, 7d or always")
    return found


def _length(given: object) -> object:
    if not isinstance(given, str):
        return given
    try:
        return seconds(given)
    except Refused as error:
        raise ValueError(str(error)) from None


Pattern = Annotated[str, Field(max_length=PATTERN_LENGTH)]
"""Type of a pattern for client ids or filters."""

Length = Annotated[float, BeforeValidator(_length, json_schema_input_type=float | str), Field(ge=0, le=1e11)]
"""Type of a time in seconds, also as ``90s``, ``15m``, ``2h``, ``7d``; 0 and ``always``: no end."""
