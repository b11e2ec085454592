# SPDX-License-Identifier: Apache-2.0
"""What stands in place of a JetStream acknowledgement subject, by its first byte."""

from __future__ import annotations

from typing import Final

TAKEN: Final = b"@"
"""Instead of an acknowledgement subject: the message of this sequence was taken from the shared reader."""

OWED: Final = b"%"
"""Instead of that of a PUBREL record: PUBREL is owed for this packet identifier, as the position says."""

KEPT: Final = (TAKEN, OWED)

ASSIGNED: Final = b"="
"""Instead of an acknowledgement subject: the record of this sequence says that the message is this client's."""

RECORD: Final = b"&"
"""Before an acknowledgement subject: it is that of a PUBREL record."""

MARKS: Final = (ASSIGNED, RECORD)


def assigned(record: int, ack: bytes, confirmed: float) -> bytes:
    """What stands for a group's message that is this client's, by the record of this sequence.

    Args:
        record: sequence of the record in ``$MQTT_shared``.
        ack: subject that acknowledges the message to the group's consumer; empty: not known.
        confirmed: loop time at which JetStream has confirmed that acknowledgement; 0 = not to this connection.
    """
    return b"%b%d %d %b" % (ASSIGNED, record, int(confirmed * 1e6), ack)


def removed(record: int) -> bytes:
    """As :func:`assigned`, of a message that is in the stream no more: nothing delivers it again."""
    return b"%b%d" % (ASSIGNED, record)
