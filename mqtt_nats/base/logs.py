# SPDX-License-Identifier: Apache-2.0
"""Log records as text or JSON, with the ids of gateway, client and connection, and a budget for each kind of record.

A record names its gateway, and its client and connection when one of its arguments has a method ``log_fields``, which
returns these ids by their names in a record. Ids are computed only for records that are written.

A client can cause most records at any rate, with names that it chooses. So the handler writes a burst of
:data:`RECORDS_BURST` records of a kind, then :data:`RECORDS_PER_S`, and at intervals the number of omitted records.
:func:`frequent` gives a kind a budget of its own. The kind of a record is its text without arguments, unless the record
names its kind. Records of level DEBUG and :func:`unlimited` ones have no budget. Every argument and every record is
shortened.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final, Literal, TextIO

from mqtt_nats.base.bucket import Bucket

Format = Literal["text", "json"]

RECORDS_BURST: Final = 20.0
"""Records of one kind that are written in a burst."""

RECORDS_PER_S: Final = 1.0
"""Records of one kind that are written per second after a burst."""

SUMMARY_S: Final = 10.0
"""Seconds between two summaries of the omitted records, one number for each kind."""

REPEAT_S: Final = 60.0
"""Seconds in which a record that :func:`once` marks is not repeated."""

KINDS_MOST: Final = 1000
"""Most kinds, and most texts of :func:`once`, that are stored; at the limit all are dropped."""

NAME_LENGTH: Final = 100
"""Most characters of a name in a record."""

TEXT_LENGTH: Final = 1000
"""Most characters of the text of a record."""

TRACEBACK_LENGTH: Final = 8000
"""Most characters (about) of the traceback of a record."""

GATEWAY: Final[ContextVar[Callable[[], str] | None]] = ContextVar("mqtt_nats_gateway", default=None)
"""Function that returns the id of the present task's gateway; tasks and callbacks inherit it."""

FAILURES: Final[Counter[str]] = Counter()
"""Number of refusals and failures of the process since its start, by kind, logged or not."""


def about(**fields: Any) -> dict[str, Any]:
    """Return the argument ``extra`` of a record with further fields."""
    return {"fields": fields}


def once(text: str) -> dict[str, Any]:
    """Return the argument ``extra`` of a record that is omitted for `REPEAT_S` after one with the same ``text``."""
    return {"once": text}


def spoken(text: str) -> dict[str, Any]:
    """Return the argument ``extra`` of a record that is written and makes :func:`once` omit later ones of ``text``."""
    return {"spoken": text}


def unlimited() -> dict[str, Any]:
    """Return the argument ``extra`` of a record without a budget: of what an administrator does, not a client."""
    return {"unlimited": True}


def frequent(kind: str, per_s: float, **fields: Any) -> dict[str, Any]:
    """Return the argument ``extra`` of a record whose kind has a budget of ``per_s`` records per second."""
    return {"kind": kind, "per_s": per_s, "fields": fields}


def admits(log: logging.Logger, level: int, kind: str) -> bool:
    """Whether a record of a :func:`frequent` kind would be written now; count it as omitted if its budget is used up.

    Callers ask before they make the record: making it takes longer than a tenth of a connection's start.
    """
    if not log.isEnabledFor(level):
        return False
    exhausted = False
    for handler in logging.root.handlers:
        if isinstance(handler, Budgeted):
            if not handler.exhausted(kind):
                return True
            exhausted = True
    if exhausted:
        for handler in _handlers():
            handler.omit(kind)
    return not exhausted


def log_failure(
    log: logging.Logger, level: int, kind: str, text: str, *args: object, extra: Mapping[str, Any] | None = None
) -> None:
    """Count a refusal or a failure that a client can cause, and log it.

    Args:
        kind: key of :data:`FAILURES`; it must not contain text from a client.
    """
    FAILURES[kind] += 1
    if log.isEnabledFor(level):
        log.log(level, text, *args, extra={**(extra or {}), "kind": kind}, stacklevel=2)


