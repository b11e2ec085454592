# SPDX-License-Identifier: Apache-2.0
"""`$MQTT_qos2in`: held QoS 2 publishes (PUBLISH received, PUBREL to come), one per client and packet identifier."""

from collections.abc import Set
from contextlib import aclosing
from typing import Final, NamedTuple

from mqtt_streams import headers, stored
from mqtt_streams.api import JetStream
from mqtt_streams.messages import PREFIX as MESSAGE_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pages import pages_of
from mqtt_streams.stored import StoredMessage

STREAM: Final = "$MQTT_qos2in"
PREFIX: Final = "$MQTT.qos2.in."
MAPPED: Final = "Nmqtt-Mapped"

LATE_NS: Final = 5_000_000_000
"""Nanoseconds after a claim within which the new owner has listed the publishes that the former owner held."""


class Held(NamedTuple):
    """A held publish without its payload.

    `subject`: subject of the release; `flags`: flags nibble of the PUBLISH; `epoch`: epoch of the connection that held
    it, and `message_id`: its Nmqtt-Id (0 and "" in a record of nats-server's listener); `time_ns`: store time since
    1970; `mapped`: subject of the publish where the account maps that to `subject`, else "".
    """

    packet_id: int
    seq: int
    subject: str
    flags: int
    epoch: int
    message_id: str
    headers: bytes
    time_ns: int
    mapped: str = ""

    @property
    def retain(self) -> bool:
        """Whether the publish had RETAIN set."""
        return bool(self.flags & 1)

    def late(self, former: int, time_ns: int) -> bool:
        """Whether the publish was held by a gateway that was no longer the owner of the session.

        Args:
            former: sequence of the session's record that a later claim has replaced.
            time_ns: store time of a record of that later owner, nanoseconds since 1970 by nats-server's clock.
        """
        return 0 < self.epoch <= former and self.time_ns > time_ns + LATE_NS


def held_subject(client_token: str, packet_id: int) -> str:
    """Return the subject of a held publish; `client_token` is `hashing.held_token` of the client id and its key."""
    return f"{PREFIX}{client_token}.{packet_id}"


def held_block(subject: bytes, flags: int, epoch: int, message_id: bytes, lines: bytes = b"") -> bytes:
    """Return the header block of a held publish; `flags` without DUP (4 or 5), `lines`: further ready header lines."""
    return b"NATS/1.0\r\nNmqtt-Pub:2%x\r\nNmqtt-Subject:%b\r\nNmqtt-Epoch:%d\r\nNmqtt-Id:%b\r\n%b\r\n" % (
        flags,
        subject,
        epoch,
        message_id,
        lines,
    )


def held_subjects(client_token: str) -> str:
    """Return the filter subject of all held publishes of a client."""
    return f"{PREFIX}{client_token}.*"


def held_up_to(client_token: str, seq: int) -> bytes:
    """Return the purge request that removes a client's held publishes up to the sequence `seq`."""
    return stored.up_to(held_subjects(client_token), seq)


def release_id(seq: int) -> str:
    """Return the Nats-Msg-Id of the release of the publish held with this sequence; nats-server's listener's too."""
    return f"q2-{seq}"


def parse(message: StoredMessage) -> Held | None:
    """Read a held publish; None for an unusable record (no subject, not QoS 2, no packet identifier)."""
    if message.is_answer:
        return None
    block = message.headers
    pub = headers.get(block, headers.PUB) or ""
    subject = headers.get(block, headers.SUBJECT)
    digits = message.subject.rpartition(".")[2]
    if not subject or pub[:1] != "2" or not digits.isascii() or not digits.isdecimal() or len(digits) > 5:
        return None
    packet_id = int(digits)
    if not 1 <= packet_id <= 65535:
        return None
    flag_digit = pub[1:2]
    return Held(
        packet_id,
        message.seq,
        subject,
        int(flag_digit, 16) if flag_digit and flag_digit in "0123456789abcdefABCDEF" else 0,
        headers.get_int(block, headers.EPOCH) or 0,
        headers.get(block, headers.ID) or "",
        block,
        message.time_ns,
        headers.get(block, MAPPED) or "",
    )


async def release_stored(js: JetStream, subject: str, wanted: str, since_ns: int) -> bool:
    """Whether `$MQTT_msgs` has a message for `subject` with the Nats-Msg-Id `wanted`; see `releases_stored`."""
    return bool(await releases_stored(js, subject, {wanted}, since_ns))


async def releases_stored(js: JetStream, subject: str, wanted: Set[str], since_ns: int) -> set[str]:
    """Return the Nats-Msg-Ids of `wanted` that messages for `subject` in `$MQTT_msgs` have.

    Reads the stored messages of that subject since `since_ns` (nanoseconds since 1970); needs `allow_direct` on the
    stream.
    """
    if not wanted:
        return set()
    found: set[str] = set()
    start = {"start_time": stored.rfc3339(since_ns)}
    async with aclosing(pages_of(js, MESSAGES, MESSAGE_PREFIX + subject, start)) as pages:
        async for page in pages:
            names = {headers.get(message.headers, headers.MSG_ID) for message in page}
            found.update(wanted & names)
            if len(found) == len(wanted):
                break
    return found


class Qos2Store:
    """Store that reads and removes held publishes; the gateway's data path stores them."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def held(self, client_token: str) -> list[Held]:
        """Return the held publishes of a client, oldest first; unusable records are deleted."""
        return await stored.usable(self._js, STREAM, held_subjects(client_token), parse)

    async def find(self, client_token: str, packet_id: int) -> Held | None:
        """Return the publish held under a packet identifier, None without a usable record."""
        message = await stored.get_last(self._js, STREAM, held_subject(client_token, packet_id))
        return None if message is None else parse(message)

    async def load(self, seq: int) -> tuple[Held, bytes] | None:
        """Return a held publish and its payload, None for a removed or unusable record."""
        message = await stored.get_sequence(self._js, STREAM, seq)
        if message is None or (record := parse(message)) is None:
            return None
        return record, message.payload

    async def was_released(self, held: Held) -> bool:
        """Whether `$MQTT_msgs` has the release of a held publish already.

        For publishes that another connection held, when the stream's duplicate window may have passed.
        """
        return await release_stored(self._js, held.subject, release_id(held.seq), held.time_ns)

    async def delete(self, seq: int) -> bool:
        """Remove a released or stray publish; False when it was removed before."""
        return await stored.delete(self._js, STREAM, seq)
