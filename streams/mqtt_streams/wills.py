# SPDX-License-Identifier: Apache-2.0
"""`$MQTT_wills`: the will of each connected client with a will, under its gateway.

A will is stored at CONNECT and removed when it is published or discarded. So another gateway finds and publishes the
wills of a dead gateway.
"""

from typing import Final, NamedTuple

from mqtt_streams import headers, stored
from mqtt_streams.api import JetStream
from mqtt_streams.stored import StoredMessage

STREAM: Final = "$MQTT_wills"
PREFIX: Final = "$MQTT.wills."

_OURS: Final = (b"Nmqtt-Pub:", b"Nmqtt-Subject:", b"Nmqtt-Epoch:", b"Nmqtt-Delay:", b"Nmqtt-Retain:", b"Nats-")


class StoredWill(NamedTuple):
    """A stored will.

    `gateway`, `client_hash`: gateway and client of the will. `seq`: sequence of this record. `epoch`: sequence of the
    write that claimed the session. `delay`: will delay interval in seconds. `subject`: subject of the will message.
    `lines`: ready header lines of publisher and properties.
    """

    gateway: str
    client_hash: str
    seq: int
    epoch: int
    delay: int
    qos: int
    retain: bool
    subject: str
    lines: bytes
    payload: bytes

    @property
    def release(self) -> bytes:
        """Nats-Msg-Id of the will message: the same at every gateway, so that the stream recognises a repetition."""
        return b"will-%d" % self.epoch


def will_subject(gateway: str, client_hash: str) -> str:
    """Return the subject under which the will of a client is stored."""
    return f"{PREFIX}{gateway}.{client_hash}"


def will_block(subject: bytes, qos: int, retain: bool, epoch: int, delay: int, lines: bytes) -> bytes:
    """Return the header block of a stored will; for the arguments see StoredWill."""
    return b"NATS/1.0\r\n%bNmqtt-Pub:%d\r\nNmqtt-Subject:%b\r\nNmqtt-Epoch:%d\r\nNmqtt-Delay:%d\r\n%b%b\r\n" % (
        headers.REPLACES,
        qos,
        subject,
        epoch,
        delay,
        b"Nmqtt-Retain:1\r\n" if retain else b"",
        lines,
    )


def parse(message: StoredMessage) -> StoredWill | None:
    """Read a stored will; None for an unusable record."""
    gateway, _, client_hash = message.subject.removeprefix(PREFIX).partition(".")
    block = message.headers
    qos = headers.get_int(block, headers.PUB)
    subject = headers.get(block, headers.SUBJECT)
    if qos is None or qos > 2 or not subject or not client_hash:
        return None
    lines = [line + b"\r\n" for line in block.split(b"\r\n")[1:] if line and not line.startswith(_OURS)]
    return StoredWill(
        gateway,
        client_hash,
        message.seq,
        headers.get_int(block, headers.EPOCH) or 0,
        headers.get_int(block, headers.DELAY) or 0,
        qos,
        headers.get(block, headers.RETAIN) is not None,
        subject,
        b"".join(lines),
        message.payload,
    )


class WillStore:
    """Store that reads and removes wills; the gateway's data path stores them."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def load(self, gateway: str, client_hash: str) -> StoredWill | None:
        """Return the will of a client, None without a usable record."""
        message = await stored.get_last(self._js, STREAM, will_subject(gateway, client_hash))
        return None if message is None else parse(message)

    async def of_gateway(self, gateway: str) -> list[StoredWill]:
        """Return the wills of a gateway's clients; unusable records are deleted."""
        return await stored.usable(self._js, STREAM, f"{PREFIX}{gateway}.*", parse)

    async def delete(self, will: StoredWill) -> bool:
        """Remove a will; False when it was removed or replaced before."""
        return await stored.remove(self._js, STREAM, will_subject(will.gateway, will.client_hash), will.seq)
