# SPDX-License-Identifier: Apache-2.0
"""Takers: topics whose messages a taker stores instead of their publication, such as delayed messages.

A taker stores a message before the publisher gets its acknowledgement. At QoS 2 it gets the message once, after
PUBREL, under an identity that is the same on whichever gateway handles PUBREL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from mqtt_nats.backbone.pending_stores import CountedStore
    from mqtt_nats.ingress.publish_properties import Extras
    from mqtt_nats.pubsub.routing_table import Route


class Taken(NamedTuple):
    """A message that a taker gets."""

    topic: str
    """Topic on which the message was published."""
    route: Route
    """Route of the topic that the message is for."""
    payload: bytes
    qos: int
    retain: bool
    sender: bytes
    """Header line that names the publisher; empty = none."""
    more: Extras | None
    """Properties of the message."""
    identity: bytes
    """Unique id of the message."""


class Taker(Protocol):
    """A taker of the messages of all topics with one beginning."""

    def target(self, topic: str) -> str:
        """Return the topic that a message on ``topic`` is for; a client that may publish there may publish here.

        Raises:
            MqttError: ``topic`` names no such topic.
        """

    def take(self, taken: Taken, operation: CountedStore) -> None:
        """Store a message; ``operation`` ends with the store.

        Raises:
            TooLarge: NATS would not take the message.
        """


class Takers:
    """Takers by the beginning of their topics."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[str, Taker] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, beginning: str, taker: Taker) -> None:
        """Add a taker for topics with this beginning.

        Raises:
            ValueError: the beginning has a taker already, or is no whole number of levels.
        """
        if not beginning.endswith("/") or beginning in self._found:
            raise ValueError(f"{beginning!r} is taken, or does not end with a slash")
        self._found[beginning] = taker

    def remove(self, beginning: str) -> None:
        """Remove the taker of topics with this beginning: their messages are published again."""
        self._found.pop(beginning, None)

    def of(self, topic: str) -> Taker | None:
        """Return the taker of a topic; None: the topic has no taker."""
        for beginning, taker in self._found.items():
            if topic.startswith(beginning):
                return taker
        return None

    def of_key(self, key: bytes) -> Taker | None:
        """Return the taker of a topic as it stands in a PUBLISH packet; None: the topic has no taker."""
        return self.of(key[2:].decode())
