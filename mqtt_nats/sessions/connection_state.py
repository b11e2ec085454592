# SPDX-License-Identifier: Apache-2.0
"""Where a connection is in its life."""

from enum import Enum, auto


class State(Enum):
    """Where a connection is in its life."""

    NEW = auto()
    OPENING = auto()
    RESUMING = auto()
    """CONNACK was sent, and the session's messages are being looked for."""
    LIVE = auto()
    ENDED = auto()
