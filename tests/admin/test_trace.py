# SPDX-License-Identifier: Apache-2.0
"""A trace over HTTP: lines as they come, until the time is over or whoever has asked is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import orjson
import pytest

from mqtt_nats.admin import trace as tracing
from tests.admin.support import Admin, serving
from tests.harness import raw5
from tests.harness.nats import NatsServer
from tests.harness.raw5 import Raw5
from tests.harness.waiting import eventually


@pytest.fixture(scope="module")
def admin(nats_server: NatsServer) -> Iterator[Admin]:
    with serving(nats_server.url) as found:
        yield found


@contextmanager
def traced(admin: Admin, **query: Any) -> Iterator[Iterator[str]]:
    """The lines of a trace, one after the other."""
    with admin.http.stream("GET", "/api/v1/trace", params=query) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        yield answer.iter_lines()


def until(lines: Iterator[str], **wanted: Any) -> dict[str, Any]:
    """The next event that has all of this."""
    for line in lines:
        event: dict[str, Any] = orjson.loads(line) if line else {}
        if event and wanted.items() <= event.items():
            return event
    raise AssertionError(f"the trace is over without {wanted}")


def hooked(admin: Admin) -> bool:
    return bool(admin.get("/hooks")["hooks"])


def test_a_client(admin: Admin) -> None:
    with traced(admin, client="traced", lasts=30) as lines:
        begun = until(lines, event="tracing")
        assert len(begun["gateways"]) == 1
        with Raw5.open(admin.port, "traced") as client:
            assert client.subscribed(("some/+", 1)) == (1,)
            event = until(lines, packet="SUBSCRIBE")
            assert (event["filters"], event["from_client"]) == (["some/+ at QoS 1"], True)
            assert until(lines, packet="SUBACK")["ms"] >= 0


def test_a_topic_until_whoever_has_asked_is_gone(admin: Admin) -> None:
    with traced(admin, topic="gone/#", lasts="15m") as lines:
        until(lines, event="tracing")
        assert hooked(admin)
        with Raw5.open(admin.port, "writer") as client:
            client.send(raw5.publish("gone/x", b"1"))
            assert until(lines, event="published")["topic"] == "gone/x"
    eventually(lambda: not hooked(admin))


def test_its_time_ends_it(admin: Admin) -> None:
    with traced(admin, client="nobody", lasts="1s") as lines:
        assert [orjson.loads(line)["event"] for line in lines] == ["tracing"]


def test_nothing_for_a_while(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies end answers of which nothing comes."""
    monkeypatch.setattr(tracing, "KEEP_ALIVE_LINE_S", 0.1)
    with traced(admin, client="nobody", lasts=30) as lines:
        until(lines, event="tracing")
        assert [next(lines), next(lines)] == ["", ""]


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ({}, "expected a client or a topic"),
        ({"client": "a", "topic": "b"}, "expected a client or a topic"),
        ({"topic": "a/#/b"}, "a/#/b"),
        ({"client": "a", "lasts": "always"}, "lasts"),
        ({"client": "a", "lasts": "61m"}, "lasts"),
        ({"client": "a", "lasts": "soon"}, "'soon' is not a duration"),
        ({"client": "a", "for": "1s"}, "for: there is no such argument"),
    ],
)
def test_bad_input(admin: Admin, query: dict[str, str], text: str) -> None:
    answer = admin.http.get("/api/v1/trace", params=query)
    assert answer.status_code == 400
    assert text in answer.json()["error"]


def test_strangers(admin: Admin) -> None:
    assert httpx.get(f"{admin.url}/api/v1/trace", params={"client": "a"}).status_code == 401


def test_it_is_described(admin: Admin) -> None:
    operation = admin.http.get("/openapi.json").json()["paths"]["/api/v1/trace"]["get"]
    assert {one["name"] for one in operation["parameters"]} == {"client", "topic", "lasts"}
    assert list(operation["responses"]["200"]["content"]) == ["application/x-ndjson"]
