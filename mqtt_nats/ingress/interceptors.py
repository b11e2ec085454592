# SPDX-License-Identifier: Apache-2.0
"""Topics whose messages are not published as they come: somebody takes them, and answers for them.

Whoever takes a message stores it before its publisher is told that it is; at QoS 2 it gets it when its publisher has
released it, once, under an identity that stays the same whichever gateway does that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from mqtt_nats.backbone.pending import PendingStore
    from mqtt_nats.ingress.publish import Extras
    from mqtt_nats.pubsub.routing_table import Route


class Taken(NamedTuple):
    """A message that somebody takes."""

    topic: str
    """As it was published."""
    route: Route
    """Of the topic that it is for."""
    payload: bytes
    qos: int
    retain: bool
    sender: bytes
    """The header line that names its publisher, or nothing."""
    more: Extras | None
    """Its properties."""
    identity: bytes
    """Of this message and no other."""


class Taker(Protocol):
    """Takes the messages of topics that begin alike."""

    def target(self, topic: str) -> str:
        """The topic that a message on ``topic`` is for; who may publish there may publish here.

        Raises:
            MqttError: there is none.
        """

    def take(self, taken: Taken, operation: PendingStore) -> None:
        """Store a message; ``operation`` is a :class:`~mqtt_nats.ingress.server_publish.Counting` that ends with that.

        Raises:
            TooLarge: NATS would not take it.
        """


class Takers:
    """Who takes what, by the beginning of the topic."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[str, Taker] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, beginning: str, taker: Taker) -> None:
        """Have a taker for topics that begin so.

        Raises:
            ValueError: there is one already, or it is no whole number of levels.
        """
        if not beginning.endswith("/") or beginning in self._found:
            raise ValueError(f"{beginning!r} is taken, or does not end with a slash")
        self._found[beginning] = taker

    def remove(self, beginning: str) -> None:
        """Topics that begin so are as any others."""
        self._found.pop(beginning, None)

    def of(self, topic: str) -> Taker | None:
        """Who takes a topic; None: nobody."""
        for beginning, taker in self._found.items():
            if topic.startswith(beginning):
                return taker
        return None

    def of_key(self, key: bytes) -> Taker | None:
        """The same, for a topic as it stands in a PUBLISH packet."""
        return self.of(key[2:].decode())
