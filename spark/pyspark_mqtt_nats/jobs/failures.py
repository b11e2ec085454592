# SPDX-License-Identifier: Apache-2.0
"""Exceptions of Spark as one line.

What the data source raises in a Python worker arrives as text inside a Java exception, with the stack traces of both
languages around it. `explain` takes out the message; Spark's own conditions get the option that they are about.
"""

import re
from typing import Final

from pyspark_mqtt_nats.errors import OptionError, SourceError
from pyspark_mqtt_nats.java import JavaError
from pyspark_mqtt_nats.jobs import JobError

OURS: Final = (JobError, OptionError, SourceError, JavaError)
"""Exceptions whose text is for users."""

OWN_VIEW: Final = (
    "CREATE TEMPORARY VIEW name (topic STRING, payload STRING) USING mqtt_nats OPTIONS (servers '...'), "
    "in `mqtt-nats spark shell`"
)
"""Statement that makes a view into which INSERT INTO publishes."""

MORE: Final = "; --log FILE has the whole story"
"""What ends a text that need not be enough to know what to do."""

_LENGTH: Final = 400  # characters of a message that is not ours

# `pyspark_mqtt_nats.errors.ConnectError: text` as the last line of a Python traceback
_OURS: Final = re.compile(r"^(?:.*\s)?pyspark_mqtt_nats(?:\.\w+)+: (.+?)(?: SQLSTATE: \w+)?$", re.MULTILINE)
# `[PATH_NOT_FOUND] text SQLSTATE: 42K03`; after a colon at the end of the first line more lines say what it is about
_CONDITION: Final = re.compile(r"\[([A-Z][A-Z0-9_]{3,}(?:\.[A-Z0-9_]+)?)\] (.+(?:(?<=:)\n[\s\S]+?(?=\s*SQLSTATE))?)")
_PYTHON: Final = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit)): (.+)$", re.MULTILINE)
# Nested in one line, the innermost last: `org.apache.spark.SparkException: ...: java.io.IOException: text`
_JAVA: Final = re.compile(r"\b(?:[a-z]\w*\.)+(\w+(?:Exception|Error)): (?=(.+))")
_STATE: Final = re.compile(r"\.?\s*SQLSTATE: \w+(?:; line \d+ pos \d+)?;?(?=\s*$| \(line \d+, pos \d+\)\s*$)")
# What Spark writes below its message: the plan of a query, or the statement.
_BELOW: Final = re.compile(r"=== Streaming Query ===|== SQL\b")

_WRAPPERS: Final = (
    "PYTHON_DATA_SOURCE_ERROR",
    "PYTHON_EXCEPTION",
    "PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR",
    "STREAM_FAILED",
    "TASK_WRITE_FAILED",
    "FOREACH_BATCH_USER_FUNCTION_ERROR",
)

_CONCURRENT: Final = re.compile("Multiple streaming queries are concurrently using|another writer already committed")

NO_WORKER: Final = "Python worker failed to connect back"
"""What Spark says when a worker has not come up within ten seconds."""

_INSERT: Final = re.compile("unresolved operator: 'InsertIntoStatement")

_NO_ROOM: Final = re.compile("No space left on device|Disk quota exceeded|File too large")
_NO_PLACE: Final = re.compile("Mkdirs failed to create|Permission denied|Read-only file system")

_HINTS: Final = {
    "PATH_NOT_FOUND": "change --input",
    "UNABLE_TO_INFER_SCHEMA": "there is nothing to read in --input, or --format is another",
    "FAILED_READ_FILE": "a file in --input cannot be read, or --format is another",
    "PATH_ALREADY_EXISTS": "change --output, or give --overwrite",
    "DATA_SOURCE_NOT_FOUND": "change --format, or add its package by --conf spark.jars.packages=...",
    "TABLE_OR_VIEW_NOT_FOUND": "the views are messages, retained and sessions, and those of --stream",
    "UNSUPPORTED_DATA_TYPE_FOR_DATASOURCE": "leave it out, CAST it, take to_json() of it, or change --output",
    "CONCURRENT_STREAM_LOG_UPDATE": "another run uses the same --checkpoint",
    "CONCURRENT_QUERY": "another run uses the same --checkpoint",
}


def explain(error: BaseException) -> str:
    """Return the text of an error in one line for a user, without a stack trace."""
    if isinstance(error, OURS):
        return str(error)
    if type(error).__name__ in ("Py4JNetworkError", "ConnectionRefusedError", "Py4JError"):
        return "Spark's JVM has ended; give it more memory by --conf spark.driver.memory=4g, or look into its --log"
    text = _full_text(error)
    if found := _OURS.findall(text):
        return str(found[-1]).strip()
    if _CONCURRENT.search(text):
        return "another run writes there at the same time; wait for it, or change --output and --checkpoint"
    if NO_WORKER in text:
        return f"{NO_WORKER}: the machine is busy; run it again later, or with fewer tasks by --master local[2]"
    if _INSERT.search(text):
        return f"INSERT INTO needs a view with the columns that are written: use {OWN_VIEW}"
    conditions = [(name, message) for name, message in _CONDITION.findall(text) if name not in _WRAPPERS]
    if conditions:
        name, message = conditions[-1]
        message = _short(_STATE.sub("", message)).rstrip(".")
        hint = next((hint for key, hint in _HINTS.items() if name.startswith(key)), "")
        return f"{message}; {hint}" if hint else message
    for pattern in (_PYTHON, _JAVA):
        if found := pattern.findall(text):
            kind, message = found[-1]
            return f"{kind}: {_short(_STATE.sub('', message)).rstrip('.')}{_where(text)}{MORE}"
    return f"{type(error).__name__}: {_short(text)}{MORE}"


def _where(text: str) -> str:
    """Return what to change where a directory cannot be written, "" for other errors."""
    if _NO_ROOM.search(text):
        return "; make room, or change --output, --checkpoint or --conf spark.local.dir=DIR"
    return "; change --output or --checkpoint" if _NO_PLACE.search(text) else ""


def _full_text(error: BaseException) -> str:
    """The text of an exception with those of its causes, the outermost first."""
    texts: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(texts) < 10:
        texts.append(str(seen))
        # What pyspark makes of a Java exception has its cause as an attribute.
        cause = getattr(seen, "cause", None)
        seen = cause if isinstance(cause, BaseException) else seen.__cause__
    return "\n".join(texts)


def _short(text: str) -> str:
    line = " ".join(_BELOW.split(text)[0].split())
    return line if len(line) <= _LENGTH else line[:_LENGTH] + "…"
