# SPDX-License-Identifier: Apache-2.0
"""A publisher and its subscribers that must notice nothing of what a test does to their gateway."""

import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from tests.harness.paho import stop
from tests.harness.waiting import eventually

_INTERVAL = 0.02  # seconds between two messages of the publisher

FEW = 4
"""A third of the messages on their way at most, where delays are measured: what a loaded machine takes longer for must
not pile up."""

MANY = 500
"""The same otherwise: more than ten seconds' worth."""


class Paho:
    """A paho client that keeps what it receives and counts its disconnections; it reconnects by itself."""

    def __init__(self, port: int, client_id: str = "", *, clean: bool = True, keepalive: int = 60) -> None:
        self.client_id = client_id or f"paho-{secrets.token_hex(6)}"
        self.received: list[tuple[str, bytes, int, bool]] = []
        """(topic, payload, QoS, retained)."""
        self.disconnections: list[str] = []
        self.acknowledged: dict[int, float] = {}
        """Message ids of completed publishes."""
        self.granted: dict[int, list[int]] = {}
        self.ready = threading.Event()
        self._closing = False
        self.client = client = mqtt.Client(
            CallbackAPIVersion.VERSION2, client_id=self.client_id, clean_session=clean, protocol=mqtt.MQTTv311
        )
        client.reconnect_delay_set(1, 1)
        client.max_queued_messages_set(0)
        client.on_connect = self._connected
        client.on_disconnect = self._disconnected
        client.on_message = self._message
        client.on_publish = self._published
        client.on_subscribe = self._subscribed
        client.connect("127.0.0.1", port, keepalive)
        client.loop_start()
        assert self.ready.wait(30), f"{self.client_id} was not let in"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect in good order."""
        self._closing = True
        self.client.disconnect()
        stop(self.client)

    def subscribe(self, topic_filter: str, qos: int = 0) -> None:
        """Subscribe and wait for SUBACK."""
        code, identifier = self.client.subscribe(topic_filter, qos)
        assert code == mqtt.MQTT_ERR_SUCCESS
        assert identifier is not None
        eventually(lambda: self.granted.get(identifier), 30, what=f"SUBACK for {topic_filter}")

    def publish(self, topic: str, payload: bytes | str, qos: int = 0, retain: bool = False) -> int:
        """Publish without waiting; the message id."""
        return self.client.publish(topic, payload, qos, retain).mid

    def publish_acknowledged(self, topic: str, payload: bytes | str, qos: int = 1, retain: bool = False) -> None:
        """Publish and wait for the acknowledgement."""
        identifier = self.publish(topic, payload, qos, retain)
        eventually(lambda: identifier in self.acknowledged, 30, what=f"acknowledgement of {payload[:40]!r}")

    def payloads(self, topic: str = "") -> list[bytes]:
        """What was received (on ``topic``), in order."""
        return [payload for name, payload, _, _ in list(self.received) if not topic or name == topic]

    def _connected(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        if not reason.is_failure:
            self.ready.set()

    def _disconnected(self, client: Any, userdata: Any, flags: Any, reason: Any, properties: Any) -> None:
        if not self._closing:
            self.disconnections.append(str(reason))

    def _message(self, client: Any, userdata: Any, message: mqtt.MQTTMessage) -> None:
        self.received.append((message.topic, bytes(message.payload), message.qos, message.retain))

    def _published(self, client: Any, userdata: Any, mid: int, reason: Any, properties: Any) -> None:
        self.acknowledged[mid] = time.monotonic()

    def _subscribed(self, client: Any, userdata: Any, mid: int, codes: Any, properties: Any) -> None:
        self.granted[mid] = [code.value for code in codes]


class Bystanders:
    """Messages at QoS 0, 1 and 2 that flow all the time, to a regular and a durable subscriber.

    :meth:`check` tells whether every message has come, once and in order, and nobody was disconnected.
    """

    def __init__(self, port: int) -> None:
        name = secrets.token_hex(6)
        self.topic = f"bystanders/{name}"
        self.regular = Paho(port, f"bystander-regular-{name}")
        self.durable = Paho(port, f"bystander-durable-{name}", clean=False)
        self.publisher = Paho(port, f"bystander-publisher-{name}")
        for subscriber in (self.regular, self.durable):
            subscriber.subscribe(f"{self.topic}/+", 2)
        self.sent: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
        self.most = MANY
        """How many messages at QoS 1 may be on their way; there are as many at QoS 0 and 2."""
        self.delays: list[float] = []
        """Seconds from publish to arrival at the regular subscriber, QoS 1, of the messages checked so far."""
        self._born: dict[bytes, float] = {}
        self._published: dict[bytes, float] = {}
        self._identifiers: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self._running = threading.Event()
        self._running.set()
        self._end = False
        message = self.regular.client.on_message

        def arrived(client: Any, userdata: Any, found: mqtt.MQTTMessage) -> None:
            born = self._born.pop(bytes(found.payload), None)
            if born is not None:
                self.delays.append(time.monotonic() - born)
            assert message is not None
            message(client, userdata, found)

        self.regular.client.on_message = arrived
        self._thread = threading.Thread(target=self._publish, daemon=True)
        self._thread.start()

    def _publish(self) -> None:
        for number in itertools.count():
            self._running.wait()
            while len(self._born) >= self.most and not self._end:
                time.sleep(_INTERVAL)
            if self._end:
                return
            qos = number % 3
            payload = b"%d" % number
            with self._lock:
                self.sent[qos].append(payload)
                now = self._published[payload] = time.monotonic()
                if qos == 1:
                    self._born[payload] = now
                self._identifiers[payload] = self.publisher.publish(f"{self.topic}/{qos}", payload, qos)
            time.sleep(_INTERVAL)

    @property
    def waiting(self) -> int:
        """Messages at QoS 1 that have not come yet."""
        return len(self._born)

    def pause(self) -> None:
        """Publish nothing until :meth:`resume`; what was published stays in flight."""
        self._running.clear()

    def resume(self) -> None:
        """Publish again."""
        self._running.set()

    def check(self, *, lossy: bool = False, leaders_change: bool = False, timeout: float = 40.0) -> None:
        """Everything published up to now arrives, once and in order, and nobody was disconnected.

        Args:
            lossy: NATS was away, so that messages of QoS 0 may be missing and those of QoS 1 come twice.
            leaders_change: a message that was on its way, not acknowledged yet, may be overtaken by the next ones.
        """
        with self._lock:
            wanted = {qos: list(payloads) for qos, payloads in self.sent.items()}
        for subscriber in (self.regular, self.durable):

            def complete(subscriber: Paho = subscriber) -> bool:
                return all(
                    set(wanted[qos]) <= set(subscriber.payloads(f"{self.topic}/{qos}"))
                    for qos in ((1, 2) if lossy else (0, 1, 2))
                )

            eventually(complete, timeout, what=f"the messages of {subscriber.client_id}")
            for qos, payloads in wanted.items():
                got = subscriber.payloads(f"{self.topic}/{qos}")
                once = list(dict.fromkeys(got))
                known = set(payloads)
                if qos == 2 or not lossy:
                    assert len(once) == len(got), f"{subscriber.client_id}: repeated at QoS {qos}: {_repeated(got)}"
                if qos or not lossy:
                    late = _overtaken([payload for payload in once if payload in known], payloads)
                    if leaders_change:
                        late = [one for one in late if self._was_acknowledged(*one)]
                    assert not late, f"{subscriber.client_id}: order at QoS {qos}: {late}"
        for client in (self.publisher, self.regular, self.durable):
            assert client.disconnections == [], client.client_id
            assert client.client.is_connected()

    def _was_acknowledged(self, late: bytes, newest: bytes) -> bool:
        """Whether the publisher had the acknowledgement of ``late`` before it sent ``newest``."""
        acknowledged = self.publisher.acknowledged.get(self._identifiers[late])
        return acknowledged is not None and acknowledged < self._published[newest]

    def close(self) -> None:
        """Stop publishing and disconnect."""
        self._end = True
        self._running.set()
        self._thread.join(10)
        for client in (self.publisher, self.regular, self.durable):
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _overtaken(got: Sequence[bytes], sent: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """What came after something newer, with the newest that came before it."""
    place = {payload: number for number, payload in enumerate(sent)}
    late = []
    newest = got[0] if got else b""
    for payload in got:
        if place[payload] < place[newest]:
            late.append((payload, newest))
        else:
            newest = payload
    return late


def _repeated(payloads: list[bytes]) -> list[bytes]:
    return sorted({payload for payload in payloads if payloads.count(payload) > 1})[:20]
