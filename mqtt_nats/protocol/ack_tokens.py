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
