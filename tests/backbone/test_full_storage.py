# SPDX-License-Identifier: Apache-2.0
"""JetStream's storage is full: what cannot be refused waits, and nothing else does; backbone.md#full-storage."""

from __future__ import annotations

from typing import cast

import pytest

from mqtt_nats.backbone import pending_stores
from mqtt_nats.backbone import stream_outage as outage
from mqtt_nats.backbone.pending_stores import ANYBODY, FULL_MOST, REASONS, Refusals, reason_of
from mqtt_streams.api import ApiError
from tests.backbone.bench import NO_RESPONDERS, Bench
from tests.harness.waiting import aeventually

FULL = b'{"error":{"code":503,"err_code":10023,"description":"insufficient resources"}}'
STREAM_FULL = b'{"error":{"code":503,"err_code":10077,"description":"maximum bytes exceeded"}}'
DELETE = b"$JS.API.STREAM.MSG.DELETE.$MQTT_msgs"
HELD = b"$MQTT.qos2.in.token.1"
RETAINED = b"$MQTT.rmsgs.s"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes follow each other without a pause."""
    monkeypatch.setattr(outage, "PROBE_FIRST", 0.001)
    monkeypatch.setattr(outage, "PROBE_REFUSED", 0.001)
    monkeypatch.setattr(outage, "PROBE_MOST", 60.0)


async def test_what_waits_is_stored_in_order_when_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    """One store at a time is tried; removals and acknowledgements go on, which may make the room."""
    caplog.set_level("INFO", "mqtt_nats.nats")
    bench = Bench()
    bench.put("one", waits=True, by="a")
    bench.put("two", waits=True, by="a")
    bench.sent()
    bench.answer("one", FULL)
    bench.answer("two", FULL)
    assert bench.store.full == "JetStream storage is full: insufficient resources (JetStream error 10023)"
    assert (bench.log, bench.store.outages) == ([], ["$MQTT_msgs"])
    bench.put("three", waits=True, by="a")
    bench.put("retained", subject=RETAINED, waits=True, by="a")
    bench.acknowledge("removal", DELETE)
    bench.acknowledge("acknowledgement")
    assert bench.sent() == ["removal", "acknowledgement"]
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["one"]
    bench.answer("one", FULL)
    bench.answer("removal")
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["retained"], "topics take turns"
    bench.answer("retained", FULL)
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["one"]
    bench.answer("one")
    assert bench.sent() == ["two", "three", "retained"]
    assert not bench.stalled
    assert bench.store.full == ""
    assert bench.store.refusals.counts == {**dict.fromkeys(REASONS, 0), "storage_full": 4}
    assert caplog.text.count("JetStream does not store: JetStream storage is full") == 1
    assert all(getattr(one, "once", "") for one in caplog.records), "also where there is room again and again"


async def test_what_a_later_message_of_its_publisher_has_overtaken_is_refused() -> None:
    """[MQTT-4.6.0-5] (3.1.1): it waits for room, and a smaller one of the same publisher and topic found some."""
    bench = Bench()
    for name, by in (("large", "a"), ("other's", "b"), ("larger", "a"), ("small", "a"), ("later", "a")):
        bench.put(name, waits=True, by=by)
    bench.put("elsewhere", subject=b"$MQTT.msgs.s2", waits=True, by="a")
    for name in ("large", "other's", "larger"):
        bench.answer(name, FULL)
    bench.answer("small")
    assert cast(tuple[str, bytes], bench.log[0])[0] == "small"
    assert bench.log[1:] == [("large", 10023), ("larger", 10023)]
    bench.answer("later", FULL)
    bench.answer("elsewhere")
    assert len(bench.log) == 4, "a message that waits has nobody behind it that came before it"
    bench.sent()
    await aeventually(lambda: bool(bench.link.out))
    bench.answer("other's")
    assert bench.sent()[-1:] == ["later"]
    bench.answer("later")
    assert [cast(tuple[str, bytes], one)[0] for one in bench.log[4:]] == ["other's", "later"]
    assert not bench.stalled


async def test_a_newer_message_of_anybody_overtakes_a_retained_one() -> None:
    """[MQTT-3.3.1-5] (3.1.1, 5.0): a will that has waited for room would replace it."""
    bench = Bench()
    bench.put("will", subject=RETAINED, waits=True, by=ANYBODY)
    bench.put("elsewhere", subject=RETAINED + b"2", waits=True, by=ANYBODY)
    bench.put("newer", subject=RETAINED, by=ANYBODY)
    bench.answer("will", FULL)
    bench.answer("elsewhere", FULL)
    bench.answer("newer")
    assert bench.log == [("newer", b'{"seq":1}'), ("will", 10023)]


async def test_a_newer_message_overtakes_a_retained_one_that_was_not_sent() -> None:
    """[MQTT-3.3.1-5] (3.1.1, 5.0): it came while another store waited for room, so it waits behind that."""
    bench = Bench()
    bench.put("large", subject=b"$MQTT.msgs.other", waits=True, by="a")
    bench.answer("large", FULL)
    bench.put("will", subject=RETAINED, waits=True, by=ANYBODY)
    bench.put("newer", subject=RETAINED, by=ANYBODY)
    assert bench.sent() == ["large", "newer"]
    bench.answer("newer")
    assert bench.log == [("newer", b'{"seq":1}'), ("will", 10023)]


async def test_a_store_that_has_found_room_hides_no_other_one_that_waits() -> None:
    """[MQTT-3.3.1-5] (3.1.1, 5.0): of two that wait on a topic the first is stored, then a newer message than both."""
    bench = Bench()
    for name in ("first", "second"):
        bench.put(name, subject=RETAINED, waits=True, by=ANYBODY)
        bench.answer(name, FULL)
    bench.put("newer", subject=RETAINED, by=ANYBODY)
    bench.sent()
    await aeventually(lambda: bool(bench.link.out))
    bench.answer("first")
    bench.answer("newer")
    assert bench.log == [("first", b'{"seq":1}'), ("newer", b'{"seq":1}'), ("second", 10023)]


@pytest.mark.parametrize("advisory", [True, False])
async def test_a_leader_that_goes_while_there_is_no_room(advisory: bool) -> None:
    """[MQTT-4.6.0-5] (5.0): it may have dropped a message that needs no room, and no later one overtakes that."""
    bench = Bench()
    bench.put("waits", waits=True)
    bench.answer("waits", FULL)
    bench.put("first", by="a")
    assert bench.sent() == ["waits", "first"]
    bench.put("second", by="a")
    if advisory:
        bench.store.elected("$MQTT_msgs")
    else:
        bench.answer("first", b"", NO_RESPONDERS)
    bench.put("third", by="a")
    assert bench.sent() == []
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["waits"]
    bench.answer("waits", FULL)
    assert bench.sent() == ["first", "second", "third"]


async def test_what_was_refused_and_has_ended_is_forgotten() -> None:
    bench = Bench()
    bench.put("large", waits=True, by="a")
    bench.answer("large", FULL)
    bench.store.denied(b"$MQTT.msgs.s")
    bench.put("small", waits=True, by="a")
    bench.store.tick(1.0)
    (waiting,) = bench.store.overtaking.waiting.values()
    assert list(waiting.values()) == [bench.op("small")]
    bench.store.denied(b"$MQTT.msgs.s")
    bench.store.tick(2.0)
    assert not bench.store.overtaking.waiting


async def test_what_can_be_refused_is_refused_at_once() -> None:
    """Also while other stores wait: its client hears of it, and may do something about it."""
    bench = Bench()
    bench.put("5.0")
    bench.answer("5.0", FULL)
    assert bench.log == [("5.0", 10023)]
    assert not bench.stalled
    bench.put("3.1.1", waits=True)
    bench.answer("3.1.1", FULL)
    bench.sent()
    bench.put("5.0 again")
    assert bench.sent() == ["5.0 again"]
    bench.answer("5.0 again", FULL)
    assert bench.log == [("5.0", 10023), ("5.0 again", 10023)]
    assert bench.store.refusals.counts["storage_full"] == 3


async def test_what_can_be_refused_is_sent_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what waited for the answer that says that there is no room, and what the same turn had collected."""
    now = [100.0]
    monkeypatch.setattr(pending_stores, "monotonic", lambda: now[0])
    bench = Bench()
    bench.store.trust(60.0, 3)
    bench.put("3.1.1", waits=True)
    bench.sent()
    bench.acknowledge("acknowledgement")
    now[0] += 0.06
    bench.put("5.0")
    bench.answer("3.1.1", FULL)
    assert bench.sent() == ["acknowledgement"]
    now[0] += 1.0
    bench.store.tick(1.0)
    assert bench.sent() == ["5.0"]
    bench.answer("5.0", FULL)
    assert bench.log == [("5.0", 10023)]


