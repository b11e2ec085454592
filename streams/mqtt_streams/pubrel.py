# SPDX-License-Identifier: Apache-2.0
"""`$MQTT_out`: records of PUBRELs owed to clients, from PUBREC to PUBCOMP."""

from typing import Final, NamedTuple

from mqtt_streams import headers, stored
from mqtt_streams.api import JetStream
from mqtt_streams.consumers import ACK_WAIT_NS, ConsumerRef

STREAM: Final = "$MQTT_out"
PREFIX: Final = "$MQTT.out.pubrel."
DELIVER_PREFIX: Final = "$MQTT.deliver.pubrel."
CONSUMER_PREFIX: Final = "$MQTT_PUBREL_"


class Owed(NamedTuple):
    """An owed PUBREL. `seq`: sequence of its record; `message_seq`: sequence in `$MQTT_msgs`, 0 = not known.

    `epoch`: epoch of the connection that has stored it, 0 = not known.
    """

    packet_id: int
    seq: int
    message_seq: int
    epoch: int = 0


def pubrel_subject(client_hash: str) -> str:
    """Return the subject of the PUBRELs owed to a client."""
    return PREFIX + client_hash


def pubrel_block(packet_id: int, message_seq: int, epoch: int = 0) -> bytes:
    """Return the header block of an owed PUBREL (its payload is empty); `epoch` as of `Owed`."""
    block = b"NATS/1.0\r\nNmqtt-PubRel:%d\r\nNmqtt-Seq:%d\r\nNmqtt-Epoch:%d\r\n\r\n"
    return block % (packet_id, message_seq, epoch)


def parse(block: bytes, seq: int) -> Owed | None:
    """Read an owed PUBREL stored with sequence `seq`; None for a block without a packet identifier."""
    packet_id = headers.get_int(block, headers.PUBREL)
    if packet_id is None or not 1 <= packet_id <= 65535:
        return None
    return Owed(packet_id, seq, headers.get_int(block, headers.SEQ) or 0, headers.get_int(block, headers.EPOCH) or 0)


def pubrel_consumer(
    client_hash: str,
    *,
    max_ack_pending: int,
    deliver_nuid: str = "",
    ack_wait: int = ACK_WAIT_NS,
    inactive_threshold: int = 0,
    client_id: str = "",
) -> ConsumerRef:
    """Return the consumer of a session's PUBRELs (times in nanoseconds). `client_id` is for the description.

    Its deliver subject is nats-server's, or with `deliver_nuid` one below it; a new one causes a redelivery.
    """
    return ConsumerRef(
        CONSUMER_PREFIX + client_hash,
        DELIVER_PREFIX + client_hash + (f".{deliver_nuid}" if deliver_nuid else ""),
        PREFIX + client_hash,
        max_ack_pending,
        ack_wait,
        None,
        inactive_threshold,
        client_id=client_id,
    )


class PubrelStore:
    """Store that reads and removes owed PUBRELs; the gateway's data path stores and acknowledges them."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def owed(self, client_hash: str) -> list[Owed]:
        """Return the PUBRELs owed to a client, oldest first; unusable records are deleted."""
        found = []
        for message in await stored.all_of(self._js, STREAM, PREFIX + client_hash):
            record = parse(message.headers, message.seq)
            if record is None:
                await self.delete(message.seq)
            else:
                found.append(record)
        return found

    async def delete(self, seq: int) -> bool:
        """Remove one record; False when it was removed before."""
        return await stored.delete(self._js, STREAM, seq)
