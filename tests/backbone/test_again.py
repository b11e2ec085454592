# SPDX-License-Identifier: Apache-2.0
"""Stores that are sent again: what is looked for before, what is withheld, and what is stale."""

from __future__ import annotations

import asyncio
import time

import pytest

from mqtt_nats.backbone import stream_outage as outage
from mqtt_nats.backbone.acked_publisher import ACK_TIMEOUT
from tests.backbone.bench import NO_RESPONDERS, Bench, Look, Note
from tests.harness.waiting import aeventually


class Late(Note):
    """It is always too late."""

    def stale(self) -> bool:
        return True


async def test_what_may_be_forgotten_is_looked_for_before_it_is_sent_again() -> None:
    bench = Bench()
    look = Look(bench, {b"2": 22})
    bench.store.tick(1000.0)
    bench.put("without an id")
    bench.put("1", identity=b"1")
    bench.put("2", identity=b"2")
    bench.store.tick(1000.0 + bench.store.trusted)
    bench.put("3", identity=b"3")
    bench.store.offline()
    bench.link.take()
    bench.put("4", identity=b"4")
    bench.store.tick(1002.0 + bench.store.trusted)
    begun = time.time()
    bench.store.online()
    assert bench.sent() == [], "nothing overtakes what is in doubt"
    bench.put("5", identity=b"5")
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["without an id"], "it shows whether the stream stores"
    assert look.asked == [{b"1", b"2"}]
    assert abs(look.since[0] - (begun - 2 - bench.store.trusted)) < 60
    assert bench.log == [("2", b'{"seq":22}')]
    bench.answer("without an id", b'{"seq":23}')
    assert bench.sent() == ["1", "3", "4", "5"]
    bench.store.offline()
    bench.store.online()
    assert bench.sent() == ["1", "3", "4", "5"], "what was sent a moment ago is in no doubt"


async def test_ids_that_others_use_are_looked_for_too() -> None:
    """What came when nothing could be sent any more may have been stored by another gateway since."""
    bench = Bench()
    look = Look(bench, {b"q2-7": 22})
    bench.store.tick(1000.0)
    bench.store.offline()
    bench.put("own", identity=b"own")
    bench.put("release", identity=b"q2-7")
    bench.put("will", identity=b"will-3")
    bench.store.tick(1001.0 + bench.store.trusted)
    begun = time.time()
    bench.store.online()
    await aeventually(lambda: bool(bench.sent()))
    assert look.asked == [{b"q2-7", b"will-3"}]
    assert abs(look.since[0] - (begun - 1 - bench.store.trusted)) < 60
    assert bench.log == [("release", b'{"seq":22}')]
    bench.store.offline()


async def test_what_is_withheld_goes_when_it_is_let_go() -> None:
    """In the order in which it came, and never when it is dropped; the rest does not wait for it."""
    bench = Bench()
    for name in "abcd":
        bench.put(name)
    bench.store.offline()
    bench.link.take()
    dropped = bench.op("c")
    for name in "bcd":
        bench.store.withhold(bench.op(name))
    bench.store.online()
    assert bench.sent() == ["a"]
    bench.store.offline()
    bench.store.online()
    assert bench.sent() == ["a"]
    bench.store.let_go({dropped})
    assert bench.sent() == ["b", "d"]
    bench.answer("c")
    for name in "abd":
        bench.answer(name)
    assert [entry[0] for entry in bench.log] == ["a", "b", "d"]  # type: ignore[index]
    assert not bench.store.pending


async def test_what_is_new_can_be_withheld() -> None:
    bench = Bench()
    late = Note(bench.log, "late")
    bench.store.withhold(late)
    bench.store.put(b"HPUB $MQTT.msgs.s ", b"NATS/1.0\r\n\r\n", b"x", late)
    bench.put("next")
    assert bench.sent() == ["next"]
    bench.store.let_go(set())
    assert len(bench.link.take()) == 1


async def test_a_message_that_is_stored_is_not_retained_by_that() -> None:
    """Both copies of a release, or a will, have one id, and one stream was asked."""
    bench = Bench()
    Look(bench, {b"q2-1": 11})
    bench.store.tick(1000.0)
    bench.put("retained", identity=b"q2-1", subject=b"$MQTT.rmsgs.s")
    bench.put("message", identity=b"q2-1")
    bench.store.offline()
    bench.put("retained later", identity=b"will-1", subject=b"$MQTT.rmsgs.s")
    bench.link.take()
    bench.store.tick(1000.0 + 2 * bench.store.trusted)
    bench.store.online()
    await aeventually(lambda: bool(bench.log))
    assert bench.log == [("message", b'{"seq":11}')]
    assert bench.sent() == ["retained", "retained later"]


async def test_what_is_stale_is_not_sent_again() -> None:
    """It ends, and the rest goes on."""
    bench = Bench()
    for name in "ab":
        bench.put(name)
    late = Late(bench.log, "late")
    bench.store.put(b"HPUB $MQTT.msgs.s ", b"NATS/1.0\r\n\r\n", b"x", late)
    bench.link.take()
    bench.store.offline()
    bench.store.online()
    assert bench.sent() == ["a", "b"]
    assert bench.log == [("late", 0)]
    assert len(bench.store.pending) == 2


async def test_a_store_behind_one_that_is_withheld_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.put("first")
    bench.store.offline()
    bench.store.withhold(bench.op("first"))
    bench.store.online()
    bench.put("next")
    for passed in (1, ACK_TIMEOUT + 2):
        bench.store.tick(bench.store.now + passed)
    assert bench.stalled
    assert "no answer for 5 s, on $MQTT.msgs.s; 2 publishes wait" in caplog.text
    bench.store.offline()


