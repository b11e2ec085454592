# SPDX-License-Identifier: Apache-2.0
"""What every client, and whoever kills processes, writes down: a line of JSON for each event, only ever appended.

A line has the time (``time.monotonic_ns``), who, what, and fields. A message is known by its publisher (``of``) and its
number there (``n``). These are the words:

    ============ ============================================================ ======================================
    what         means                                                        fields
    ============ ============================================================ ======================================
    connect      CONNECT is sent                                              port, clean, conn
    connected    CONNACK accepts                                              port, present, conn
    refused      CONNACK, an acknowledgement or SUBACK does not               code, and topic, n or filter
    lost         the connection has ended otherwise                           reason, conn, open
    disconnect   the client sends DISCONNECT                                  conn
    abandoned    the client ends without DISCONNECT and does not come back    conn
    taken-over   the server says that another connection has the session      conn
    will         CONNECT had a will, and is accepted                          topic, qos, n (negative), delay
    publish      PUBLISH is handed over; once more, with dup, when sent again topic, qos, n, id, dup, conn
    acked        PUBACK, or PUBCOMP, has come                                 topic, n, conn
    unknown      the session is gone; what it knew of a released message too  topic, n
    subscribe    SUBSCRIBE is sent                                            filter, qos
    subscribed   SUBACK grants                                                filter, qos
    unsubscribe  UNSUBSCRIBE is sent                                          filter
    received     PUBLISH has come                                             of, n, topic, qos, dup, id, retain, conn
    delivered    the application gets the message                             of, n, topic
    released     PUBREL has come                                              id
    ============ ============================================================ ======================================

``conn`` numbers the connections of all clients; ``open`` are the packet identifiers of messages that were received and
not acknowledged. Others write ``killed``, ``started``, ``stopped``, ``cut`` with the name of what they did it to.
"""

from __future__ import annotations

import heapq
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

_BUFFERED = 65_536  # bytes


class Event(NamedTuple):
    """One line. ``t`` is in nanoseconds of a clock that all processes of a machine share."""

    t: int
    who: str
    what: str
    fields: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        """A field; None where it has none of that name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self.fields.get(name)


class History:
    """The events of one client, in a file of its own, which is not kept open.

    Args:
        path: the file; lines are appended to it.
        who: whose events; the file's name without its suffix when empty.
    """

    def __init__(self, path: Path, who: str = "") -> None:
        self.path = path
        self.who = who or path.stem
        self._buffer = bytearray()
        path.touch()
        _LIVE.add(self)

    def __del__(self) -> None:
        self.flush()

    def note(self, what: str, /, **fields: Any) -> None:
        """Append an event that happens now."""
        fields["t"] = time.monotonic_ns()
        fields["who"] = self.who
        fields["what"] = what
        self._buffer += orjson.dumps(fields)
        self._buffer += b"\n"
        if len(self._buffer) > _BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Let other processes read everything."""
        if self._buffer:
            with self.path.open("ab") as file:
                file.write(self._buffer)
            self._buffer.clear()

    def close(self) -> None:
        """No more events."""
        self.flush()


_LIVE: weakref.WeakSet[History] = weakref.WeakSet()


def read(paths: Iterable[Path]) -> list[Event]:
    """The events of several files in the order of their time."""
    for history in list(_LIVE):
        history.flush()
    return list(heapq.merge(*map(_lines, paths), key=lambda event: event.t))


def _lines(path: Path) -> Iterator[Event]:
    with path.open("rb") as file:
        for line in file:
            fields = orjson.loads(line)
            yield Event(fields.pop("t"), fields.pop("who"), fields.pop("what"), fields)
