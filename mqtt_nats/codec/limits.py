# SPDX-License-Identifier: Apache-2.0
"""What the decoder accepts from a peer: every bound is the caller's explicit choice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one connection. What has a default is bounded by the size of packets anyway, or by the protocol."""

    max_packet_size: int
    """Bytes of a whole packet, fixed header included, after CONNECT."""
    connect_packet_size: int
    """Bytes of the whole CONNECT packet, and of AUTH until CONNACK: what a stranger may make the decoder buffer."""
    max_topic_levels: int
    """Levels of a topic name or filter."""
    max_filters: int
    """Filters of one SUBSCRIBE or UNSUBSCRIBE."""
    max_user_properties: int
    """User properties of one property list."""
    max_user_property_bytes: int = 0xFFFF_FFFF
    """Bytes of their names and values."""
    max_qos: int = 2
    """Highest QoS of a PUBLISH and of a will."""
