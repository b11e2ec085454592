# SPDX-License-Identifier: Apache-2.0
"""Events of clients that come and go: what they say and where they are published."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import orjson

from mqtt_streams.hashing import name_hash
from mqtt_streams.headers import percent_encode
from mqtt_streams.subjects import MAX_SUBJECT_BYTES, system_subject

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


def milliseconds(at: float) -> int:
    """A Unix time as it is told."""
    return int(at * 1000)


class Places(NamedTuple):
    """Where one event is published."""

    subject: str
    """Where NATS clients read it."""
    topic: str
    """Where MQTT clients read it."""
    inner: str
    """The subject of that topic."""


def places(change: Change, gateway: str, client_id: str) -> Places:
    """Where an event is published; a level needs no escape in a subject."""
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
    """What is published: JSON, with the keys that EMQX has where there are such.

    Args:
        epoch: of the session; of two events about one client the one with the higher epoch is newer.
        at: Unix time of the change.
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
