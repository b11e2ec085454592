# SPDX-License-Identifier: Apache-2.0
"""A stream without a leader holds up nothing that is for another; docs/internals/backbone.md#no-leader."""

from __future__ import annotations

import asyncio

import pytest

from mqtt_nats.backbone import stream_outage as outage
from mqtt_nats.backbone.acked_publisher import ACK_TIMEOUT
from mqtt_nats.backbone.frames import stream_of
from mqtt_streams.api import NoResponders
from mqtt_streams.consumers import parse_ack
from mqtt_streams.definitions import EVERY, load_definition
from mqtt_streams.stores import Streams
from tests.backbone.bench import ACK, NO_RESPONDERS, Bench, Look, Note
from tests.conftest import Logged
from tests.harness.jetstream import MemoryJetStream
from tests.harness.waiting import aeventually

HELD = b"$MQTT.qos2.in.token.1"
RESOLUTION_S = 0.001
"""Resolution of the clock of uvloop."""
DELETE_HELD = b"$JS.API.STREAM.MSG.DELETE.$MQTT_qos2in"


@pytest.mark.parametrize(
    ("subject", "stream"),
    [
        (b"$MQTT.msgs.a.b", b"$MQTT_msgs"),
        (b"$MQTT.msgs.a.STREAM.b", b"$MQTT_msgs"),
        (HELD, b"$MQTT_qos2in"),
        (DELETE_HELD, b"$MQTT_qos2in"),
        (b"$JS.hub.API.STREAM.PURGE.$MQTT_qos2in", b"$MQTT_qos2in"),
        (b"from.elsewhere.STREAM.MSG.DELETE.$MQTT_sess", b"$MQTT_sess"),
        (ACK, b"$MQTT_msgs"),
        (b"$JS.ACK.hub.account.$MQTT_out.C.1.1.1.1.0.random", b"$MQTT_out"),
        (b"$JS.ACK.what", b""),
        (b"something.else", b""),
    ],
)
def test_the_stream_of_a_frame(subject: bytes, stream: bytes) -> None:
    for start in (b"PUB", b"HPUB"):
        assert stream_of(b"%b %b _INBOX.x.1 0\r\n\r\n" % (start, subject)) == stream


@pytest.mark.parametrize("stream", [one for one in EVERY if one.startswith("$MQTT_")])
def test_each_stream_is_known_by_its_subjects(stream: str) -> None:
    """As they are defined."""
    for subject in load_definition(stream)["subjects"]:
        assert stream_of(b"HPUB %b _INBOX.x.1 12 12\r\n" % subject.replace(">", "a").encode()) == stream.encode()


def test_each_request_is_known_by_its_stream() -> None:
    """What the gateway sends through the store, besides what is stored, and acknowledgements."""
    streams = Streams(MemoryJetStream(), "")
    requests = [value.decode() for name, value in vars(streams).items() if name.startswith(("delete", "purge"))]
    assert len(requests) == 7
    for request in requests:
        stream = request.rpartition(".")[2]
        assert stream in EVERY
        assert stream_of(f"PUB {request} _INBOX.x.1 0".encode()) == stream.encode()
    ack = parse_ack(ACK)
    assert ack is not None
    assert ack.stream in EVERY


async def test_several_streams_without_a_leader_are_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And its end is one; what else there is to say is no warning."""
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    caplog.set_level("INFO", "mqtt_nats.nats")
    bench = Bench()
    for name, subject in [("1", b"$MQTT.msgs.a"), ("2", b"$MQTT.msgs.b"), ("3", HELD), ("4", b"$MQTT.rmsgs.a")]:
        bench.put(name, subject=subject)
    bench.sent()
    for name in "1234":
        bench.answer(name, b"", NO_RESPONDERS)
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == [
        "JetStream does not store: no server answers, on $MQTT.msgs.a; 3 publishes wait"
    ]
    assert {one.levelname for one in caplog.records[1:]} == {"INFO"}
    assert bench.store.warned
    await aeventually(lambda: len(bench.link.out) == 2)
    bench.sent()
    caplog.clear()
    for name in "1234":
        bench.answer(name, b'{"stream":"$MQTT_msgs","seq":1}')
    ends = [(one.levelname, one.getMessage().partition(";")[0]) for one in caplog.records]
    assert ends == [
        ("WARNING", "JetStream stores again to $MQTT_msgs"),
        ("INFO", "JetStream stores again to $MQTT_qos2in"),
    ]
    assert not bench.store.warned


async def test_another_stream_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Only what is for the one without a leader waits, requests and acknowledgements too."""
    caplog.set_level("INFO", "mqtt_nats.nats")
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    bench = Bench()
    bench.put("message 1")
    bench.put("held", subject=HELD)
    bench.put("message 2")
    bench.acknowledge("removal", DELETE_HELD)
    bench.sent()
    bench.answer("held", b"", NO_RESPONDERS)
    assert (bench.stalled, bench.store.outages) == (True, ["$MQTT_qos2in"])
    assert "no server answers, on $MQTT.qos2.in.token.1; 2 publishes wait" in caplog.text
    bench.put("message 3")
    bench.acknowledge("acknowledgement")
    bench.put("held later", subject=HELD)
    bench.acknowledge("removal later", DELETE_HELD)
    assert bench.sent() == ["message 3", "acknowledgement"]
    for name in ("message 1", "message 2", "message 3", "acknowledgement"):
        bench.answer(name)
    assert len(bench.log) == 4
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["held"], "the probe; an answer to something else does not end an outage"
    bench.put("message 4")
    bench.sent()
    bench.answer("held")
    assert (bench.stalled, bench.store.outages) == (False, [])
    assert bench.sent() == ["removal", "held later", "removal later"], "in order, and nothing of another stream again"
    assert "JetStream stores again to $MQTT_qos2in; 3 publishes are sent again" in caplog.text


