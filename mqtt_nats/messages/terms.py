# SPDX-License-Identifier: Apache-2.0
"""Limits and options that a client has set in CONNECT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mqtt_nats.codec import MAX_REMAINING_LENGTH

UNLIMITED: Final = MAX_REMAINING_LENGTH + 5
"""Bytes of the largest packet that MQTT knows."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Limits and options of a client's CONNECT; the defaults are the protocol's, also for a 3.1.1 client."""

    receive_maximum: int = 65535
    maximum_packet_size: int = UNLIMITED
    """Largest packet that the client takes, in bytes, with its fixed header [MQTT-3.1.2-24] (5.0)."""
    topic_alias_maximum: int = 0
    problem_information: bool = True
    response_information: bool = False
    old: bool = False
    """The client uses MQTT 3.1: CONNACK has no Session Present, SUBACK no code for a refused subscription."""


TERMS: Final = Terms()
TERMS_OLD: Final = Terms(old=True)
