# SPDX-License-Identifier: Apache-2.0
"""Traces for administrators: the packets of one client, or the events of messages of some topics.

Without a trace the message path contains no code of this module. A client's trace is inserted between its socket and
its decoder. A topic's trace consists of hooks, with the cost of hooks for every client of the gateway. A trace ends on
request, when its time or its budget of events is used up, and when its viewer is gone: the viewer has to renew the
trace every few seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Final, cast
from zlib import crc32

import orjson

from mqtt_nats.base.bucket import Bucket
from mqtt_nats.client.client import Client
from mqtt_nats.codec import MqttError, Packet, matches, validate_topic_filter
from mqtt_nats.control.packet_watch import Watch, WatchedSend
from mqtt_nats.control.selection import Refusal
from mqtt_nats.hooks.events import Acked, Connected, Delivered, Disconnected, Dropped, Published, Publishing, client_of
from mqtt_nats.hooks.points import (
    CLIENT_CONNECTED,
    CLIENT_DISCONNECTED,
    MESSAGE_ACKED,
    MESSAGE_DELIVERED,
    MESSAGE_DROPPED,
    MESSAGE_PUBLISH,
)
from mqtt_nats.messages.delivery_hooks import DeliveryHooks
from mqtt_nats.sessions.session import State
from mqtt_streams.gateway_subjects import INBOX

if TYPE_CHECKING:
    from mqtt_nats.control.server import Control

TRACE_RENEWAL_TIMEOUT: Final = 20.0
"""Seconds without renewal after which a trace ends."""

TRACES_MOST: Final = 16
"""Most traces of one gateway at a time."""

TRACES_OVER: Final = 256
"""Most names of ended traces that are stored, so that a renewal does not begin them again."""

FLUSH: Final = 0.05
"""Seconds for which events are collected before they are published."""

EVENTS_WAITING_MOST: Final = 5000
"""Most events collected in `FLUSH`; further events are only counted."""

EVENTS_PER_SECOND: Final = 2000.0
"""Events per second of a trace, after a burst of `EVENTS_WAITING_MOST`; further events are only counted."""

EVENTS_MOST: Final = 1_000_000
"""Number of events after which a trace ends."""

LASTS_MOST: Final = 3600.0
"""Seconds after which a trace ends."""

PAGE_BYTES: Final = 256 * 1024
"""Most bytes of events in one message."""

TEXT_MOST: Final = 256
"""Most characters of a name, topic or filter in an event: clients choose them of any size."""
TEXTS_MOST: Final = 20
"""Most filters in an event."""

LAST: Final = -1_000_000_000
"""Priority of a trace's hooks: they run after all other hooks, and see the final message."""


