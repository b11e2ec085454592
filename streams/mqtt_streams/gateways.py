# SPDX-License-Identifier: Apache-2.0
"""KV bucket `MQTT_gateways`: registrations and leases of gateways.

Each gateway has two keys. `gateway.<id>` (registration, without TTL) describes the gateway and has the time at which it
was last known to be alive. `lease.<id>` has a TTL, which ends when the gateway does not renew the lease. nats-server
then puts a marker in place of the lease. Of the gateways that want to deal with the dead gateway's clients, one
succeeds: the first that replaces the marker by its sequence.
"""

from typing import Any, Final, NamedTuple

import orjson

from mqtt_streams import headers, stored
from mqtt_streams.api import ApiError, JetStream, call, publish
from mqtt_streams.stored import StoredMessage

STREAM: Final = "KV_MQTT_gateways"
BUCKET: Final = "MQTT_gateways"
PREFIX: Final = "$KV.MQTT_gateways."

POSITIONS: Final = "positions"
"""Key in a gateway's registration: the gateway can resume sessions that have a position in `$MQTT_pos`."""

CLAIM_BUCKETS: Final = "claim_buckets"
"""Key in a gateway's registration: the subjects of the gateway's claims name the bucket of the session."""

WRONG_LAST_SEQUENCE: Final = (10071, 10164)

_PAGE_MESSAGES: Final = 256
_PAGE_BYTES: Final = 1024 * 1024


class LeaseTaken(Exception):
    """The lease or the registration was written by another gateway, or removed, since it was read."""


class Entry(NamedTuple):
    """A registered gateway.

    `alive`: Unix time in seconds at which the gateway was last known to be alive. `sequence`: sequence of its lease or
    of the marker in its place, 0 = neither. `lapsed`: the lease has no holder. `reaper`: gateway that deals with the
    dead gateway's clients, empty = none.
    """

    identity: str
    alive: float
    info: dict[str, Any]
    sequence: int
    lapsed: bool
    reaper: str


class GatewayStore:
    """Store that reads and writes leases and registrations."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def hold(self, identity: str, holder: str, expected: int, ttl: int) -> int:
        """Write the lease of `identity` for `ttl` seconds; `holder`: that gateway, or the one that handles its clients.

        `expected`: sequence of the present lease or marker, 0 = neither. Returns the new sequence. Raises LeaseTaken,
        ApiError, NoResponders, RequestTimeout.
        """
        lines = b"Nats-TTL:%ds\r\n" % ttl
        return await self._write(f"lease.{identity}", orjson.dumps({"holder": holder}), expected, lines)

    async def register(self, identity: str, alive: float, info: dict[str, Any], expected: int) -> int:
        """Write a gateway's registration: its description `info` and the Unix time at which it was alive, in seconds.

        `expected`: sequence of its former registration, 0 = none; a registration removed meanwhile is not written anew.
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
        """Return the sequence of a lease or its marker (0 = neither), and the holder of the lease (empty = none)."""
        message = await stored.get_last(self._js, STREAM, f"{PREFIX}lease.{identity}")
        return (0, "") if message is None else (message.seq, _holder(message))

    async def registered(self, identity: str) -> int:
        """Return the sequence of a gateway's registration; 0 = none, as after its clients have been dealt with."""
        message = await stored.get_last(self._js, STREAM, f"{PREFIX}gateway.{identity}")
        return 0 if message is None else message.seq

    async def count(self) -> int:
        """Return about how many gateways are registered: each has two subjects, and a marker may be left of one."""
        info = await call(self._js, f"STREAM.INFO.{STREAM}")
        return (int(info["state"].get("num_subjects", 0)) + 1) // 2

    async def entries(self) -> list[Entry]:
        """Return every registered gateway."""
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
        """Remove a gateway's registration and lease: it has stopped in order, or its clients have been dealt with."""
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
