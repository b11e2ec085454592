# SPDX-License-Identifier: Apache-2.0
"""Contents of presence events, and their subjects and topics."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import orjson

from mqtt_streams.hashing import name_hash
from mqtt_streams.headers import percent_encode
from mqtt_streams.subjects import MAX_SUBJECT_BYTES, system_subject

SUBJECT: Final = "$MQTT.presence."
"""Prefix of the events' subjects for NATS clients: `connected.<client>` and `disconnected.<client>`."""

Change = Literal["connected", "disconnected"]

_ROOM: Final = 200
"""Bytes of a subject reserved for everything except the client's name."""

TEXT_CHARACTERS_MOST: Final = 1024
"""Most characters of a client id, user name or reason in an event: NATS limits the size of messages."""


def level(client_id: str) -> str:
    """Return a client id as a level of topics and subjects: percent-encoded, or its hash if that is too long."""
    found = percent_encode(client_id).replace(".", "%2E")
    return found if len(found) <= MAX_SUBJECT_BYTES - _ROOM else name_hash(client_id)


def shortened(text: str) -> str:
    """Return a client id, user name or reason, shortened for an event."""
    return text if len(text) <= TEXT_CHARACTERS_MOST else f"{text[: TEXT_CHARACTERS_MOST - 1]}…"


def milliseconds(at: float) -> int:
    """Return a Unix time in milliseconds."""
    return int(at * 1000)


class Places(NamedTuple):
    """Subject and topic of one event."""

    subject: str
    """Subject for NATS clients."""
    topic: str
    """Topic for MQTT clients."""
    inner: str
    """Subject of that topic."""


def places(change: Change, gateway: str, client_id: str) -> Places:
    """Return subject and topic of an event; `level` needs no escape in a subject."""
    name = level(client_id)
    return Places(
        f"{SUBJECT}{change}.{name}",
        f"$SYS/brokers/{gateway}/clients/{name}/{change}",
        f"{_clients(gateway)}.{name}.{change}",
    )


@lru_cache(64)
def _clients(gateway: str) -> str:
    return system_subject(f"$SYS/brokers/{gateway}/clients")


def event(change: Change, gateway: str, client_id: str, epoch: int, at: float, more: dict[str, Any]) -> bytes:
    """Return an event as JSON, with EMQX's keys as far as EMQX has them.

    Args:
        epoch: epoch of the session; of two events of one client, the event with the higher epoch is newer.
        at: Unix time of the change in seconds.
    """
    moment = milliseconds(at)
    found = {
        "event": change,
        "clientid": shortened(client_id),
        "gateway": gateway,
        "epoch": epoch,
        f"{change}_at": moment,
        "ts": moment,
    }
    return orjson.dumps(found | more)
