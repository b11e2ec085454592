# SPDX-License-Identifier: Apache-2.0
"""One face for the MQTT 5.0 clients of several libraries, so that each goes through the same tests.

Properties go by the names of `mqtt_nats.codec.Properties`, whatever the library calls them.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.harness.gateway import Gateway
from tests.harness.waiting import aeventually

DEADLINE = 30.0  # seconds


@dataclass(frozen=True)
class Received:
    """A message as the library shows it."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: dict[str, Any]


@dataclass(frozen=True)
class Farewell:
    """A will."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    properties: Mapping[str, Any] = field(default_factory=dict)


class RefusedError(Exception):
    """CONNACK with a reason above 0x7f."""

    def __init__(self, reason: int) -> None:
        super().__init__(f"0x{reason:02x}")
        self.reason = reason


class Library(ABC):
    """One client of a library.

    Attributes:
        got: messages, in the order in which they came.
        present: Session Present of CONNACK.
        connack: properties of CONNACK.
        farewells: reason codes with which the gateway has ended the connection.
    """

    def __init__(
        self,
        gateway: Gateway,
        client_id: str,
        *,
        clean: bool = True,
        will: Farewell | None = None,
        holding: bool = False,
        **properties: Any,
    ) -> None:
        """``holding``: acknowledge nothing until `go_on`; ``properties``: of CONNECT."""
        self.gateway, self.client_id, self.clean, self.will = gateway, client_id, clean, will
        self.holding = holding
        self.properties = properties
        self.got: list[Received] = []
        self.present = False
        self.connack: dict[str, Any] = {}
        self.farewells: list[int] = []

    @abstractmethod
    async def connect(self) -> None:
        """Connect; raises `RefusedError`."""

    @abstractmethod
    async def subscribe(
        self,
        topic_filter: str,
        qos: int = 0,
        *,
        no_local: bool = False,
        as_published: bool = False,
        handling: int = 0,
        identifier: int = 0,
    ) -> int:
        """The reason code of SUBACK."""

    @abstractmethod
    async def publish(
        self, topic: str, payload: bytes, qos: int = 0, *, retain: bool = False, **properties: Any
    ) -> None:
        """Publish, and wait until it is acknowledged."""

    @abstractmethod
    async def go_on(self) -> None:
        """Acknowledge what has been held back, and from now on at once."""

    @abstractmethod
    async def disconnect(self, reason: int = 0, **properties: Any) -> None:
        """DISCONNECT."""

    @abstractmethod
    async def drop(self) -> None:
        """End the connection without a word."""

    async def close(self) -> None:
        """End what is left of it."""
        with contextlib.suppress(Exception):
            await self.disconnect()

    async def receive(self, count: int) -> list[Received]:
        """Wait until as many messages have come, and say which; more are an error."""
        await aeventually(lambda: len(self.got) >= count, DEADLINE, what=f"{count} messages")
        assert len(self.got) == count
        return self.got

    async def payloads(self, count: int) -> list[bytes]:
        """The same, only the payloads."""
        return [one.payload for one in await self.receive(count)]
