# SPDX-License-Identifier: Apache-2.0
"""Possible copies that nobody has stored: the number that waits, and the stored message of each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqtt_nats.base.logs import FAILURES
from mqtt_nats.config.settings import Settings
from mqtt_nats.messages import copies as module
from mqtt_nats.messages.headers import header, identity
from mqtt_nats.pubsub.routing_table import Route
from mqtt_streams.messages import PREFIX, STREAM
from mqtt_streams.stored import StoredMessage, direct_page
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually

LINES = (
    b"Nmqtt-Pub:%d\r\nNmqtt-Id:%032x\r\nNmqtt-Subject:a\r\nX: y\r\n"
    b"Nats-Msg-Id:q2-7\r\nNats-TTL:9s\r\nnats-expected-stream:NO\r\n"
)


@pytest.fixture
def gateway(nats_server: NatsServer) -> Iterator[InProcess]:
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,))
    with running(settings) as found:
        yield found


def block(number: int, qos: int = 1, more: bytes = b"") -> bytes:
    return b"NATS/1.0\r\n" + LINES % (qos, number) + more + b"\r\n"


def suspect(gateway: InProcess, topic: str, *headers: bytes, payload: bytes = b"x") -> None:
    def work() -> None:
        encoded = topic.encode()
        route: Route = gateway.account.services.path.table.route(len(encoded).to_bytes(2) + encoded)
        for one in headers:
            gateway.account.copies.suspect(route.subject, route.msgs, one, payload)

    gateway.call(work)


def passed_over(gateway: InProcess) -> int:
    return gateway.account.services.counters.drops(0)["copy"]


def stored(gateway: InProcess, topic: str) -> list[StoredMessage]:
    subject = PREFIX + topic.replace("/", ".")
    page, _ = gateway.run(
        direct_page(gateway.account.services.nats.inbox, STREAM, subject, {"seq": 1}, messages=10_000, size=100_000_000)
    )
    return page


def test_what_is_stored(gateway: InProcess) -> None:
    """Its own id, once; none of the headers that NATS would obey. A repetition that comes later is recognised."""
    for _ in range(2):
        suspect(gateway, "stored/once", block(1, 2), block(1, 2), block(2))
        eventually(lambda: gateway.account.copies.stored == 2 and not gateway.call(gateway.account.copies.waiting))
    first, second = stored(gateway, "stored/once")
    assert identity(first.headers) == b"%032x" % 1
    assert identity(second.headers) == b"%032x" % 2
    assert header(first.headers, b"Nmqtt-Pub:") == b"2"
    assert header(first.headers, b"X:") == b"y"
    assert header(first.headers, b"Nats-Msg-Id:").startswith(b"copy-")
    assert b"q2-" not in first.headers
    assert b"TTL" not in first.headers
    assert b"Nmqtt-Subject" not in first.headers
    assert b"expected" not in first.headers.lower()
    assert passed_over(gateway) == 0


def test_without_an_id(gateway: InProcess) -> None:
    """Its place in the stream it comes from tells it; where there is none, nobody can tell, and it is left alone."""
    origin = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNats-Stream:OWN\r\nNats-Subject:a\r\nNats-Sequence:%d\r\n\r\n"
    suspect(gateway, "no/id", origin % 1, origin % 2, origin % 1, b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n")
    eventually(lambda: gateway.account.copies.stored == 2)
    suspect(gateway, "no/id", origin % 2)
    eventually(lambda: not gateway.call(gateway.account.copies.waiting))
    assert len(stored(gateway, "no/id")) == 2


@pytest.mark.long
def test_what_waits_is_bounded(gateway: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number and by bytes; the rest is passed over and counted, and the log has a budget."""
    before = FAILURES["copy"]
    monkeypatch.setattr(module, "WAITING_MAX", 10)
    suspect(gateway, "many", *(block(number) for number in range(30)))
    assert passed_over(gateway) == 20
    eventually(lambda: gateway.account.copies.stored == 10)
    monkeypatch.setattr(module, "WAITING_BYTES_MAX", 5000)
    suspect(gateway, "large", *(block(number) for number in range(4)), payload=bytes(2000))
    assert passed_over(gateway) == 22
    eventually(lambda: gateway.account.copies.stored == 12)
    assert FAILURES["copy"] == before + 22
    suspect(gateway, "large", block(9), payload=b"there is room again")
    eventually(lambda: gateway.account.copies.stored == 13)


@pytest.mark.long
def test_too_much_to_look_at(gateway: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    suspect(gateway, "busy", *(block(number) for number in range(20)))
    eventually(lambda: gateway.account.copies.stored == 20)
    monkeypatch.setattr(module, "PAGE_MESSAGES", 5)
    monkeypatch.setattr(module, "PAGES_MAX", 2)
    suspect(gateway, "busy", block(100))
    eventually(lambda: passed_over(gateway) == 1)
    assert gateway.account.copies.stored == 20


def doubt(gateway: InProcess, subject: str, *headers: bytes) -> None:
    def doubt_each() -> None:
        for one in headers:
            gateway.account.copies.doubt(subject, one)

    gateway.call(doubt_each)


@pytest.mark.long
def test_unclear_copies_are_counted_and_never_stored(gateway: InProcess) -> None:
    """All copies of a subject count, each once however many filters match, if the first one is not there."""
    doubt(gateway, "not.there", block(1), block(1), block(2), block(2), block(3))
    eventually(lambda: passed_over(gateway) == 3)
    suspect(gateway, "is/there", block(7))
    eventually(lambda: gateway.account.copies.stored == 1)
    doubt(gateway, "is.there", block(7), block(8))
    eventually(lambda: not gateway.call(gateway.account.copies.waiting))
    assert passed_over(gateway) == 3
    assert gateway.account.copies.stored == 1
    assert not stored(gateway, "not/there")


def test_subjects_with_unclear_copies_are_bounded(gateway: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    for number in range(5):
        doubt(gateway, f"unclear.{number}", block(1))
    assert passed_over(gateway) == 3
    eventually(lambda: passed_over(gateway) == 5)


@pytest.mark.long
def test_too_much_to_look_at_for_unclear_copies(gateway: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    suspect(gateway, "busy/unclear", *(block(number) for number in range(20)))
    eventually(lambda: gateway.account.copies.stored == 20)
    monkeypatch.setattr(module, "PAGE_MESSAGES", 5)
    monkeypatch.setattr(module, "PAGES_MAX", 2)
    doubt(gateway, "busy.unclear", block(100), block(101))
    eventually(lambda: passed_over(gateway) == 2)


def test_what_is_too_large_to_be_stored(gateway: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_BYTES_MAX", 100_000_000)
    suspect(gateway, "too/large", block(1), payload=bytes(9_000_000))
    eventually(lambda: passed_over(gateway) == 1)
