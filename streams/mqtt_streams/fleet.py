# SPDX-License-Identifier: Apache-2.0
"""KV bucket `MQTT_fleet`: requests to every gateway (wishes), also for gateways that were away or start later.

Each wish has an id, so that a repeated request is a new wish.
"""

from hashlib import sha256
from typing import Final, NamedTuple

import orjson

from mqtt_streams.api import JetStream, publish
from mqtt_streams.pages import pages_of

STREAM: Final = "KV_MQTT_fleet"
BUCKET: Final = "MQTT_fleet"
PREFIX: Final = "$KV.MQTT_fleet."


class Wish(NamedTuple):
    """Request to every gateway: `kind` is `plugin` (load or unload plugin `name`) or `reload` (reload the files)."""

    kind: str
    identity: str
    name: str = ""
    loaded: bool = False


def wish_subject(wish: Wish) -> str:
    """Return the subject of a wish. A plugin's name is hashed, as it may have characters illegal in a subject."""
    if wish.kind == "plugin":
        return f"{PREFIX}plugin.{sha256(wish.name.encode()).hexdigest()[:32]}"
    return f"{PREFIX}{wish.kind}"


def read_wish(payload: bytes) -> Wish | None:
    """Return a wish as written by `FleetStore.put`; None for any other payload."""
    try:
        found = orjson.loads(payload)
        values = (found["kind"], found["id"], found.get("name", ""), found.get("loaded", False))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    legal = all(isinstance(one, str) for one in values[:3]) and isinstance(values[3], bool)
    return Wish(*values) if legal and values[0] in ("plugin", "reload") else None


class FleetStore:
    """Store that reads and writes wishes."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def put(self, wish: Wish) -> None:
        """Store a wish in place of the last one on its subject. Raises ApiError, NoResponders, RequestTimeout."""
        body = {"kind": wish.kind, "id": wish.identity, "name": wish.name, "loaded": wish.loaded}
        await publish(self._js, wish_subject(wish), orjson.dumps(body), b"")

    async def all(self) -> list[Wish]:
        """Return every wish. Raises ApiError, NoResponders, RequestTimeout."""
        found: list[Wish] = []
        async for page in pages_of(self._js, STREAM, PREFIX + ">"):
            for message in page:
                wish = read_wish(message.payload)
                if wish is not None:
                    found.append(wish)
        return found
