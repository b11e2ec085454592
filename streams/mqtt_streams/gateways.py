# SPDX-License-Identifier: Apache-2.0
"""KV bucket `MQTT_gateways`: which gateways run, and until when others may count on that.

Two keys for each gateway: `gateway.<id>` says what it is and when it was last known to be alive, without an end;
`lease.<id>` ends by itself when its gateway does not renew it. The server then puts a marker in its place, by whose
sequence those who want to deal with the dead gateway's clients have one winner.
"""

from typing import Any, Final, NamedTuple

import orjson

from mqtt_streams import headers, stored
from mqtt_streams.api import ApiError, JetStream, publish
from mqtt_streams.stored import StoredMessage

STREAM: Final = "KV_MQTT_gateways"
BUCKET: Final = "MQTT_gateways"
PREFIX: Final = "$KV.MQTT_gateways."

POSITIONS: Final = "positions"
"""In what a gateway says of itself: it goes on with sessions that have a position in `$MQTT_pos`."""

WRONG_LAST_SEQUENCE: Final = (10071, 10164)

_PAGE_MESSAGES: Final = 256
_PAGE_BYTES: Final = 1024 * 1024


class LeaseTaken(Exception):
    """Somebody else has written, or removed, the lease or the registration since it was read."""


class Entry(NamedTuple):
    """A gateway that is registered.

    `alive`: Unix time in seconds at which it was last known to be alive. `sequence`: of what is in place of its lease,
    0 = nothing. `lapsed`: nobody holds the lease. `reaper`: who deals with its clients, empty = nobody.
    """

    identity: str
    alive: float
    info: dict[str, Any]
    sequence: int
    lapsed: bool
    reaper: str


class GatewayStore:
    """Reads and writes leases and registrations."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def hold(self, identity: str, holder: str, expected: int, ttl: int) -> int:
        """Write the lease of `identity` for `ttl` seconds; `holder` is itself, or who deals with its clients.

        `expected`: sequence of what is in its place, 0 = nothing. Returns the new sequence. Raises LeaseTaken,
        ApiError, NoResponders, RequestTimeout.
        """
        lines = b"Nats-TTL:%ds\r\n" % ttl
        return await self._write(f"lease.{identity}", orjson.dumps({"holder": holder}), expected, lines)

    async def register(self, identity: str, alive: float, info: dict[str, Any], expected: int) -> int:
        """Say what a gateway is and that it was alive at Unix time `alive`.

        `expected`: sequence of what it has said before, 0 = nothing: one that was removed meanwhile does not come back.
        Returns the new sequence. Raises LeaseTaken, ApiError, NoResponders, RequestTimeout.
        """
        return await self._write(f"gateway.{identity}", orjson.dumps(info | {"alive": alive}), expected)

    async def _write(self, key: str, body: bytes, expected: int, lines: bytes = b"") -> int:
        block = b"NATS/1.0\r\n%bNats-Expected-Last-Subject-Sequence:%d\r\n\r\n" % (lines, expected)
        try:
            return await publish(self._js, PREFIX + key, body, block)
        except ApiError as error:
            if error.err_code in WRONG_LAST_SEQUENCE:
                raise LeaseTaken(key) from None
            raise

    async def lease(self, identity: str) -> tuple[int, str]:
        """Sequence of what is in place of a lease (0 = nothing) and its holder (empty = nobody)."""
        message = await stored.get_last(self._js, STREAM, f"{PREFIX}lease.{identity}")
        return (0, "") if message is None else (message.seq, _holder(message))

    async def registered(self, identity: str) -> int:
        """Sequence of a gateway's registration; 0: there is none, as when its clients have been dealt with."""
        message = await stored.get_last(self._js, STREAM, f"{PREFIX}gateway.{identity}")
        return 0 if message is None else message.seq

    async def entries(self) -> list[Entry]:
        """Every registered gateway."""
        leases: dict[str, StoredMessage] = {}
        found: dict[str, StoredMessage] = {}
        start = 1
        more = True
        while more:
            page, more = await stored.direct_page(
                self._js, STREAM, PREFIX + ">", {"seq": start}, messages=_PAGE_MESSAGES, size=_PAGE_BYTES
            )
            for message in page:
                kind, _, identity = message.subject.removeprefix(PREFIX).partition(".")
                (leases if kind == "lease" else found)[identity] = message
                start = message.seq + 1
        return [
            _entry(identity, message, leases.get(identity)) for identity, message in found.items() if message.payload
        ]

    async def remove(self, identity: str) -> None:
        """Forget a gateway: it has ended in good order, or its clients have been dealt with."""
        for key in (f"gateway.{identity}", f"lease.{identity}"):
            await stored.purge(self._js, STREAM, PREFIX + key)


def _holder(message: StoredMessage) -> str:
    if not message.payload or headers.get(message.headers, headers.MARKER_REASON) is not None:
        return ""
    try:
        return str(orjson.loads(message.payload)["holder"])
    except (ValueError, KeyError, TypeError):
        return ""


def _entry(identity: str, message: StoredMessage, lease: StoredMessage | None) -> Entry:
    try:
        info = orjson.loads(message.payload)
        alive = float(info.get("alive", 0.0))
    except (ValueError, TypeError, AttributeError):
        info, alive = {}, message.time_ns / 1e9
    holder = _holder(lease) if lease is not None else ""
    sequence = lease.seq if lease is not None else 0
    return Entry(identity, alive, info, sequence, not holder, "" if holder == identity else holder)