def plain(text: str) -> str:
    """Return a text on one line; characters that are not printable, such as terminal controls, are escaped."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(one: str) -> str:
    return one if one.isprintable() else f"\\u{{{ord(one):x}}}"


def shorten(text: str, length: int = NAME_LENGTH) -> str:
    """Return a client's text for the log; of one longer than ``length`` its beginning and its length."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the ids of a record's gateway, client and connection, and its further fields, shortened."""
    found = _fields_of(record)
    return {name: shorten(value) if isinstance(value, str) else value for name, value in found.items()}


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = {}
    identity = GATEWAY.get()
    if identity is not None:
        found["gateway"] = identity()
    if isinstance(record.args, tuple):
        for argument in record.args:
            if hasattr(argument, "log_fields"):
                found |= argument.log_fields()
    found |= getattr(record, "fields", {})
    return found


class Text(logging.Formatter):
    """Formatter for readable text; fields except the client are appended in brackets."""

    def __init__(self, worker: int = 0) -> None:
        number = f" [{worker}]" if worker else ""
        super().__init__(f"%(asctime)s %(levelname)s %(name)s{number}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without a traceback: one line, also where a name in it has a line feed."""
        line = super().formatMessage(record)
        fields = fields_of(record)
        fields.pop("client", None)
        if fields:
            line = f"{line} [{' '.join(f'{name}={value}' for name, value in fields.items())}]"
        return plain(line)


class Json(logging.Formatter):
    """Formatter for JSON, one object per line; the time is UTC."""

    def __init__(self, worker: int = 0) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
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
            found["exception"] = record.exc_text or self.formatException(record.exc_info)
        return json.dumps(found, default=str)


class _Kind:
    """Budget of one kind of records, and the number of omitted records."""

    __slots__ = ("_example", "bucket", "left_out", "level", "logger")

    def __init__(self, record: logging.LogRecord, now: float) -> None:
        per_s: float = getattr(record, "per_s", RECORDS_PER_S)
        self.bucket = Bucket(per_s, max(per_s, RECORDS_BURST), now)
        self.left_out = 0
        self.logger, self.level = record.name, record.levelno
        self._example = ""
        """Text of the last record that was written, or of the first one that was omitted since."""

    def admits(self, record: logging.LogRecord, repeated: bool, now: float) -> bool:
        """Whether a record is written; an omitted record is counted."""
        admitted = not repeated and self.bucket.add_if_room(now)
        if admitted or not self.left_out:  # to make the text of each omitted record would cost too much
            self._example = _text(record)
        if not admitted:
            self.omit()
        return admitted

    def omit(self) -> None:
        """Count a record as omitted."""
        self.left_out += 1

    def summary(self) -> logging.LogRecord:
        """Return a record with the number of records omitted since the last summary, and the text of one of them."""
        count, self.left_out = self.left_out, 0
        text = f"{count} more records of this kind were omitted, such as: {self._example}"
        return logging.LogRecord(self.logger, self.level, "", 0, text, (), None)


class Budgeted(logging.StreamHandler[TextIO]):
    """Handler that writes shortened records within the budgets of their kinds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._kinds: dict[object, _Kind] = {}
        self._written: dict[str, float] = {}
        """Time of the clock at which a record of each :func:`once` text was written."""
        self._due = clock() + SUMMARY_S
        self.left_out = 0
        """Number of omitted records since the start."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write or omit a record."""
        now = self._clock()
        free = record.levelno <= logging.DEBUG or getattr(record, "unlimited", False)
        if free or self._kind(record, now).admits(record, self._repeated(record, now), now):
            self._write(record)
        else:
            self.left_out += 1
        self.tick()

    def _write(self, record: logging.LogRecord) -> None:
        try:
            short = _shortened(record)
        except Exception:  # the arguments do not fit the text
            self.handleError(record)
            return
        super().emit(short)

    def tick(self) -> None:
        """Write the summaries when they are due."""
        if self._clock() >= self._due:
            self.summarize()

    def summarize(self) -> None:
        """Write a summary for every kind with omitted records."""
        self.acquire()
        try:
            self._due = self._clock() + SUMMARY_S
            for one in self._kinds.values():
                if one.left_out:
                    self._write(one.summary())
        finally:
            self.release()

    def exhausted(self, kind: str) -> bool:
        """Whether the budget of a kind has no room for a record now."""
        found = self._kinds.get(kind)
        return found is not None and not found.bucket.has_room(self._clock())

    def omit(self, kind: str) -> None:
        """Count a record of a kind as omitted; :func:`tick` writes the summary."""
        self._kinds[kind].omit()
        self.left_out += 1

    def close(self) -> None:
        """Write the summaries and close the handler."""
        self.summarize()
        super().close()

    def _kind(self, record: logging.LogRecord, now: float) -> _Kind:
        name = getattr(record, "kind", None) or (record.name, str(record.msg))
        found = self._kinds.get(name)
        if found is None:
            if len(self._kinds) >= KINDS_MOST:
                self.summarize()
                self._kinds.clear()
            found = self._kinds[name] = _Kind(record, now)
        return found

    def _repeated(self, record: logging.LogRecord, now: float) -> bool:
        text: str = getattr(record, "once", "")
        if text and now - self._written.get(text, -REPEAT_S) < REPEAT_S:
            return True
        text = text or getattr(record, "spoken", "")
        if text:
            if len(self._written) >= KINDS_MOST:
                self._written.clear()
            self._written[text] = now
        return False