async def test_publishers_that_are_not_read_from_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many stores wait that QoS 0 is not read either."""
    monkeypatch.setattr(pending_stores, "MAX_PENDING", 3)
    bench = Bench()
    bench.store.tick(1000.0)
    bench.put("held", subject=HELD, waits=True)
    for name in ("one", "two"):
        bench.put(name, waits=True, by="a")
    bench.answer("held", FULL)
    bench.answer("one", FULL)
    bench.put("three", waits=True, by="a")
    bench.sent()
    bench.store.tick(1000.0 + FULL_MOST - 1)
    await aeventually(lambda: len(bench.link.out) == 2)
    assert sorted(bench.sent()) == ["held", "one"]
    bench.answer("held", FULL)
    bench.answer("one", FULL)
    assert bench.log == []
    bench.store.tick(1000.0 + FULL_MOST)
    await aeventually(lambda: len(bench.link.out) == 2)
    bench.sent()
    bench.answer("one", FULL)
    assert sorted(map(str, bench.log)) == [f"({name!r}, 10023)" for name in ("held", "one", "three", "two")]
    assert not bench.stalled
    assert not bench.store.pressed
    assert bench.store.full == "", "no store waits for room"


@pytest.mark.parametrize("many", [False, True])
async def test_what_is_not_refused_waits_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    """Its client stays; unless so many stores wait that publishers are not read from."""
    monkeypatch.setattr(pending_stores, "MAX_PENDING", 1 if many else 100)
    bench = Bench()
    bench.store.tick(1000.0)
    bench.put("will", waits=True, by="a")
    bench.put("publish", waits=True, by="a")
    bench.answer("will", FULL)
    bench.sent()
    for number in range(1, 4):
        bench.store.tick(1000.0 + number * FULL_MOST)
        await aeventually(lambda: bool(bench.link.out))
        bench.sent()
        bench.answer("will", FULL)
        if many:
            assert bench.log == [("will", 10023), ("publish", 10023)]
            return
        assert bench.log == []
        assert bench.store.full
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["will"]
    bench.answer("will")
    assert bench.sent() == ["publish"]
    bench.answer("publish")
    assert bench.log == [("will", b'{"seq":1}'), ("publish", b'{"seq":1}')]
    assert bench.store.full == ""


async def test_a_store_that_is_too_large_does_not_keep_others_waiting() -> None:
    """Publishers take turns, each with its oldest store: a later one of the same publisher and topic stays behind."""
    bench = Bench()
    for name, by in (("large", "a"), ("behind it", "a"), ("other's", "b"), ("retained", "c")):
        bench.put(name, subject=RETAINED if name == "retained" else b"$MQTT.msgs.s", waits=True, by=by)
    bench.sent()
    bench.answer("large", STREAM_FULL)
    assert bench.store.lacking_room(b"$MQTT_msgs") is not None
    tried = []
    for _ in range(4):
        await aeventually(lambda: bool(bench.link.out))
        tried += bench.sent()
        bench.answer(tried[-1], STREAM_FULL)
    assert tried == ["large", "other's", "retained", "large"]
    assert bench.log == []
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["other's"]
    bench.answer("other's")
    assert [cast(tuple[str, bytes], one)[0] for one in bench.log] == ["other's"]
    assert bench.sent() == ["large", "behind it", "retained"], "whatever has waited is tried"
    assert bench.store.lacking_room(b"$MQTT_msgs") is None


async def test_in_a_cluster_the_leader_without_room_steps_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room and without a leader in turns: it is full all the time, and waiting ends as well where it has to."""
    monkeypatch.setattr(pending_stores, "MAX_PENDING", 0)
    bench = Bench()
    bench.store.tick(1000.0)
    bench.put("one", waits=True)
    bench.answer("one", FULL)
    bench.store.tick(1000.0 + FULL_MOST / 2)
    await aeventually(lambda: bool(bench.link.out))
    bench.sent()
    bench.answer("one", b"", NO_RESPONDERS)
    assert bench.store.full.startswith("JetStream storage is full: ")
    bench.acknowledge("removal", DELETE)
    assert bench.sent() == [], "which has no leader either"
    await aeventually(lambda: bool(bench.link.out))
    bench.sent()
    bench.answer("one", FULL)
    assert bench.sent() == ["removal"]
    bench.store.tick(1000.0 + FULL_MOST)
    await aeventually(lambda: bool(bench.link.out))
    bench.sent()
    bench.answer("one", b"", NO_RESPONDERS)
    assert bench.log == [("one", 10023)]