async def test_a_look_that_fails_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    bench = Bench()
    look = Look(bench, {b"1": 11})
    look.failures = 2
    bench.store.tick(1000.0)
    bench.put("1", identity=b"1")
    bench.put("2")
    bench.link.take()
    bench.store.tick(1100.0)
    assert bench.stalled
    await aeventually(lambda: bool(bench.log))
    assert len(look.asked) == 3
    assert bench.log == [("1", b'{"seq":11}')]
    assert bench.sent() == ["2"]


async def test_a_look_ends_with_the_connection() -> None:
    bench = Bench()
    look = Look(bench, {b"1": 11})
    bench.store.tick(1000.0)
    bench.put("1", identity=b"1")
    bench.link.take()
    bench.store.tick(1100.0)
    bench.store.offline()
    bench.store.online()
    bench.store.offline()
    await asyncio.sleep(0.05)
    assert bench.log == []
    bench.store.online()
    await aeventually(lambda: bool(bench.log))
    assert look.asked[-1] == {b"1"}


# -- messages without an id -------------------------------------------------------------------------------


KEY = b"m1 $MQTT.msgs.s"


async def test_a_message_without_an_id_is_looked_for_before_it_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the stream has handled what was sent before: until then nothing is sent but questions for that."""
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    bench = Bench()
    bench.link.passes = False
    look = Look(bench, {KEY: 11})
    bench.store.tick(1000.0)
    bench.put("1", message_id=b"m1")
    bench.put("2", message_id=b"m2")
    bench.link.take()
    bench.store.tick(1000.0 + ACK_TIMEOUT + 1)
    bench.put("3", message_id=b"m3")
    await aeventually(lambda: bench.link.fences)
    assert (bench.sent(), look.asked) == ([], [])
    bench.link.answer_fence()
    await aeventually(lambda: bench.log)
    assert look.asked == [{KEY, b"m2 $MQTT.msgs.s"}]
    assert bench.log == [("1", b'{"seq":11}')]
    assert bench.sent() == ["2"]
    assert bench.store.outages == ["$MQTT_msgs"], "it has not stored yet"
    bench.answer("2", b'{"seq":12}')
    assert bench.sent() == ["3"]
    assert bench.store.outages == []
    assert not bench.stalled


async def test_what_is_answered_meanwhile_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stood still answers what it had been sent, and then the fence."""
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    bench = Bench()
    bench.link.passes = False
    look = Look(bench, {})
    bench.store.tick(1000.0)
    bench.put("1", message_id=b"m1")
    bench.link.take()
    bench.store.tick(1000.0 + ACK_TIMEOUT + 1)
    await aeventually(lambda: bench.link.fences)
    bench.answer("1")
    bench.put("2", message_id=b"m2")
    assert bench.sent() == []
    bench.link.answer_fence()
    await aeventually(lambda: bench.sent() == ["2"])
    assert look.asked == []


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((b"", NO_RESPONDERS), id="no responders"),
        pytest.param((b'{"error":{"code":503,"err_code":10008,"description":"a test"}}', b""), id="unavailable"),
    ],
)
async def test_a_stream_that_does_not_store_is_asked_again(
    answer: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    bench = Bench()
    bench.link.passes = False
    look = Look(bench, {})
    bench.put("1", message_id=b"m1")
    bench.link.take()
    bench.store.offline()
    bench.store.online()
    await aeventually(lambda: bench.link.fences)
    bench.link.answer_fence(*answer)
    await aeventually(lambda: len(bench.link.fences) == 2)
    assert (bench.sent(), look.asked) == ([], [])
    bench.link.answer_fence()
    await aeventually(lambda: bench.sent() == ["1"])
    assert look.asked == [{KEY}]


async def test_a_message_that_was_refused_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not stored: it is what tells that the stream stores again."""
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    bench = Bench()
    look = Look(bench, {})
    bench.put("1", message_id=b"m1")
    bench.link.take()
    bench.answer("1", b"", NO_RESPONDERS)
    await aeventually(lambda: bench.sent() == ["1"])
    bench.answer("1")
    assert bench.log == [("1", b'{"seq":1}')]
    assert (look.asked, bench.link.fences, bench.stalled) == ([], [], False)


async def test_the_search_begins_behind_a_sequence_that_is_known() -> None:
    """The stream had it before the message was sent. No sequence is noted while the stream does not store."""
    bench = Bench()
    look = Look(bench, {})

    def acknowledge(name: str, seq: int) -> None:
        bench.put(name, message_id=name.encode())
        bench.answer(name, b'{"stream":"$MQTT_msgs", "seq":%d}' % seq)

    acknowledge("a", 7)
    bench.store.tick(1000.0)
    acknowledge("b", 8)
    bench.put("of another stream", subject=b"$MQTT.qos2.in.token.1")
    bench.answer("of another stream", b'{"stream":"$MQTT_qos2in", "seq":99}')
    bench.store.tick(1001.0)
    bench.put("1", message_id=b"m1")
    acknowledge("c", 10)
    bench.store.tick(1002.0)
    bench.store.offline()
    bench.store.online()
    await aeventually(lambda: look.asked)
    assert (look.asked, look.after) == ([{KEY}], [7])


async def test_a_payload_is_not_taken_for_headers() -> None:
    bench = Bench()
    look = Look(bench, {KEY: 11})
    bench.put("1", b"\r\nNats-Msg-Id:x\r\nNmqtt-Id:y\r\n", message_id=b"m1")
    bench.store.offline()
    bench.store.online()
    await aeventually(lambda: bench.log)
    assert look.asked == [{KEY}]
