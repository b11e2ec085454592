# SPDX-License-Identifier: Apache-2.0
"""Stores: acknowledgements, refusals, the order of what is sent again, and when it is."""

from __future__ import annotations

import asyncio
import time

import pytest

from mqtt_nats.backbone import pending_stores as pending
from mqtt_nats.backbone import stream_outage as outage
from mqtt_nats.backbone.acked_publisher import ACK_TIMEOUT
from mqtt_nats.backbone.connect import NatsLinks
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.backbone.pending_stores import TooLarge, sequence
from mqtt_nats.lifecycle import pause_detection as standstill
from mqtt_nats.transport.connection import Clock
from tests.backbone.bench import ACK, NO_RESPONDERS, Bench
from tests.conftest import Logged
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeServices, as_services


@pytest.mark.parametrize(
    ("ack", "expected"),
    [
        (b'{"stream":"S","seq":17}', 17),
        (b'{"stream":"S", "domain":"d", "seq": 9000,"duplicate": true}', 9000),
        (b'{"seq":0}', 0),
    ],
)
def test_sequence(ack: bytes, expected: int) -> None:
    assert sequence(ack) == expected


async def test_a_frame_and_its_ack() -> None:
    bench = Bench()
    bench.put("a", b"payload")
    assert bench.link.take() == [b"HPUB $MQTT.msgs.s %b 12 19\r\nNATS/1.0\r\n\r\npayload\r\n" % bench.replies["a"]]
    bench.answer("a", b'{"seq":5}')
    assert bench.log == [("a", b'{"seq":5}')]
    assert not bench.store.pending
    assert bench.store.bytes == 0
    bench.answer("a", b'{"seq":5}')
    assert len(bench.log) == 1, "a second acknowledgement of the same store"


async def test_acks_in_any_order() -> None:
    bench = Bench()
    for name in "abc":
        bench.put(name)
    for name in "cab":
        bench.answer(name)
    assert [entry[0] for entry in bench.log] == ["c", "a", "b"]  # type: ignore[index]


async def test_a_refusal_ends_one_store_only() -> None:
    bench = Bench()
    bench.put("a")
    bench.put("b")
    bench.answer("a", b'{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"}}')
    assert bench.log == [("a", 10077)]
    assert not bench.stalled
    bench.answer("b")
    assert bench.log[1:] == [("b", b'{"seq":1}')]


async def test_an_answer_that_cannot_be_read_is_a_refusal() -> None:
    bench = Bench()
    bench.put("a")
    bench.answer("a", b'{"error":"no"}')
    assert bench.log == [("a", 0)]


async def test_too_large_is_not_sent() -> None:
    bench = Bench()
    bench.put("fits", b"x" * (1000 - 12))
    bench.link.take()
    with pytest.raises(TooLarge):
        bench.put("too large", b"x" * (1001 - 12))
    assert bench.link.take() == []
    assert len(bench.store.pending) == 1


async def test_a_new_connection_gets_the_inbox_then_everything_unacknowledged_in_order() -> None:
    bench = Bench()
    for name in "abcd":
        bench.put(name)
    bench.answer("b")
    bench.link.take()
    bench.link.online = False
    bench.store.offline()
    bench.put("e")
    assert bench.link.take() == [], "nothing is sent while there is no connection"
    bench.link.online = True
    bench.link.max_payload = 500
    bench.store.online()
    assert bench.link.out.pop(0) == b"SUB " + bench.store.prefix + b"*"
    assert bench.sent() == ["a", "c", "d", "e"]
    assert bench.store.resent == 4
    bench.put("f")
    assert bench.sent() == ["f"]
    with pytest.raises(TooLarge):
        bench.put("g", b"x" * 500)


async def test_what_a_new_connection_does_not_take_any_more_is_refused() -> None:
    """nats-server would end the connection over it each time; what it takes is sent."""
    bench = Bench()
    bench.put("fits", b"x" * (500 - 12))
    bench.put("larger", b"x" * (501 - 12))
    bench.acknowledge("acknowledged")
    bench.link.take()
    bench.store.offline()
    bench.link.max_payload = 500
    bench.store.online()
    assert bench.log == [("larger", 0)]
    assert bench.sent() == ["fits", "acknowledged"]