def test_how_long_stores_wait() -> None:
    """From the first refusal, until one is stored; and as long again after that."""
    error = ApiError(503, 10023, "insufficient resources")
    refusals = Refusals()
    assert refusals.full == ""
    refusals.no_room(error, 100.0)
    refusals.no_room(error, 129.0)
    assert refusals.full == f"JetStream storage is full: {error}"
    assert refusals.exhausted(100.0 + FULL_MOST - 1) is None
    assert refusals.exhausted(100.0 + FULL_MOST) is error
    assert refusals.exhausted(100.0 + FULL_MOST) is None
    assert refusals.exhausted(100.0 + 2 * FULL_MOST) is error
    refusals.room()
    assert refusals.full == ""
    assert refusals.exhausted(100.0 + 9 * FULL_MOST) is None
    assert refusals.counts["storage_full"] == 2


async def test_nobody_waits_any_more() -> None:
    """The connection was lost, or a leader has no store to try: nothing says that it is full."""
    bench = Bench()
    bench.put("one", waits=True)
    bench.answer("one", FULL)
    assert bench.store.full
    bench.store.offline()
    assert bench.store.full == ""


async def test_a_new_leader_has_no_room() -> None:
    """What has waited for a leader, and needs no room, does not wait any longer."""
    bench = Bench()
    bench.put("one", waits=True)
    bench.answer("one", b"", NO_RESPONDERS)
    bench.acknowledge("removal", DELETE)
    bench.sent()
    await aeventually(lambda: bool(bench.link.out))
    assert bench.sent() == ["one"]
    bench.answer("one", FULL)
    assert bench.sent() == ["removal"]
    bench.answer("one", b"", NO_RESPONDERS)
    bench.acknowledge("removal later", DELETE)
    assert bench.sent() == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ApiError(503, 10023, "insufficient resources"), "storage_full"),
        (ApiError(400, 10002, "resource limits exceeded for account"), "storage_full"),
        (ApiError(503, 10047, "insufficient storage resources available"), "storage_full"),
        (ApiError(503, 10077, "maximum bytes exceeded"), "stream_limit"),
        (ApiError(503, 10077, "maximum messages per subject exceeded"), ""),
        (ApiError(400, 10071, "wrong last sequence: 5"), ""),
        (ApiError(400, 10054, "message size exceeds maximum allowed"), "too_large"),
        (ApiError(413, 0, "larger than what the nats-server takes now"), "too_large"),
        (ApiError(403, 0, "NATS permissions do not allow publishing"), "not_permitted"),
        (ApiError(500, 10999, "something new"), "other"),
    ],
)
def test_the_reason(error: ApiError, reason: str) -> None:
    assert reason_of(error) == reason
    assert not reason or reason in REASONS


async def test_requests_are_not_counted() -> None:
    """A removal that finds nothing is no store."""
    bench = Bench()
    bench.acknowledge("removal", DELETE)
    bench.answer("removal", b'{"error":{"code":404,"err_code":10037,"description":"no message found"}}')
    bench.put("message")
    bench.answer("message", b'{"error":{"code":400,"err_code":10999,"description":"something new"}}')
    assert bench.log == [("removal", 10037), ("message", 10999)]
    assert bench.store.refusals.counts == {**dict.fromkeys(REASONS, 0), "other": 1}
