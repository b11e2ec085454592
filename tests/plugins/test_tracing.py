# SPDX-License-Identifier: Apache-2.0
"""Spans of messages: what is in them, whose children they are, where they are sent, and what is not traced."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import nats
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from mqtt_nats.hooks.events import ClientView
from mqtt_nats.plugins import spans, tracing
from tests.harness.fence import fence
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually, eventually
from tests.plugins.conftest import Start
from tests.plugins.fakes import PlainClient
from tests.plugins.test_manager import plugins_of

pytestmark = pytest.mark.anyio

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "make_exporter", lambda _: exporter)
    return exporter


async def collected(exporter: InMemorySpanExporter, *names: str) -> dict[str, ReadableSpan]:
    """The spans, once there are as many of each name."""

    def found() -> dict[str, ReadableSpan] | None:
        finished = exporter.get_finished_spans()
        return {one.name: one for one in finished} if sorted(one.name for one in finished) == sorted(names) else None

    return await aeventually(found, 30, what=str(names))


async def send(writer: RawClient5, topic: str, payload: bytes, qos: int, **properties: Any) -> None:
    """Publish with properties, and complete the exchange."""
    number = writer.publish5(topic, payload, qos, **properties)
    if qos == 1:
        await writer.expect_ack(PUBACK, number)
    elif qos == 2:
        await writer.expect_ack(PUBREC, number)
        writer.ack(PUBREL, number)
        await writer.expect_ack(PUBCOMP, number)


def parent(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def own(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_spans_of_a_message(start: Start, exported: InMemorySpanExporter, qos: int) -> None:
    """From PUBLISH over store and delivery to the acknowledgement; the subscriber can continue the trace."""
    gateway = start({"otel": {"ratio": 1}})
    async with (
        await RawClient5.connect5(gateway.port, f"reader{qos}") as reader,
        await RawClient5.connect5(gateway.port, f"writer{qos}") as writer,
    ):
        await reader.subscribe(f"spans/{qos}", qos=qos)
        await send(writer, f"spans/{qos}", b"x", qos, user_property=[("a", "b")])
        message = await reader.receive(f"spans/{qos}", b"x")
        names = ["PUBLISH", "deliver", *(["store"] if qos else [])]
        found = await collected(exported, *names)
        publish = found["PUBLISH"]
        assert publish.context is not None
        assert publish.parent is None
        assert publish.kind is SpanKind.SERVER
        assert publish.attributes is not None
        assert publish.attributes["messaging.destination.name"] == f"spans/{qos}"
        assert publish.attributes["messaging.client.id"] == f"writer{qos}"
        assert publish.attributes["mqtt.qos"] == qos
        assert bool(publish.attributes["messaging.message.id"]) is bool(qos)
        for name in names[1:]:
            assert parent(found[name]) == own(publish)
            assert found[name].status.status_code is StatusCode.UNSET
        assert message.properties is not None
        flags = f"{int(publish.context.trace_flags):02x}"
        assert dict(message.properties["user_property"]) == {
            "a": "b",
            "traceparent": f"00-{format_trace_id(publish.context.trace_id)}-{format_span_id(own(publish))}-{flags}",
        }
        if qos:
            store, deliver = found["store"], found["deliver"]
            assert publish.start_time is not None
            assert store.start_time is not None
            assert store.end_time is not None
            assert publish.end_time is not None
            assert publish.start_time <= store.start_time <= store.end_time <= publish.end_time
            assert deliver.attributes is not None
            assert deliver.attributes["messaging.client.id"] == f"reader{qos}"


async def test_the_publisher_decides_and_nats_clients_continue(
    start: Start, exported: InMemorySpanExporter, nats_server: NatsServer
) -> None:
    """``traceparent`` of the publisher: the spans are its children, or there are none; NATS gets it as a header."""
    gateway = start({"otel": {"ratio": 0}})
    client = await nats.connect(nats_server.url)
    heard = await client.subscribe("spans.given")
    await fence(client)
    async with await RawClient5.connect5(gateway.port, "writer") as writer:
        await send(writer, "spans/given", b"0", 1)
        quiet = f"00-{TRACE}-{PARENT}-00"
        await send(writer, "spans/given", b"1", 1, user_property=[("traceparent", quiet)])
        given = [("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "vendor=1")]
        await send(writer, "spans/given", b"2", 1, user_property=given)
        found = await collected(exported, "PUBLISH", "store")
    publish = found["PUBLISH"]
    assert publish.parent is not None
    assert publish.context is not None
    assert format_trace_id(publish.context.trace_id) == TRACE
    assert format_span_id(publish.parent.span_id) == PARENT
    headers = [(await heard.next_msg(10)).headers or {} for _ in range(3)]
    assert "traceparent" not in headers[0]
    assert headers[1]["traceparent"] == quiet
    assert headers[2]["traceparent"] == f"00-{TRACE}-{format_span_id(own(publish))}-01"
    assert headers[2]["tracestate"] == "vendor=1"
    await client.close()


async def test_clients_of_3_1_1(start: Start, exported: InMemorySpanExporter) -> None:
    """They see no properties; a durable session's delivery is recognised by the id of the message."""
    gateway = start({"otel": {"ratio": 1}})
    async with (
        await RawClient.connect(gateway.port, "old-reader", clean=False) as reader,
        await RawClient.connect(gateway.port, "old-writer") as writer,
    ):
        await reader.subscribe("spans/old", qos=1)
        await writer.deliver("spans/old", b"x", 1)
        await reader.receive("spans/old", b"x")
        found = await collected(exported, "PUBLISH", "deliver", "store")
        assert parent(found["deliver"]) == own(found["PUBLISH"])


