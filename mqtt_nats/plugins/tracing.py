# SPDX-License-Identifier: Apache-2.0
"""Plugin for OpenTelemetry: spans of messages, exported by OTLP. It needs the extra `otel`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from pydantic import Field

from mqtt_nats.hooks.points import (
    CLIENT_DISCONNECTED,
    MESSAGE_ACKED,
    MESSAGE_ANSWERED,
    MESSAGE_DELIVERED,
    MESSAGE_DROPPED,
    MESSAGE_PUBLISH,
)
from mqtt_nats.plugins.base import Options, Plugin

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

LAST: Final = -1_000_000
"""Priority of the hook for publishes: it sees the topic and the payload that other hooks have made."""


class TracingOptions(Options):
    """Options of the plugin."""

    endpoint: str = Field(
        default="http://127.0.0.1:4318/v1/traces", description="Where spans go, by OTLP over HTTP (protobuf)."
    )
    ratio: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Part of the messages that is traced. A publisher that sends `traceparent` decides itself.",
    )
    service: str = Field(default="mqtt-nats", min_length=1, description="`service.name` of the spans.")


class Tracing(Plugin[TracingOptions]):
    """Plugin that makes spans of messages and exports them."""

    options_type = TracingOptions

    async def load(self) -> None:
        """Start the exporter and add the hooks.

        Raises:
            ValueError: the extra `otel` is not installed.
        """
        self._provider = make_provider(self.options, self.gateway.identity)
        from mqtt_nats.plugins.spans import Spans  # needs the extra

        spans = Spans(self._provider.get_tracer("mqtt_nats"), self.options.ratio)
        on = self.gateway.on
        on(MESSAGE_PUBLISH, spans.published, priority=LAST)
        on(MESSAGE_ANSWERED, spans.answered)
        on(MESSAGE_DELIVERED, spans.delivered)
        on(MESSAGE_ACKED, spans.acked)
        on(MESSAGE_DROPPED, spans.dropped)
        on(CLIENT_DISCONNECTED, spans.disconnected)

    async def unload(self) -> None:
        """Export the remaining spans and stop the exporter."""
        await asyncio.to_thread(self._provider.shutdown)


def make_provider(options: TracingOptions, identity: str) -> TracerProvider:
    """Return a provider of tracers that exports in a thread of its own; publishers decide by ``traceparent``.

    Raises:
        ValueError: the extra `otel` is not installed.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
    except ImportError:
        raise ValueError("the extra otel is not installed: pip install 'mqtt-nats[otel]'") from None
    resource = Resource.create({"service.name": options.service, "service.instance.id": identity})
    provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), resource=resource)
    provider.add_span_processor(BatchSpanProcessor(make_exporter(options)))
    return provider


def make_exporter(options: TracingOptions) -> SpanExporter:
    """Return the exporter of spans by OTLP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(options.endpoint)
