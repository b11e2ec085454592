# SPDX-License-Identifier: Apache-2.0
"""paho-mqtt clients that wait for what they ask, and names for what the tests share."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Awaitable
from typing import Any, NamedTuple, Protocol, TypeAlias

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from tests.harness.paho import stop
from tests.harness.rawclient import RawClient
from tests.harness.waiting import eventually

Sides: TypeAlias = dict[str, int]
"""MQTT ports: ``gateway`` and ``nats-server``."""

BOTH_WAYS = pytest.mark.parametrize(("here", "there"), [("gateway", "nats-server"), ("nats-server", "gateway")])

_PATIENCE = 30.0  # seconds
_NAMES = itertools.count()


def unique(stem: str) -> str:
    """A topic or client id that no other test of this process uses."""
    return f"{stem}{next(_NAMES)}"


class Message(NamedTuple):
    """What a client has received."""

    topic: str
    payload: bytes
    qos: int
    retain: bool


class Paho:
    """A paho-mqtt client with its own thread, which does not reconnect by itself."""

    def __init__(
        self, port: int, client_id: str, *, clean: bool = True, will: Message | None = None, connects: int = 1
    ) -> None:
        self._port = port
        self._client_id = client_id
        self._clean = clean
        self._will = will
        self._connects = connects
        self._client = self._make()
        self._answers: dict[int, list[int]] = {}
        self._opened = threading.Event()
        self.messages: list[Message] = []
        self.session_present = False
        self.closed = threading.Event()

    def _make(self) -> mqtt.Client:
        client = mqtt.Client(
            CallbackAPIVersion.VERSION2, self._client_id, clean_session=self._clean, reconnect_on_failure=False
        )
        if self._will is not None:
            client.will_set(*self._will)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = self._on_subscribe
        client.on_unsubscribe = self._on_unsubscribe
        client.on_message = self._on_message
        return client

    def _on_connect(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        self.session_present = flags.session_present
        if reason == 0:
            self._opened.set()

    def _on_disconnect(self, *_: Any) -> None:
        self.closed.set()

    def _on_subscribe(self, client: Any, userdata: Any, mid: int, codes: Any, properties: Any) -> None:
        self._answers[mid] = [code.value for code in codes]

    def _on_unsubscribe(self, client: Any, userdata: Any, mid: int, codes: Any, properties: Any) -> None:
        self._answers[mid] = []

    def _on_message(self, client: Any, userdata: Any, message: mqtt.MQTTMessage) -> None:
        self.messages.append(Message(message.topic, bytes(message.payload), message.qos, message.retain))

    def connect(self) -> None:
        """Connect, as often as ``connects`` allows: nats-server closes without an answer after a takeover."""
        for _ in range(self._connects):
            self.closed.clear()
            self._client.connect("127.0.0.1", self._port)
            self._client.loop_start()
            eventually(lambda: self._opened.is_set() or self.closed.is_set(), _PATIENCE, what="CONNACK")
            if self._opened.is_set():
                return
            stop(self._client)
            self._client = self._make()
        raise AssertionError("not connected")

    def subscribe(self, topic_filter: str, qos: int = 0) -> int:
        """Subscribe; the return code of SUBACK."""
        mid = self._client.subscribe(topic_filter, qos)[1]
        assert mid is not None
        return eventually(lambda: self._answers.pop(mid, None), _PATIENCE, what="SUBACK")[0]

    def unsubscribe(self, topic_filter: str) -> None:
        """Unsubscribe."""
        mid = self._client.unsubscribe(topic_filter)[1]
        assert mid is not None
        eventually(lambda: self._answers.pop(mid, None) is not None, _PATIENCE, what="UNSUBACK")

    def publish(self, topic: str, payload: bytes, qos: int = 0, *, retain: bool = False) -> None:
        """Publish and wait for the acknowledgement."""
        info = self._client.publish(topic, payload, qos, retain)
        info.wait_for_publish(_PATIENCE)
        assert info.is_published()

    def expect(self, *messages: Message, timeout: float = _PATIENCE) -> None:
        """Exactly these messages must have come since the last call, in this order."""
        wanted = list(messages)
        eventually(
            lambda: len(self.messages) >= len(wanted), timeout, what=f"{len(wanted)} messages, got {self.messages}"
        )
        assert self.messages == wanted
        self.messages.clear()

    def fence(self) -> None:
        """Nothing may be left on the way to this client: a message to itself comes after it."""
        topic = unique("fence/")
        assert self.subscribe(topic) == 0
        self.publish(topic, b"")
        eventually(lambda: any(one.topic == topic for one in self.messages), _PATIENCE, what="the fence")
        self.messages[:] = [one for one in self.messages if one.topic != topic]
        self.unsubscribe(topic)

    def crash(self) -> None:
        """Break the connection without DISCONNECT."""
        connection = self._client.socket()
        if isinstance(connection, socket.socket):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        stop(self._client)

    def close(self) -> None:
        """Disconnect."""
        self._client.disconnect()
        stop(self._client)


class Pahos(Protocol):
    """The fixture ``paho``."""

    def __call__(
        self, side: str, client_id: str, *, clean: bool = True, will: Message | None = None, connects: int = 1
    ) -> Paho: ...


class Raws(Protocol):
    """The fixture ``raw``."""

    def __call__(self, side: str, client_id: str, *, clean: bool = True) -> Awaitable[RawClient]: ...