async def test_what_has_no_acknowledgement(start: Start, exported: InMemorySpanExporter) -> None:
    """The span ends with the connection of the subscriber, and says so."""
    gateway = start({"otel": {"ratio": 1}})
    async with (
        await RawClient5.connect5(gateway.port, "silent") as reader,
        await RawClient5.connect5(gateway.port, "writer") as writer,
    ):
        await reader.subscribe("spans/silent", qos=1)
        await send(writer, "spans/silent", b"x", 1)
        await reader.message("spans/silent", b"x")
        await collected(exported, "PUBLISH", "store")
    found = await collected(exported, "PUBLISH", "deliver", "store")
    assert found["deliver"].status.description == "the connection has ended"


async def test_a_refused_message(start: Start, exported: InMemorySpanExporter, tmp_path: Path) -> None:
    acl = tmp_path / "acl.toml"
    acl.write_text('[[rules]]\neffect = "deny"\ntopics = "#"\n')
    gateway = start({"otel": {"ratio": 1}}, acl_file=acl)
    async with await RawClient5.connect5(gateway.port, "writer") as writer:
        writer.publish5("spans/denied", b"x", 1)
        found = await collected(exported, "PUBLISH", "store")
    for name in ("PUBLISH", "store"):
        assert found[name].status.description == "reason code 0x87"


def test_open_spans_are_bounded_and_found_by_their_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is compared with others: a table of all of them would be read when a client leaves."""
    monkeypatch.setattr(spans, "OPEN_MOST", 3)
    compared: set[str] = set()

    def same(view: ClientView, other: ClientView) -> bool:
        compared.update((view.client_id, other.client_id))
        return view._client is other._client

    monkeypatch.setattr(ClientView, "__eq__", same)
    second = PlainClient("other")
    one, other, third = (ClientView(client) for client in (PlainClient("one"), second, PlainClient("third")))
    found: spans.OpenSpans[str] = spans.OpenSpans()
    added = [found.add((client, number), f"{client.client_id}{number}") for client in (one, other) for number in (1, 2)]
    assert added == [None, None, None, "one1"]
    assert found.add((other, 2), "again") == "other2"
    assert (found.get((one, 1)), found.get((other, 2))) == (None, "again")
    assert found.pop((other, 2)) == "again"
    compared.clear()
    assert found.pop_all(third) == []
    assert found.pop_all(ClientView(second)) == ["other1"]
    assert compared == {"other"}
    assert found.pop_all(one) == ["one2"]
    assert found.pop_all(one) == []


async def test_spans_are_sent_by_otlp(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the endpoint, by HTTP and protobuf, with the name of the service; also when the plugin is unloaded."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    received: list[ExportTraceServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            endpoint = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
            gateway = start({"otel": {"ratio": 1, "endpoint": endpoint, "service": "site-7"}})
            async with await RawClient5.connect5(gateway.port, "writer") as writer:
                await send(writer, "spans/sent", b"x", 1)
            gateway.run(plugins_of(gateway).unload("otel"))
            eventually(lambda: received)
        finally:
            server.shutdown()
            thread.join()
    (resource,) = received[0].resource_spans
    attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert attributes["service.name"] == "site-7"
    assert {one.name for scope in resource.scope_spans for one in scope.spans} == {"PUBLISH", "store"}