async def test_outages_of_several_streams_end_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    monkeypatch.setattr(outage, "PROBE_MOST", 60.0)
    bench = Bench()
    for number in "12":
        bench.put(f"message {number}")
        bench.put(f"held {number}", subject=HELD)
    bench.sent()
    bench.answer("message 1", b"", NO_RESPONDERS)
    attempt = bench.store.attempt
    bench.answer("held 1", b"", NO_RESPONDERS)
    assert bench.store.attempt == attempt + 1
    assert sorted(bench.store.outages) == ["$MQTT_msgs", "$MQTT_qos2in"]
    await aeventually(lambda: len(bench.link.out) == 2)
    assert sorted(bench.sent()) == ["held 1", "message 1"]
    bench.answer("held 1")
    assert bench.store.outages == ["$MQTT_msgs"]
    assert bench.sent() == ["held 2"]
    bench.put("message 3")
    assert bench.sent() == []
    bench.answer("message 1")
    assert not bench.stalled
    assert bench.sent() == ["message 2", "message 3"]


async def test_a_lost_connection_ends_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is tried anew with the next; probes of before do not go on beside that."""
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    monkeypatch.setattr(outage, "PROBE_MOST", 0.01)
    bench = Bench()
    bench.put("message")
    bench.put("held", subject=HELD)
    bench.answer("held", b"", NO_RESPONDERS)
    bench.link.online = False
    bench.store.offline()
    assert (bench.stalled, bench.store.outages) == (True, [])
    bench.answer("held", b"", NO_RESPONDERS)
    assert bench.store.outages == [], "an answer of before says nothing of the next connection"
    bench.put("message later")
    bench.link.take()
    bench.link.online = True
    bench.store.online()
    assert bench.sent() == ["message", "held", "message later"]
    assert not bench.stalled
    bench.put("next")
    await aeventually(lambda: bool(bench.link.out))
    bench.store.offline()
    assert bench.sent() == ["next"]


async def test_silence_of_a_second_stream_is_noticed() -> None:
    """Also behind what another stream does not answer, and behind what was sent again a moment ago."""
    bench = Bench()
    bench.store.tick(1000.0)
    bench.put("message")
    bench.put("session", subject=b"$MQTT.sess.hash")
    bench.acknowledge("acknowledgement", b"$JS.ACK.$MQTT_out.C.1.1.1.1.0")
    bench.sent()
    bench.store.tick(1001.0)
    bench.put("held", subject=HELD)
    bench.sent()
    bench.answer("message", b"", NO_RESPONDERS)
    bench.store.tick(1000.5 + ACK_TIMEOUT)
    assert bench.store.outages == ["$MQTT_msgs", "$MQTT_sess"]
    assert bench.sent() == ["acknowledgement"], "it is sent again, since its stream is well"
    bench.store._resume(b"$MQTT_msgs")  # as the answer to a probe does
    assert bench.sent() == ["message"]
    bench.store.tick(1001.5 + ACK_TIMEOUT)
    assert bench.store.outages == ["$MQTT_sess", "$MQTT_qos2in"]
    bench.store.offline()


async def test_what_is_in_doubt_holds_up_messages_only() -> None:
    bench = Bench()
    look = Look(bench, {})
    bench.store.tick(1000.0)
    bench.put("1", identity=b"1")
    bench.store.tick(1000.5 + bench.store.trusted)
    bench.store.offline()
    bench.put("held", subject=HELD)
    bench.put("2", identity=b"2")
    bench.link.take()
    bench.store.online()
    assert bench.sent() == ["held"]
    assert bench.store.outages == ["$MQTT_msgs"]
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["1"]
    bench.answer("1", b'{"seq":1}')
    assert bench.sent() == ["2"]
    assert look.asked == [{b"1"}]
    assert not bench.stalled


async def test_what_others_may_have_stored_is_judged_by_the_outage_of_its_own_stream() -> None:
    """Since when messages wait: not since another stream has had no leader."""
    bench = Bench()
    look = Look(bench, {})
    bench.store.tick(1000.0)
    bench.put("held", subject=HELD)
    bench.answer("held", b"", NO_RESPONDERS)
    bench.store.tick(1000.0 + bench.store.trusted)
    bench.put("message")
    bench.answer("message", b"", NO_RESPONDERS)
    bench.put("release", identity=b"q2-7")
    bench.store.tick(1002.0 + bench.store.trusted)
    bench.store.offline()
    bench.store.online()
    assert look.asked == []
    bench.link.take()
    bench.answer("message", b"", NO_RESPONDERS)
    bench.put("release later", identity=b"q2-8")
    bench.store.tick(1003.0 + 2 * bench.store.trusted)
    bench.store.offline()
    bench.store.online()
    await aeventually(lambda: bool(look.asked))
    assert look.asked == [{b"q2-7", b"q2-8"}]
    bench.store.offline()


async def test_what_is_withheld_waits_for_its_stream_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    bench = Bench()
    bench.put("first", subject=b"$MQTT.rmsgs.s")
    bench.put("held back", subject=b"$MQTT.rmsgs.s")
    bench.store.withhold(bench.op("held back"))
    bench.answer("first", b"", NO_RESPONDERS)
    bench.link.take()
    bench.store.let_go(set())
    assert bench.link.take() == []
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["first"]
    bench.answer("first")
    assert bench.sent() == ["held back"]


async def test_a_consumer_that_is_back_while_its_stream_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its acknowledgement goes behind what waits for the stream."""
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    bench = Bench()
    bench.put("message")
    token = bench.acknowledge("acknowledgement")
    bench.answer("message", b"", NO_RESPONDERS)
    bench.link.take()
    bench.store.repeat(token)
    assert bench.link.take() == []
    await aeventually(lambda: bool(bench.link.out))
    bench.sent()
    bench.answer("message")
    assert bench.sent() == ["acknowledgement"]


