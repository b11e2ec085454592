# SPDX-License-Identifier: Apache-2.0
"""Two limits of one message: `max_packet_size` of the gateway, and `max_payload` of nats-server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mqtt_nats.client.connect import HEADED

if TYPE_CHECKING:
    from mqtt_nats.config.settings import Settings

_MIB: Final = 1024 * 1024

USUAL: Final = _MIB
"""`max_payload` of a nats-server without the setting, in bytes."""

ADVISED: Final = 8 * _MIB
"""Bytes above which nats-server warns."""

SERVER_PAYLOAD_MOST: Final = 64 * _MIB
"""Bytes above which nats-server does not start."""


def largest_packet(settings: Settings) -> int:
    """Return the largest `max_packet_size` of the gateway and its listeners, in bytes."""
    own = [one.max_packet_size for one in settings.listeners if one.max_packet_size is not None]
    return max(int(settings.max_packet_size), *map(int, own), 0)


def wanted_payload(settings: Settings) -> int:
    """Return the bytes of `max_payload` with which the largest packet can be stored: at most `SERVER_PAYLOAD_MOST`."""
    return min(max(largest_packet(settings) + HEADED, USUAL), SERVER_PAYLOAD_MOST)


def disagreement(settings: Settings, max_payload: int) -> str:
    """Return a warning if packets are accepted that nats-server with this `max_payload` refuses; empty otherwise."""
    most = largest_packet(settings)
    if most <= max_payload:
        return ""
    return (
        f"max_packet_size is {most:,} bytes, and nats-server takes {max_payload:,} with headers (max_payload): clients "
        f"that publish more are disconnected; set max_payload of nats-server to {wanted_payload(settings):,}"
    )


def advice(settings: Settings) -> str:
    """Return a warning about `max_packet_size` that needs no connection to nats-server; empty without one."""
    most = largest_packet(settings)
    if most + HEADED > SERVER_PAYLOAD_MOST:
        bound = f"{SERVER_PAYLOAD_MOST:,} with headers (max_payload)"
        return f"max_packet_size is {most:,} bytes, and nats-server takes at most {bound}"
    if settings.embedded:
        return f"max_packet_size is {most:,} bytes: nats-server advises at most {ADVISED:,}" if most > ADVISED else ""
    if most <= USUAL:
        return ""
    return (
        f"max_packet_size is {most:,} bytes: nats-server needs max_payload of {most + HEADED:,} or more, and has "
        f"{USUAL:,} by default; the gateway warns at its start if it has less"
    )
