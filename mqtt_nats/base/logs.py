# SPDX-License-Identifier: Apache-2.0
"""Log records as text or JSON, with the ids of what they are about.

A record says which gateway it is from, and which client and connection it is about when one of its arguments is
:class:`Loggable`. Nothing is worked out for records that nobody writes.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, Literal, Protocol, runtime_checkable

Format = Literal["text", "json"]

GATEWAY: Final[ContextVar[Callable[[], str] | None]] = ContextVar("mqtt_nats_gateway", default=None)
"""The id of the gateway whose task it is; its tasks and callbacks inherit it."""


@runtime_checkable
class Loggable(Protocol):
    """What a record can be about."""

    def log_fields(self) -> dict[str, Any]:
        """Its ids, by the names that they have in a record."""


def about(**fields: Any) -> dict[str, Any]:
    """The argument ``extra`` of a record with more fields."""
    return {"fields": fields}


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The ids of what a record is about."""
    found: dict[str, Any] = {}
    identity = GATEWAY.get()
    if identity is not None:
        found["gateway"] = identity()
    if isinstance(record.args, tuple):
        for argument in record.args:
            if isinstance(argument, Loggable):
                found |= argument.log_fields()
    found |= getattr(record, "fields", {})
    return found


class Text(logging.Formatter):
    """One line for people; ids that the line does not say come last, in brackets."""

    def __init__(self, worker: int = 0) -> None:
        number = f" [{worker}]" if worker else ""
        super().__init__(f"%(asctime)s %(levelname)s %(name)s{number}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, without a traceback."""
        line = super().formatMessage(record)
        fields = fields_of(record)
        fields.pop("client", None)
        if not fields:
            return line
        return f"{line} [{' '.join(f'{name}={value}' for name, value in fields.items())}]"


class Json(logging.Formatter):
    """One JSON object in one line; the time is UTC."""

    def __init__(self, worker: int = 0) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        found: dict[str, Any] = {
            "time": when.removesuffix("+00:00") + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._worker:
            found["worker"] = self._worker
        found |= fields_of(record)
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


def configure(level: str, kind: Format, worker: int = 0) -> None:
    """Write records of at least ``level`` to standard error.

    Args:
        worker: number of the process among several; 0: it is the only one.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json(worker) if kind == "json" else Text(worker))
    logging.basicConfig(level=level.upper(), handlers=[handler])