async def test_what_is_retained_and_what_subscribers_get_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither copy is to be ahead; what is tried is of the stream that does not store."""
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    bench = Bench()
    bench.put("message 1")
    bench.put("retained 1", subject=b"$MQTT.rmsgs.s")
    bench.sent()
    bench.answer("retained 1", b"", NO_RESPONDERS)
    assert bench.store.outages == ["$MQTT_rmsgs"]
    bench.put("message 2")
    bench.put("retained 2", subject=b"$MQTT.rmsgs.s")
    bench.put("held", subject=HELD)
    assert bench.sent() == ["held"]
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["retained 1"]
    bench.answer("message 1")
    bench.answer("retained 1")
    assert bench.sent() == ["message 2", "retained 2"]
    bench.answer("message 2", b"", NO_RESPONDERS)
    assert bench.store.outages == ["$MQTT_msgs"]
    bench.put("retained 3", subject=b"$MQTT.rmsgs.s")
    assert bench.sent() == []
    bench.store.offline()


async def test_a_leader_that_answers_no_request_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two probes; of one that is silent about what it is to store, or refuses, nothing is said."""
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    monkeypatch.setattr(outage, "PROBE_MOST", 0.01)
    bench = Bench()
    silent: list[tuple[str, int]] = []

    def requests() -> int:
        return sum(DELETE_HELD in frame for frame in bench.link.out)

    bench.store.on_silent = lambda stream: silent.append((stream, requests()))
    bench.put("message")
    bench.store.note_outage(b"$MQTT_msgs", "a test")
    bench.store.call(DELETE_HELD, b"", Note(bench.log, "removal"))
    bench.replies["removal"] = bench.store.prefix + list(bench.store.pending)[-1]
    bench.link.take()
    bench.store.note_outage(b"$MQTT_qos2in", "a test")
    await aeventually(lambda: bool(silent))
    await aeventually(lambda: requests() > 6)
    assert silent == [("$MQTT_qos2in", 2)]
    monkeypatch.setattr(outage, "PROBE_MOST", 0.05)
    for _ in range(3):
        bench.answer("removal", b'{"error":{"code":503,"err_code":10008,"description":"unavailable"}}')
        bench.sent()
        await aeventually(lambda: requests() > 0)
    assert silent == [("$MQTT_qos2in", 2)]
    bench.store.offline()


