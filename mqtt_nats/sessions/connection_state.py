# SPDX-License-Identifier: Apache-2.0
"""States of a client's connection, from accept to end."""

from enum import Enum, auto


class State(Enum):
    """The state of a client's connection."""

    NEW = auto()
    OPENING = auto()
    RESUMING = auto()
    """CONNACK was sent, and the session's pending messages are being collected."""
    LIVE = auto()
    ENDED = auto()
