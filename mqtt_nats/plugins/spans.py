# SPDX-License-Identifier: Apache-2.0
"""Spans of messages from PUBLISH over store and delivery to PUBACK, for OpenTelemetry.

A message that is sampled gets a user property ``traceparent`` (W3C Trace Context), which is also a header of its NATS
message. So subscribers, NATS clients and other gateways continue the trace.

    PUBLISH     from PUBLISH to its PUBACK or PUBCOMP; child of the publisher's ``traceparent``
      store     from PUBLISH to PUBACK or PUBREC: until JetStream has the message
      deliver   from PUBLISH to a subscriber to its PUBACK or PUBCOMP, one for each subscriber
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from random import random
from typing import Any, Final, Generic, NamedTuple, TypeVar

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mqtt_nats.hooks.chain import Continue
from mqtt_nats.hooks.events import (
    Acked,
    Answered,
    ClientView,
    Delivered,
    Disconnected,
    Drop,
    Dropped,
    Published,
    Publishing,
)

OPEN_MOST: Final = 2000
"""Most publishes, and most deliveries, whose end is waited for; one more ends the oldest span."""

PUBREC: Final = 5

TRACEPARENT: Final = "traceparent"
_TRACESTATE: Final = "tracestate"
_LENGTH: Final = 55  # characters of a traceparent of version 00
_MARK: Final = b"\x26\x00\x0btraceparent" + _LENGTH.to_bytes(2)
"""Beginning of the encoded user property."""

_SAMPLED: Final = frozenset("13579bdf")
"""Last digits of a ``traceparent`` whose flag `sampled` is set."""


_W3C: Final = TraceContextTextMapPropagator()


class _Publish(NamedTuple):
    """Open spans of a publish."""

    span: Span
    store: Span


Key = tuple[ClientView, int]
"""Connection and packet identifier."""

V = TypeVar("V")


class OpenSpans(Generic[V]):
    """Open spans, at most `OPEN_MOST` values; those of a connection are found without a look at the others."""

    def __init__(self) -> None:
        self._values: OrderedDict[Key, V] = OrderedDict()
        self._identifiers: dict[ClientView, set[int]] = {}
        """Packet identifiers in ``_values``, by connection."""

    def add(self, key: Key, value: V) -> V | None:
        """Add a value; return the value that leaves for it, if any: the former one of the key, or the oldest."""
        former = self.pop(key)
        self._values[key] = value
        self._identifiers.setdefault(key[0], set()).add(key[1])
        if former is None and len(self._values) > OPEN_MOST:
            former = self.pop(next(iter(self._values)))
        return former

    def get(self, key: Key) -> V | None:
        """Return the value of a key, if there is one."""
        return self._values.get(key)

    def pop(self, key: Key) -> V | None:
        """Remove and return the value of a key, if there is one."""
        value = self._values.pop(key, None)
        if value is not None:
            client, identifier = key
            self._identifiers[client].discard(identifier)
            if not self._identifiers[client]:
                del self._identifiers[client]
        return value

    def pop_all(self, client: ClientView) -> list[V]:
        """Remove and return all values of a connection."""
        return [self._values.pop((client, identifier)) for identifier in self._identifiers.pop(client, ())]


class Spans:
    """Open spans of publishes and deliveries; the methods are hooks.

    Args:
        ratio: part of the messages without ``traceparent`` that is traced, from 0 to 1.
    """

    def __init__(self, tracer: Tracer, ratio: float) -> None:
        self._tracer = tracer
        self._ratio = ratio
        self._publishes: OpenSpans[_Publish] = OpenSpans()
        self._deliveries: OpenSpans[Span] = OpenSpans()
        self._contexts: OrderedDict[str, Context] = OrderedDict()
        """Context of a traced message by its id, for subscribers that get no properties (3.1.1)."""

    # -- publishers -----------------------------------------------------------------------------

    def published(self, event: Publishing, message: Published | Drop) -> Continue[Published | Drop] | None:
        """Begin the spans of a publish, and continue the trace in its properties if the message is sampled."""
        if isinstance(message, Drop) or event.will:
            return None
        pairs = message.properties.get("user_property", [])
        if random() >= self._ratio and all(name != TRACEPARENT for name, _ in pairs):
            return None
        attributes = {**described(event.client, message.topic, message.qos), "messaging.message.id": message.message_id}
        span = self._tracer.start_span("PUBLISH", extracted(dict(pairs)), SpanKind.SERVER, attributes)
        if not span.is_recording():  # the publisher's `traceparent` says so
            return None
        context = set_span_in_context(span)
        if message.packet_id:
            self._remember(message.message_id, context)
            ended = self._publishes.add(
                (event.client, message.packet_id), _Publish(span, self._tracer.start_span("store", context))
            )
            if ended is not None:
                _end_publish(ended, "no acknowledgement was seen")
        else:
            span.end()
        others = [pair for pair in pairs if pair[0] not in (TRACEPARENT, _TRACESTATE)]
        properties = {**message.properties, "user_property": [*others, *injected(context)]}
        return Continue(replace(message, properties=properties))  # type: ignore[arg-type]

    def answered(self, event: Answered) -> None:
        """End the spans of a publish: JetStream has the message, or it was refused."""
        key = event.client, event.packet_id
        found = self._publishes.get(key)
        if found is None:
            return
        if event.kind == PUBREC and event.reason < 0x80:
            found.store.end()
            return
        self._publishes.pop(key)
        _end_publish(found, f"reason code {event.reason:#04x}" if event.reason >= 0x80 else "")

    # -- subscribers ----------------------------------------------------------------------------

    def delivered(self, event: Delivered) -> None:
        """Begin the span of a delivery, which ends at once at QoS 0."""
        context = self._context(event)
        if context is None:
            return
        attributes = {**described(event.client, event.topic, event.qos), "mqtt.dup": event.dup}
        span = self._tracer.start_span("deliver", context, SpanKind.PRODUCER, attributes)
        if not event.qos:
            span.end()
            return
        ended = self._deliveries.add((event.client, event.packet_id), span)
        if ended is not None:
            _end(ended, "no acknowledgement was seen")

    def _remember(self, message_id: str, context: Context) -> None:
        self._contexts[message_id] = context
        if len(self._contexts) > OPEN_MOST:
            self._contexts.popitem(last=False)

    def _context(self, event: Delivered) -> Context | None:
        """Return the context of a message that is traced; None: it is not, or nothing tells."""
        at = event.properties.find(_MARK) if event.properties else -1
        if at < 0:
            return self._contexts.get(event.message_id) if event.message_id else None
        value = event.properties[at + len(_MARK) :][:_LENGTH].decode("ascii", "replace")
        return extracted({TRACEPARENT: value}) if value[-1:] in _SAMPLED else None

    def acked(self, event: Acked) -> None:
        """End the span of a delivery."""
        span = self._deliveries.pop((event.client, event.packet_id))
        if span is not None:
            _end(span, "the client refuses the message" if event.failed else "")

    def dropped(self, event: Dropped) -> None:
        """Make a span for a message that a subscriber does not get."""
        context = self._contexts.get(event.message_id) if event.message_id else None
        if context is not None:
            attributes = described(event.client, event.topic, event.qos)
            _end(self._tracer.start_span("drop", context, SpanKind.INTERNAL, attributes), event.reason)

    def disconnected(self, event: Disconnected) -> None:
        """End the open spans of a connection."""
        for found in self._publishes.pop_all(event.client):
            _end_publish(found, "the connection has ended")
        for span in self._deliveries.pop_all(event.client):
            _end(span, "the connection has ended")


def extracted(carrier: dict[str, str]) -> Context:
    """Return the context that ``traceparent`` and ``tracestate`` name, else an empty context."""
    return _W3C.extract(carrier, Context())


def injected(context: Context) -> list[tuple[str, str]]:
    """Return the user properties that continue a trace."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context)
    return list(carrier.items())


def described(client: ClientView, topic: str, qos: int) -> dict[str, Any]:
    """Return the attributes of a span, without payload and user."""
    return {
        "messaging.system": "mqtt",
        "messaging.destination.name": topic,
        "messaging.client.id": client.client_id,
        "mqtt.qos": qos,
    }


def _end(span: Span, error: str) -> None:
    if error:
        span.set_status(StatusCode.ERROR, error)
    span.end()


def _end_publish(found: _Publish, error: str) -> None:
    if found.store.is_recording():
        _end(found.store, error)
    _end(found.span, error)