def _shortened(record: logging.LogRecord) -> logging.LogRecord:
    """Return the record with shortened arguments, text and traceback."""
    changes: dict[str, Any] = {}
    if isinstance(record.args, tuple):
        changes["args"] = tuple(map(_short_argument, record.args))
    if record.exc_info:
        lines = logging.Formatter().formatException(record.exc_info).split("\n")
        traceback = "\n".join(map(plain, lines))  # an error's text may have controls that a terminal obeys
        half = TRACEBACK_LENGTH // 2
        cut = f"{traceback[:half]}\n...\n{traceback[-half:]}"
        changes["exc_text"] = traceback if len(traceback) <= TRACEBACK_LENGTH else cut
    found = logging.makeLogRecord(record.__dict__ | changes)
    text = found.getMessage()
    if len(text) <= TEXT_LENGTH:
        return found
    changes |= {"msg": shorten(text, TEXT_LENGTH), "args": (), "fields": _fields_of(record)}
    return logging.makeLogRecord(record.__dict__ | changes)


def _text(record: logging.LogRecord) -> str:
    """Return the text of a record, shortened; the text without arguments if these do not fit."""
    try:
        return _shortened(record).getMessage()
    except Exception:  # the handler reports the same error when it writes the record
        return str(record.msg)


def _short_argument(argument: object) -> object:
    if isinstance(argument, str):
        return shorten(argument)
    if isinstance(argument, bytes) and len(argument) > NAME_LENGTH:
        return argument[:NAME_LENGTH]
    return argument


def _handlers() -> list[Budgeted]:
    return [handler for handler in logging.root.handlers if isinstance(handler, Budgeted)]


def tick() -> None:
    """Write the summaries that are due; called at intervals."""
    for handler in _handlers():
        handler.tick()


def left_out() -> int:
    """Return the number of records that the process has omitted since its start."""
    return sum(handler.left_out for handler in _handlers())


LOGGER: Final = "mqtt_nats"
"""Logger above all loggers of the gateway."""

LEVELS: Final = ("debug", "info", "warning", "error", "critical")


def set_level(logger: str, level: str) -> None:
    """Set the least severe level of a logger's records; ``level`` "default": the level of the logger above it.

    Raises:
        ValueError: the process has no such logger, or the level is unknown.
    """
    if logger not in levels():
        raise ValueError(f"there is no logger {logger!r}")
    if level not in (*LEVELS, "default"):
        raise ValueError(f"{level!r} is not a level: expected {', '.join(LEVELS)} or default")
    logging.getLogger(logger).setLevel(logging.NOTSET if level == "default" else level.upper())


def levels() -> dict[str, str]:
    """Return the level in force of each logger of the gateway, by the names of the loggers, in their order."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(f"{LOGGER}.")]
    return {
        name: logging.getLevelName(logging.getLogger(name).getEffectiveLevel()).lower()
        for name in (LOGGER, *sorted(names))
    }


def configure(level: str, kind: Format, worker: int = 0) -> None:
    """Write records of at least ``level`` to standard error.

    Args:
        worker: number of this worker process; 0: there is only one process.
    """
    handler = Budgeted(sys.stderr)
    handler.setFormatter(Json(worker) if kind == "json" else Text(worker))
    logging.basicConfig(level=level.upper(), handlers=[handler])