class Trace:
    """A trace of a client or of a topic at this gateway. ``to`` is the subject on which its events are published."""

    def __init__(self, control: Control, name: str, to: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.control = control
        self.name = name
        self.to = to
        self._ending = loop.call_later(TRACE_RENEWAL_TIMEOUT, self.end_trace)
        self._limit = loop.call_later(LASTS_MOST, self._over, "its time is over")
        self._events: deque[bytes] = deque()
        self._budget = Bucket(EVENTS_PER_SECOND, EVENTS_WAITING_MOST, time.monotonic())
        self._told = 0
        self._lost = 0
        self._flusher: asyncio.TimerHandle | None = None
        self._owner = f"trace {name}"

    def begin(self) -> None:
        """Begin to watch."""

    def end_trace(self) -> None:
        """Stop watching and publish the collected events."""
        self._ending.cancel()
        self._limit.cancel()
        self.control.account.services.hooks.remove_all(self._owner)
        if self._flusher is not None:
            self._flusher.cancel()
        self._flush()
        self.control.traces.pop(self.name, None)

    def _over(self, reason: str) -> None:
        """End the trace at its limit, and store its name so that a renewal does not begin it again."""
        self._add("", {"event": "ended", "reason": reason})
        self.control.traces_over.append(self.name)
        self.end_trace()

    def tell(self, client: str, event: dict[str, Any]) -> None:
        """Add an event of a client, within the limits."""
        if len(self._events) >= EVENTS_WAITING_MOST or not self._budget.add_if_room(time.monotonic()):
            self._lost += 1
        elif self._told >= EVENTS_MOST:
            self._over(f"its budget of {EVENTS_MOST} events is used up")
        else:
            self._told += 1
            self._add(client, event)

    def _add(self, client: str, event: dict[str, Any]) -> None:
        told = {name: _shown(value) for name, value in event.items()}
        self._events.append(orjson.dumps({"time": time.time(), "client": _shown(client), **told}))
        if self._flusher is None:
            self._flusher = asyncio.get_running_loop().call_later(FLUSH, self._flush)

    def _flush(self) -> None:
        self._flusher = None
        identity = orjson.dumps(self.control.account.services.identity.id)
        while self._events:
            page = [self._events.popleft()]
            size = len(page[0])
            while self._events and size + len(self._events[0]) <= PAGE_BYTES:
                page.append(self._events.popleft())
                size += len(page[-1])
            body = b'{"id":%b,"events":[%b],"lost":%d}' % (identity, b",".join(page), self._lost)
            self.control.tell(self.to, body)
            self._lost = 0

    def renew(self) -> None:
        """Postpone the end of the trace: its viewer is there."""
        self._ending.cancel()
        self._ending = asyncio.get_running_loop().call_later(TRACE_RENEWAL_TIMEOUT, self.end_trace)


class ClientTrace(Trace):
    """Trace of all packets of one client, also over further connections."""

    def __init__(self, control: Control, name: str, to: bytes, client_id: str) -> None:
        super().__init__(control, name, to)
        self.client_id = client_id
        self._client: Client | None = None
        self._watch: Watch | None = None

    def begin(self) -> None:
        """Watch the client's connection and its later connections."""
        hooks = self.control.account.services.hooks
        hooks.add(CLIENT_CONNECTED, self._connected, priority=LAST, owner=self._owner)
        hooks.add(CLIENT_DISCONNECTED, self._disconnected, priority=LAST, owner=self._owner)
        client = self.control.account.registry.find(self.client_id)
        if client is not None and client.state is State.LIVE:
            self._attach(client)

    @property
    def connected(self) -> bool:
        """Whether the client is connected to this gateway."""
        return self._client is not None

    def end_trace(self) -> None:
        """Remove the trace from the client's connection, and end."""
        self._detach()
        super().end_trace()

    def _connected(self, event: Connected) -> None:
        client = cast("Client", client_of(event.client))
        if client.client_id == self.client_id:
            self._attach(client)
            self.tell(
                self.client_id,
                {"event": "connected", "from": client.connection.peer, "session_present": event.session_present},
            )

    def _disconnected(self, event: Disconnected) -> None:
        client = client_of(event.client)
        if client.client_id == self.client_id:
            if client is self._client:
                self._detach()
            reason = f"{event.text} ({int(event.reason):#04x})"
            self.tell(self.client_id, {"event": "disconnected", "reason": reason})

    def _attach(self, client: Client) -> None:
        self._detach()
        connection, write_buffer = client.connection, client.write_buffer
        self._client, self._watch = client, Watch(client)
        connection.watch(self._received)
        send = write_buffer.send
        if isinstance(send, DeliveryHooks):
            send.send_by(WatchedSend(send.send, self._sent))
        elif send is not None:
            write_buffer.send_by(WatchedSend(send, self._sent))

    def _detach(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        connection, write_buffer = client.connection, client.write_buffer
        connection.unwatch(self._received)
        # A later trace of the same client may wrap this one: then this one stays there, without effect.
        send = write_buffer.send
        if isinstance(send, DeliveryHooks):
            if isinstance(send.send, WatchedSend) and send.send.is_of(self._sent):
                send.send_by(send.send.send)
        elif isinstance(send, WatchedSend) and send.is_of(self._sent):
            write_buffer.send_by(send.send)

    def _received(self, packets: Sequence[Packet]) -> None:
        if self._client is not None and self._watch is not None:
            for event in self._watch.received(packets, time.monotonic()):
                self.tell(self.client_id, {"from_client": True, **event})

    def _sent(self, data: bytes) -> None:
        if self._client is not None and self._watch is not None:
            for event in self._watch.sent(data, time.monotonic()):
                self.tell(self.client_id, {"from_client": False, **event})


class TopicTrace(Trace):
    """Trace of the messages of some topics: publish, delivery, acknowledgement and drop, with the clients."""

    def __init__(self, control: Control, name: str, to: bytes, topic_filter: str) -> None:
        super().__init__(control, name, to)
        self._filter = topic_filter

    def begin(self) -> None:
        """Add hooks that see every message."""
        hooks = self.control.account.services.hooks
        hooks.add(MESSAGE_PUBLISH, self._published, priority=LAST, owner=self._owner)
        hooks.add(MESSAGE_DELIVERED, self._delivered, priority=LAST, owner=self._owner)
        hooks.add(MESSAGE_ACKED, self._acked, priority=LAST, owner=self._owner)
        hooks.add(MESSAGE_DROPPED, self._dropped, priority=LAST, owner=self._owner)

    def _wanted(self, topic: str) -> bool:
        return bool(topic) and matches(self._filter, topic)

    def _published(self, event: Publishing, message: Any) -> None:
        if isinstance(message, Published) and self._wanted(message.topic):
            kind = "will" if event.will else "published"
            about = {"event": kind, "topic": message.topic, "qos": message.qos, "retain": message.retain}
            self.tell(event.client.client_id, about | _body(message.payload))

    def _delivered(self, event: Delivered) -> None:
        if self._wanted(event.topic):
            about = {"event": "delivered", "topic": event.topic, "qos": event.qos, "retain": event.retain}
            more = {"dup": event.dup, "id": event.packet_id}
            self.tell(event.client.client_id, about | more | _body(event.payload))

    def _acked(self, event: Acked) -> None:
        message = event.message
        if message is not None and self._wanted(message.topic):
            about = {"event": "refused" if event.failed else "acknowledged", "topic": message.topic}
            more = {"qos": message.qos, "id": event.packet_id}
            self.tell(event.client.client_id, about | more | _body(message.payload))

    def _dropped(self, event: Dropped) -> None:
        if self._wanted(event.topic):
            about = {"event": "dropped", "topic": event.topic, "qos": event.qos, "reason": event.reason}
            self.tell(event.client.client_id, about)


def _body(payload: bytes) -> dict[str, Any]:
    """Return size and checksum of a payload, by which messages can be compared."""
    return {"bytes": len(payload), "crc": f"{crc32(payload):08x}"}


def _shown(value: Any) -> Any:
    """Return a value of an event, shortened."""
    if isinstance(value, str):
        return value if len(value) <= TEXT_MOST else f"{value[: TEXT_MOST - 1]}…"
    return [_shown(one) for one in value[:TEXTS_MOST]] if isinstance(value, list) else value


async def _trace(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """Begin, renew or end a trace."""
    name, to = str(question.get("trace")), str(question.get("to"))
    known = control.traces.get(name)
    if question.get("stop"):
        if known is not None:
            known.end_trace()
        return
    if known is not None:
        known.renew()
        return
    if name in control.traces_over:
        return
    if len(control.traces) >= TRACES_MOST:
        raise Refusal(f"{TRACES_MOST} traces are running already")
    if not to.startswith(INBOX) or not to.isascii() or any(sign.isspace() for sign in to):
        raise Refusal("events are sent to an inbox only")
    trace: Trace
    if client := question.get("client"):
        trace = ClientTrace(control, name, to.encode(), str(client))
    else:
        wanted = str(question.get("topic"))
        try:
            validate_topic_filter(wanted)
        except MqttError as error:
            raise Refusal(f"{wanted!r}: {error}") from None
        trace = TopicTrace(control, name, to.encode(), wanted)
    trace.renew()
    control.traces[name] = trace
    trace.begin()
    yield {"connected": isinstance(trace, ClientTrace) and trace.connected}


ANSWERS: Final = {"trace": _trace}