async def test_how_long_stores_take_is_measured_of_others_meanwhile() -> None:
    bench = Bench()
    took: list[float] = []
    bench.store.on_timed = took.append
    bench.put("held", subject=HELD)
    bench.answer("held", b"", NO_RESPONDERS)
    bench.put("held later", subject=HELD)
    bench.put("message")
    bench.answer("message")
    assert len(took) == 1
    bench.store.offline()


async def test_a_look_that_fails_is_not_hurried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, logged: Logged
) -> None:
    """Each is later than the one before; whatever the error, the messages do not wait for ever."""
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.01)
    monkeypatch.setattr(outage, "PROBE_REFUSED", 0.04)
    caplog.set_level("INFO", "mqtt_nats.nats")
    bench = Bench()
    begun: list[float] = []
    loop = asyncio.get_running_loop()

    async def find(keys: set[bytes], since: float, after: int) -> dict[bytes, int]:
        begun.append(loop.time())
        if len(begun) == 1:
            raise ValueError
        if len(begun) < 6:
            raise NoResponders
        return {b"1": 11}

    bench.store.find = find
    bench.store.tick(1000.0)
    bench.put("1", identity=b"1")
    bench.store.offline()
    bench.store.tick(1001.0 + bench.store.trusted)
    bench.store.online()
    await aeventually(lambda: bool(bench.log))
    assert bench.log == [("1", b'{"seq":11}')]
    assert begun[5] - begun[0] >= 0.01 + 0.02 + 0.04 + 0.04 + 0.04 - 5 * RESOLUTION_S
    assert [line for line in logged.messages if line.startswith("JetStream") and "not store" in line] == [
        "JetStream does not store: ValueError, when asked what is stored already; 1 publishes wait",
        "JetStream still does not store: NoResponders, when asked what is stored already",
    ]
    assert [record.message for record in caplog.records if "stores again" in record.message] == [
        "JetStream stores again to $MQTT_msgs; 0 publishes are sent again"
    ]


async def test_an_election_holds_up_what_is_new() -> None:
    """The former leader may have lost what is not acknowledged: that is stored before what follows."""
    bench = Bench()
    bench.put("message 1")
    bench.put("message 2")
    bench.put("held", subject=HELD)
    bench.sent()
    bench.store.elected("$MQTT_msgs")
    bench.put("message 3")
    bench.put("held later", subject=HELD)
    assert bench.sent() == ["held later"]
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["message 1"]
    bench.answer("message 2")
    assert bench.store.outages == ["$MQTT_msgs"], "an answer of the former leader to something later"
    bench.answer("message 1")
    assert not bench.stalled
    assert bench.sent() == ["message 3"]


async def test_an_election_holds_up_what_is_not_written_yet() -> None:
    """Client and nats-server were read in one turn of the event loop: the message would overtake a dropped one."""
    bench = Bench()
    bench.put("dropped")
    bench.sent()
    bench.put("later")
    bench.put("held", subject=HELD)
    bench.store.elected("$MQTT_msgs")
    assert bench.sent() == ["held"]
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["dropped"]
    bench.answer("dropped")
    assert bench.sent() == ["later"]


async def test_an_election_is_probed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that is a moment too early."""
    monkeypatch.setattr(outage, "PROBE_FIRST", 60.0)
    monkeypatch.setattr(outage, "PROBE_REFUSED", 60.0)
    bench = Bench()
    bench.put("message")
    bench.sent()
    bench.answer("message", b"", NO_RESPONDERS)
    bench.store.elected("$MQTT_out")
    await asyncio.sleep(0.05)
    assert bench.sent() == []
    bench.store.elected("$MQTT_msgs")
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["message"]
    bench.answer("message", b"", NO_RESPONDERS)
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["message"]
    bench.answer("message")
    assert not bench.stalled


async def test_an_election_that_concerns_nothing() -> None:
    """Nothing waits for the leader, but an acknowledgement for its consumer's; or there is no connection."""
    bench = Bench()
    bench.acknowledge("acknowledgement")
    bench.store.elected("$MQTT_msgs")
    assert not bench.stalled
    bench.put("message")
    bench.link.online = False
    bench.store.offline()
    bench.store.elected("$MQTT_msgs")
    assert bench.store.outages == []