async def test_a_late_ack_of_an_earlier_store_confirms_no_other() -> None:
    bench = Bench()
    bench.put("a")
    bench.store.offline()
    bench.store.online()
    bench.answer("a")
    bench.put("b")
    bench.answer("a")
    assert bench.log == [("a", b'{"seq":1}')]
    assert len(bench.store.pending) == 1


@pytest.mark.parametrize(
    "error",
    [
        b"",
        b'{"error":{"code":503,"err_code":10008,"description":"unavailable"}}',
        b'{"error":{"code":429,"err_code":10167,"description":"too many requests"}}',
        b'{"error":{"code":409,"err_code":10158,"description":"duplicate message id is in process"}}',
    ],
)
async def test_no_leader(error: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Stop, probe with the oldest, then send everything again in order before anything new."""
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    monkeypatch.setattr(outage, "PROBE_MOST", 0.02)
    bench = Bench()
    for name in "abc":
        bench.put(name)
    assert bench.sent() == ["a", "b", "c"]
    bench.answer("b", error, NO_RESPONDERS if not error else b"")
    assert bench.stalled
    assert ", on $MQTT.msgs.s; 3 publishes wait" in caplog.text, "whoever reads it knows which stream it is about"
    assert bench.log == [], "nothing has failed"
    bench.put("d")
    await aeventually(lambda: len(bench.link.out) >= 1)
    assert bench.sent()[0] == "a"
    bench.answer("a", error, NO_RESPONDERS if not error else b"")
    await aeventually(lambda: len(bench.link.out) >= 1)
    assert set(bench.sent()) == {"a"}, "only the oldest is tried"
    bench.answer("a")
    assert bench.sent() == ["b", "c", "d"]
    for name in "bcd":
        bench.answer(name)
    bench.put("e")
    assert bench.sent() == ["e"]
    assert bench.log == [(name, b'{"seq":1}') for name in "abcd"]


async def test_a_probe_without_an_answer_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    monkeypatch.setattr(outage, "PROBE_MOST", 0.01)
    bench = Bench()
    bench.put("a")
    bench.store.note_outage(b"$MQTT_msgs", "a test")
    await aeventually(lambda: len(bench.link.out) >= 4)
    assert set(bench.sent()) == {"a"}
    bench.store.offline()
    await asyncio.sleep(0.05)
    assert bench.link.take() == [], "no probe without a connection"


async def test_why_it_goes_on_is_said_when_the_reason_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, logged: Logged
) -> None:
    """A leader that is silent is another fault than one that is not there. Only the first reason is a warning."""
    caplog.set_level("INFO", "mqtt_nats.nats")
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    monkeypatch.setattr(outage, "PROBE_REFUSED", 0.01)
    monkeypatch.setattr(outage, "PROBE_MOST", 60.0)
    bench = Bench()
    bench.put("a")
    bench.sent()
    bench.answer("a", b"", NO_RESPONDERS)
    for _ in range(3):
        await aeventually(lambda: len(bench.link.out) >= 1)
        bench.sent()
        bench.answer("a", b"", NO_RESPONDERS)
    assert logged.messages == ["JetStream does not store: no server answers, on $MQTT.msgs.s; 1 publishes wait"]
    logged.clear()
    monkeypatch.setattr(outage, "PROBE_MOST", 0.03)
    await aeventually(lambda: len(bench.link.out) >= 4)
    assert logged.messages == ["JetStream still does not store: no answer for 0.03 s, on $MQTT.msgs.s"]
    logged.clear()
    bench.answer("a", b'{"error":{"code":503,"err_code":10008,"description":"unavailable"}}')
    bench.answer("a", b'{"error":{"code":503,"err_code":10008,"description":"unavailable"}}')
    (line,) = logged.messages
    assert line.startswith("JetStream still does not store: ")
    assert "unavailable" in line


async def test_an_acknowledgement_that_nobody_takes_is_no_stall() -> None:
    """Whether its consumer is gone, or only has no leader, is found out by somebody else."""
    bench = Bench()
    absent: list[bytes] = []
    bench.store.on_absent = absent.append
    gone, leaderless = bench.acknowledge("gone"), bench.acknowledge("leaderless")
    assert bench.store.acknowledged_by(gone) == ACK
    bench.link.take()
    for name in ("gone", "leaderless"):
        bench.answer(name, b"", NO_RESPONDERS)
    assert absent == [gone, leaderless]
    assert bench.log == []
    assert not bench.stalled
    bench.store.assume(gone)
    assert bench.log == [("gone", b"")]
    bench.store.repeat(leaderless)
    assert bench.sent() == ["leaderless"]
    bench.answer("leaderless", b"")
    assert bench.log == [("gone", b""), ("leaderless", b"")]
    bench.store.assume(gone)
    bench.store.repeat(gone)
    assert bench.store.acknowledged_by(gone) == b""
    assert len(bench.log) == 2


async def test_a_request_that_nobody_takes_is_a_stall() -> None:
    """Only acknowledgements may be addressed to what is gone."""
    bench = Bench()
    bench.acknowledge("a", b"$JS.API.STREAM.MSG.DELETE.S")
    bench.answer("a", b"", NO_RESPONDERS)
    assert bench.log == []
    assert bench.stalled


async def test_what_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledgements that were on their way do not start everything again: only that of the probe does."""
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    bench = Bench()
    for name in "abcd":
        bench.put(name)
    bench.answer("d", b"", NO_RESPONDERS)
    bench.link.take()
    bench.answer("a")
    bench.answer("b")
    assert bench.stalled
    await aeventually(lambda: len(bench.link.out) >= 1)
    assert bench.sent() == ["c"]
    bench.answer("c")
    assert bench.sent() == ["d"]


async def test_a_probe_is_no_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its consumer may have a leader when the streams have none."""
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    bench = Bench()
    bench.acknowledge("consumer")
    bench.put("a")
    bench.answer("a", b"", NO_RESPONDERS)
    bench.link.take()
    await aeventually(lambda: len(bench.link.out) >= 1)
    assert bench.sent() == ["a"]
    bench.answer("a")
    assert bench.sent() == ["consumer"]


async def test_the_time_in_which_the_process_stood_still_does_not_count() -> None:
    """An answer that came then is still to be read."""
    bench = Bench()
    bench.store.tick(1000.0)
    bench.put("1")
    stood = FakeServices()
    stood.nats = NatsLinks(NatsConnection(), NatsConnection(), NatsConnection(), stood.nats.inbox, bench.store)
    stood.clock = clock = Clock(0.0)
    stood.nats.begin_standstill()
    clock.read = time.monotonic() - 20
    standstill._begin(as_services(stood))
    stalled = []
    for passed in (19, 21):
        bench.store.tick(1000.0 + ACK_TIMEOUT + passed)
        stalled.append(bench.stalled)
    assert stalled == [False, True]
    bench.store.offline()


async def test_silence_is_noticed() -> None:
    bench = Bench()
    bench.store.tick(100.0)
    bench.put("a")
    bench.store.tick(100.0 + ACK_TIMEOUT)
    assert not bench.stalled
    bench.store.tick(100.5 + ACK_TIMEOUT)
    assert bench.stalled


async def test_pressure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "MAX_PENDING", 4)
    bench = Bench()
    for name in "abcdef":
        bench.put(name)
    assert bench.pressure == [True]
    for name in "abcd":
        bench.answer(name)
    assert bench.store.pressed
    bench.answer("e")
    assert bench.pressure == [True, False]


async def test_pressure_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "MAX_PENDING_BYTES", 1000)
    bench = Bench()
    bench.put("a", b"x" * 900)
    assert bench.pressure == []
    bench.put("b", b"x" * 100)
    assert bench.pressure == [True]
    bench.answer("a")
    assert bench.pressure == [True, False]
    bench.answer("b")
    assert bench.store.bytes == 0
