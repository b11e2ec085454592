# SPDX-License-Identifier: Apache-2.0
"""Notices about sessions, and the causes of the ends of connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mqtt_nats.codec import ReasonCode
from mqtt_nats.hooks.events import Session

if TYPE_CHECKING:
    from mqtt_nats.hooks.chain import Notice
    from mqtt_nats.hooks.registry import Hooks

CAUSES: Final = {
    ReasonCode.KEEP_ALIVE_TIMEOUT: "keep alive timeout",
    ReasonCode.ADMINISTRATIVE_ACTION: "administrator",
    ReasonCode.SERVER_SHUTTING_DOWN: "shutdown",
    ReasonCode.USE_ANOTHER_SERVER: "shutdown",
    ReasonCode.NOT_AUTHORIZED: "not authorized",
    ReasonCode.MAXIMUM_CONNECT_TIME: "not authorized",
    ReasonCode.QUOTA_EXCEEDED: "limit",
    ReasonCode.MESSAGE_RATE_TOO_HIGH: "limit",
    ReasonCode.MALFORMED_PACKET: "protocol error",
    ReasonCode.PROTOCOL_ERROR: "protocol error",
    ReasonCode.TOPIC_NAME_INVALID: "protocol error",
    ReasonCode.RECEIVE_MAXIMUM_EXCEEDED: "protocol error",
    ReasonCode.TOPIC_ALIAS_INVALID: "protocol error",
    ReasonCode.PACKET_TOO_LARGE: "protocol error",
    ReasonCode.PAYLOAD_FORMAT_INVALID: "protocol error",
    ReasonCode.QOS_NOT_SUPPORTED: "protocol error",
}
"""Causes of ends of connections by the gateway, by reason code; every other reason code is `error`."""

DISCONNECTS: Final = ("client", "taken over", "lost", *dict.fromkeys(CAUSES.values()), "error")
"""All causes of ends of connections: DISCONNECT of the `client`, takeover, loss, and those of the gateway."""


def session(hooks: Hooks, point: Notice[Session], client_id: str, epoch: int) -> None:
    """Emit a notice about a session."""
    chain = hooks.noticing(point) if hooks.in_use else None
    if chain is not None:
        chain.emit(Session(client_id, epoch))
