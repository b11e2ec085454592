# SPDX-License-Identifier: Apache-2.0
"""KV bucket `MQTT_gateways`: registrations and leases of gateways.

Each gateway has two keys. `gateway.<id>` (registration, without TTL) describes the gateway and has the time at which it
was last known to be alive. `lease.<id>` has a TTL, which ends when the gateway does not renew the lease. Of the
gateways that want to deal with the dead gateway's clients, one succeeds: the first that writes a lease in place of the
lapsed one.
"""

from contextlib import aclosing
from typing import Any, Final, NamedTuple

import orjson

from mqtt_streams import headers, stored
from mqtt_streams.api import ApiError, JetStream, kv_subject, publish
from mqtt_streams.error_codes import WRONG_LAST_SEQUENCE
from mqtt_streams.pages import pages_of
from mqtt_streams.stored import StoredMessage

STREAM: Final = "KV_MQTT_gateways"
BUCKET: Final = "MQTT_gateways"
PREFIX: Final = "$KV.MQTT_gateways."

_OLDEST_MESSAGES: Final = 64
"""Messages of a page of `oldest`: leases and registrations of 32 gateways."""


class LeaseTaken(Exception):
    """The lease or the registration was written by another gateway, or removed, since it was read."""


class Entry(NamedTuple):
    """A registered gateway.

    `alive`: Unix time in seconds at which the gateway was last known to be alive. `sequence`: sequence of its lease,
    0 = none. `lapsed`: the lease has no holder. `reaper`: gateway that deals with the dead gateway's clients, empty =
    none.
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

        `expected`: sequence of the present lease, 0 = none. Returns the new sequence. Raises LeaseTaken,
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
        block = b"NATS/1.0\r\n%b%bNats-Expected-Last-Subject-Sequence:%d\r\n\r\n" % (headers.REPLACES, lines, expected)
        try:
            return await publish(self._js, kv_subject(self._js, PREFIX + key), body, block)
        except ApiError as error:
            if error.err_code in WRONG_LAST_SEQUENCE:
                raise LeaseTaken(key) from None
            raise

    async def lease(self, identity: str) -> tuple[int, str]:
        """Return the sequence of a lease (0 = none), and its holder (empty = none)."""
        message = await stored.get_last(self._js, STREAM, f"{PREFIX}lease.{identity}")
        return (0, "") if message is None else (message.seq, _holder(message))

    async def registered(self, identity: str) -> int:
        """Return the sequence of a gateway's registration; 0 = none, as after its clients have been dealt with."""
        message = await stored.get_last(self._js, STREAM, f"{PREFIX}gateway.{identity}")
        return 0 if message is None else message.seq

    async def entries(self) -> list[Entry]:
        """Return every registered gateway."""
        leases: dict[str, StoredMessage] = {}
        found: dict[str, StoredMessage] = {}
        async for page in pages_of(self._js, STREAM, PREFIX + ">"):
            for message in page:
                kind, identity = _key(message)
                if not message.is_answer:
                    (leases if kind == "lease" else found)[identity] = message
        return [
            _entry(identity, message, leases.get(identity)) for identity, message in found.items() if message.payload
        ]

    async def oldest(self) -> list[Entry]:
        """Return the gateways with the oldest registrations: all that have stopped to renew them, and a few others.

        The stream is in the order of renewals, so it is not read behind the first page that has a living gateway.
        """
        leases: dict[str, StoredMessage | None] = {}
        found: list[Entry] = []
        async with aclosing(pages_of(self._js, STREAM, PREFIX + ">", newest=True, messages=_OLDEST_MESSAGES)) as pages:
            async for page in pages:
                leases |= {identity: one for one in page for kind, identity in [_key(one)] if kind == "lease"}
                entries = []
                for message in page:
                    kind, identity = _key(message)
                    if kind == "lease" or not message.payload:
                        continue
                    if identity not in leases:
                        leases[identity] = await stored.get_last(self._js, STREAM, f"{PREFIX}lease.{identity}")
                    entries.append(_entry(identity, message, leases[identity]))
                found += entries
                if any(not one.lapsed and not one.reaper for one in entries):
                    break
        return found

    async def end_all(self, *keys: str) -> None:
        """End every lease: no registered gateway lives. `keys`: what registrations of dead gateways must not have.

        Raises LeaseTaken, ApiError, NoResponders, RequestTimeout.
        """
        for entry in await self.entries():
            info = {name: value for name, value in entry.info.items() if name not in keys}
            await self.register(entry.identity, entry.alive, info, await self.registered(entry.identity))
            await stored.purge(self._js, STREAM, f"{PREFIX}lease.{entry.identity}")

    async def remove(self, identity: str) -> None:
        """Remove a gateway's registration and lease: it has stopped in order, or its clients have been dealt with."""
        for key in (f"gateway.{identity}", f"lease.{identity}"):
            await stored.purge(self._js, STREAM, PREFIX + key)


def _holder(message: StoredMessage) -> str:
    try:
        return str(orjson.loads(message.payload)["holder"])
    except (ValueError, KeyError, TypeError):
        return ""


def _key(message: StoredMessage) -> tuple[str, str]:
    """Return the kind of a key, `gateway` or `lease`, and the id of its gateway."""
    kind, _, identity = message.subject.removeprefix(PREFIX).partition(".")
    return kind, identity


def _info(registration: StoredMessage) -> tuple[dict[str, Any], float]:
    """Return a gateway's description, and the Unix time in seconds at which the gateway was alive."""
    try:
        info = orjson.loads(registration.payload)
        return info, float(info.get("alive", 0.0))
    except (ValueError, TypeError, AttributeError):
        return {}, registration.time_ns / 1e9


def _entry(identity: str, message: StoredMessage, lease: StoredMessage | None) -> Entry:
    info, alive = _info(message)
    holder = _holder(lease) if lease is not None else ""
    sequence = lease.seq if lease is not None else 0
    return Entry(identity, alive, info, sequence, not holder, "" if holder == identity else holder)
