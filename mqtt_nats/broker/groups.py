# SPDX-License-Identifier: Apache-2.0
"""The names of shared subscriptions, and what a session leaves of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mqtt_nats.codec import TopicFilterInvalid, validate_topic_filter
from mqtt_streams.shared import group_hash

if TYPE_CHECKING:
    from mqtt_nats.broker.context import Broker

PREFIX: Final = "$share/"


def parse_shared(text: str, max_levels: int) -> tuple[str, str]:
    """The group and the filter of ``$share/<group>/<filter>``.

    Raises:
        TopicFilterInvalid: the group's name is empty or has a wildcard, or the filter is illegal
            [MQTT-4.8.2-1] [MQTT-4.8.2-2] (5.0).
    """
    group, slash, topic_filter = text.removeprefix(PREFIX).partition("/")
    if not group or not slash or "+" in group or "#" in group:
        raise TopicFilterInvalid("a shared subscription is $share/<group>/<filter>")
    validate_topic_filter(topic_filter, max_levels)
    return group, topic_filter


async def forget(broker: Broker, client_hash: str, texts: list[str]) -> None:
    """A session that had these shared subscriptions has ended.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    for text in texts:
        try:
            name, topic_filter = parse_shared(text, 65_535)
        except TopicFilterInvalid:
            continue
        await broker.groups.leave(group_hash(name, topic_filter), client_hash)
    if texts:
        await broker.groups.purge_assigned(client_hash)
