# SPDX-License-Identifier: Apache-2.0
"""KV bucket `MQTT_bans`: bans that hold at every gateway. The TTL of a key ends its ban."""

from hashlib import sha256
from math import ceil
from typing import Any, Final

import orjson

from mqtt_streams import headers
from mqtt_streams.api import TellingJetStream, kv_subject, publish
from mqtt_streams.gateway_subjects import BANS
from mqtt_streams.pages import pages_of
from mqtt_streams.stored import newest

STREAM: Final = "KV_MQTT_bans"
BUCKET: Final = "MQTT_bans"
PREFIX: Final = "$KV.MQTT_bans."

LIFTED: Final = 60
"""Seconds for which the record that lifts a ban is stored."""


def ban_subject(kind: str, value: str) -> str:
    """Return the subject of a ban. It contains the hash of `value`, which may have characters illegal in a subject."""
    return f"{PREFIX}{kind}.{sha256(value.encode()).hexdigest()[:32]}"


def read_ban(payload: bytes) -> dict[str, Any] | None:
    """Return a ban as written by `BanStore`; None for any other payload. `until` 0: it was lifted, or has no end."""
    try:
        found = orjson.loads(payload)
        return {
            "kind": str(found["kind"]),
            "value": str(found["value"]),
            "until": float(found["until"]),
            "lifted": bool(found.get("lifted", False)),
            "reason": str(found.get("reason", "")),
            "by": str(found.get("by", "")),
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class BanStore:
    """Store that reads and writes the bans."""

    def __init__(self, js: TellingJetStream) -> None:
        self._js = js

    async def add(self, kind: str, value: str, until: float, reason: str, by: str, now: float) -> None:
        """Store a ban until Unix time `until`, 0 = no end; `now`: present time. Raises ApiError, NoResponders, ..."""
        body = {"kind": kind, "value": value, "until": until, "reason": reason, "by": by}
        await self._write(kind, value, body, max(1, ceil(until - now)) if until else 0)

    async def remove(self, kind: str, value: str) -> None:
        """Lift a ban by a write: gateways receive writes, but no removals. Raises ApiError, NoResponders, ..."""
        await self._write(kind, value, {"kind": kind, "value": value, "until": 0, "lifted": True}, LIFTED)

    async def _write(self, kind: str, value: str, body: dict[str, Any], ttl: int) -> None:
        lines = b"Nats-TTL:%ds\r\n" % ttl if ttl else b""
        block = headers.START + headers.REPLACES + lines + headers.END
        payload = orjson.dumps(body)
        await publish(self._js, kv_subject(self._js, ban_subject(kind, value)), payload, block)
        self._js.tell(BANS, payload)

    async def all(self) -> list[dict[str, Any]]:
        """Return every ban in the form of `read_ban`, bans lifted in the last `LIFTED` seconds included."""
        stored = [message async for page in pages_of(self._js, STREAM, PREFIX + ">") for message in page]
        found = (read_ban(message.payload) for message in newest(stored))
        return [one for one in found if one is not None]
