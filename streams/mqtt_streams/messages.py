# SPDX-License-Identifier: Apache-2.0
"""`$MQTT_msgs`: QoS 1 and 2 messages, stored until every durable subscriber has them or their retention ends."""

from typing import Final

from mqtt_streams.api import JetStream
from mqtt_streams.consumers import ACK_WAIT_NS, MESSAGE_PREFIX, ConsumerRef, consumer_names, delete_consumer
from mqtt_streams.hashing import consumer_name

STREAM: Final = "$MQTT_msgs"
PREFIX: Final = MESSAGE_PREFIX
DELIVER_PREFIX: Final = "$MQTT.sub."


def message_subject(subject: str) -> str:
    """Return the subject under which a message published on `subject` is stored."""
    return PREFIX + subject


def subscription_consumer(
    client_hash: str,
    subject: str,
    *,
    name_nuid: str,
    deliver_nuid: str,
    max_ack_pending: int,
    ack_wait: int = ACK_WAIT_NS,
    start_seq: int | None = None,
    inactive_threshold: int = 0,
    client_id: str = "",
) -> ConsumerRef:
    """Return the consumer of one QoS 1/2 subscription.

    [MQTT-3.1.2-5] (3.1.1), [MQTT-4.5.0-1] (3.1.1, 5.0)

    `subject` comes from `filter_to_subjects`. Times in nanoseconds. `client_id` is for the description.

    The deliver subject must be `$MQTT.sub.<one token>`: nats-server's listener uses the stored one literally.
    """
    return ConsumerRef(
        consumer_name(client_hash, name_nuid),
        DELIVER_PREFIX + deliver_nuid,
        PREFIX + subject,
        max_ack_pending,
        ack_wait,
        start_seq,
        inactive_threshold,
        client_id=client_id,
    )


async def delete_session_consumers(js: JetStream, client_hash: str, keep: frozenset[str] = frozenset()) -> list[str]:
    """Delete the consumers of a session except `keep`, and return the deleted names."""
    stray = [name for name in await consumer_names(js, STREAM, client_hash + "_") if name not in keep]
    for name in stray:
        await delete_consumer(js, STREAM, name)
    return stray
