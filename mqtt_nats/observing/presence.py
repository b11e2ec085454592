# SPDX-License-Identifier: Apache-2.0
"""Events of clients that come and go: what they say and where they are published."""

from __future__ import annotations

from typing import Any, Final, Literal

import orjson

from mqtt_streams.hashing import name_hash
from mqtt_streams.headers import percent_encode
from mqtt_streams.subjects import MAX_SUBJECT_BYTES

SUBJECT: Final = "$MQTT.presence."
"""Below it NATS clients read the events: `connected.<client>` and `disconnected.<client>`."""

Change = Literal["connected", "disconnected"]

_ROOM: Final = 200
"""Bytes of a subject that are not the client's name."""

LONGEST: Final = 1024
"""Characters of what a client says of itself that are told: NATS takes no message of any size."""


def level(client_id: str) -> str:
    """A client id as a level of a topic, and of a subject: percent-encoded, its hash where it is too long for that."""
    found = percent_encode(client_id).replace(".", "%2E")
    return found if len(found) <= MAX_SUBJECT_BYTES - _ROOM else name_hash(client_id)


def shortened(text: str) -> str:
    """A client id or user name as it is told."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def subject(change: Change, client_id: str) -> str:
    """Where NATS clients read the event."""
    return f"{SUBJECT}{change}.{level(client_id)}"


def topic(change: Change, gateway: str, client_id: str) -> str:
    """Where MQTT clients read it."""
    return f"$SYS/brokers/{gateway}/clients/{level(client_id)}/{change}"


def event(change: Change, gateway: str, client_id: str, epoch: int, at: float, more: dict[str, Any]) -> bytes:
    """What is published: JSON, with the keys that EMQX has where there are such.

    Args:
        epoch: of the session; of two events about one client the one with the higher epoch is newer.
        at: Unix time of the change.
    """
    moment = int(at * 1000)
    found = {
        "event": change,
        "clientid": shortened(client_id),
        "gateway": gateway,
        "epoch": epoch,
        f"{change}_at": moment,
        "ts": moment,
    }
    return orjson.dumps(found | more)
