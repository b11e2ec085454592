# SPDX-License-Identifier: Apache-2.0
"""Tokens that stand in place of a JetStream acknowledgement subject; the first byte is their kind."""

from __future__ import annotations

from typing import Final

TAKEN: Final = b"@"
"""A stream sequence follows: that message was taken from the shared reader."""

OWED: Final = b"%"
"""A packet identifier follows: the session's position has its PUBREL as owed. Stands for a PUBREL record."""

KEPT: Final = (TAKEN, OWED)
"""Kinds of tokens whose messages are in the session's position."""

ASSIGNED: Final = b"="
"""The sequence of an assignment follows: a group's message is this client's; see `assigned`."""

RECORD: Final = b"&"
"""The acknowledgement subject of a PUBREL record follows."""

MARKS: Final = (ASSIGNED, RECORD)
"""Kinds of tokens whose records are removed later, by `DeferredRemovals`."""


def assigned(record: int, ack: bytes, confirmed: float) -> bytes:
    """Return the token of a group's message that is assigned to this client.

    Args:
        record: sequence of the assignment in ``$MQTT_shared``.
        ack: subject that acknowledges the message to the group's consumer; empty = not known.
        confirmed: loop time in seconds at which JetStream confirmed that acknowledgement; 0 = not to this connection.
    """
    return b"%b%d %d %b" % (ASSIGNED, record, int(confirmed * 1e6), ack)


def removed(record: int) -> bytes:
    """Return the token of an assigned message that was removed from the stream: no consumer delivers it again."""
    return b"%b%d" % (ASSIGNED, record)
