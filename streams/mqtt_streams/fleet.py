# SPDX-License-Identifier: Apache-2.0
"""KV bucket `MQTT_fleet`: requests to every gateway (wishes), also for gateways that were away or start later.

Each wish has an id, so that a repeated request is a new wish. One more key, the pause, has all gateways serve nobody
while the streams are replaced.
"""

from hashlib import sha256
from typing import Final, Literal, NamedTuple, cast

import orjson

from mqtt_streams import stored
from mqtt_streams.api import ApiError, JetStream, call, kv_subject, publish
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.headers import REPLACING
from mqtt_streams.pages import pages_of
from mqtt_streams.stored import newest

STREAM: Final = "KV_MQTT_fleet"
BUCKET: Final = "MQTT_fleet"
PREFIX: Final = "$KV.MQTT_fleet."


PAUSE_SUBJECT: Final = f"{PREFIX}pause"

PAUSE_S: Final = 30.0
"""Seconds for which an announced pause holds unless it is renewed: no stream is changed before the next stage."""


Stage = Literal["announced", "restoring", "ended"]


class Pause(NamedTuple):
    """The last pause of the fleet.

    `identity`: id of the command that asks for it. `stage`: `announced`: gateways end, and nothing is changed yet;
    `restoring`: streams are incomplete, and no gateway may serve them until a restore is complete; `ended`.
    `age`: seconds since it was written, by nats-server's clock.
    """

    identity: str
    stage: Stage
    age: float

    @property
    def in_force(self) -> bool:
        """Whether no gateway may serve."""
        return self.stage == "restoring" or (self.stage == "announced" and self.age < PAUSE_S)


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


def read_pause(payload: bytes) -> tuple[str, Stage] | None:
    """Return id and stage of a pause as written by `FleetStore.put_pause`; None for any other payload."""
    try:
        found = orjson.loads(payload)
        kind, identity, stage = found["kind"], found["id"], found["stage"]
    except (ValueError, KeyError, TypeError):
        return None
    legal = kind == "pause" and isinstance(identity, str) and stage in ("announced", "restoring", "ended")
    return (identity, cast("Stage", stage)) if legal else None


class FleetStore:
    """Store that reads and writes wishes and the pause."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def put(self, wish: Wish) -> None:
        """Store a wish in place of the last one on its subject. Raises ApiError, NoResponders, RequestTimeout."""
        body = {"kind": wish.kind, "id": wish.identity, "name": wish.name, "loaded": wish.loaded}
        await publish(self._js, kv_subject(self._js, wish_subject(wish)), orjson.dumps(body), REPLACING)

    async def all(self) -> list[Wish]:
        """Return every wish. Raises ApiError, NoResponders, RequestTimeout."""
        found = [message async for page in pages_of(self._js, STREAM, PREFIX + ">") for message in page]
        wishes = (read_wish(message.payload) for message in newest(found))
        return [one for one in wishes if one is not None]

    async def put_pause(self, identity: str, stage: Stage) -> None:
        """Write the pause in place of the last one. Raises ApiError, NoResponders, RequestTimeout."""
        body = orjson.dumps({"kind": "pause", "id": identity, "stage": stage})
        await publish(self._js, kv_subject(self._js, PAUSE_SUBJECT), body, REPLACING)

    async def pause(self) -> Pause | None:
        """Return the last pause; None without one. Raises ApiError, NoResponders, RequestTimeout."""
        try:
            message = await stored.get_last(self._js, STREAM, PAUSE_SUBJECT)
            found = read_pause(message.payload) if message is not None else None
            if message is None or found is None:
                return None
            info = await call(self._js, f"STREAM.INFO.{STREAM}")
        except ApiError as error:
            if error.err_code == STREAM_NOT_FOUND:
                return None
            raise
        return Pause(*found, (stored.time_ns(info["ts"]) - message.time_ns) / 1e9)
