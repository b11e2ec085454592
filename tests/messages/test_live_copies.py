# SPDX-License-Identifier: Apache-2.0
"""Live copies that may have been lost with the connection are sent again, before anything else, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.messages import live_copies as module
from mqtt_nats.messages.live_copies import LiveCopies
from tests.backbone.bench import Bench, Note
from tests.harness.doubles import Timers, stands_for


@stands_for(NatsConnection)
class FakeLink:
    """Stands for `NatsConnection`: its wire comes and goes when a test says so."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.fake_changed: Callable[[bool], None] = lambda up: None

    def kick(self) -> None:
        """Nothing is sent."""

    def call_on_wire(self, changed: Callable[[bool], None]) -> None:
        self.fake_changed = changed


class Scene:
    """A gateway's stores, and its connection."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timers = Timers(monkeypatch)
        self.timers.pass_to(1000.0)
        self.link = FakeLink()
        self.store = Bench().store
        self.copies = LiveCopies(cast(NatsConnection, self.link), self.store, self.drop)
        self.log: list[object] = []
        self.dropped: list[tuple[str, int]] = []

    def drop(self, reason: str, count: int) -> None:
        self.dropped.append((reason, count))

    def publish(self, name: str, qos: int = 1, subject: bytes = b"$MQTT.msgs.a.b") -> None:
        """Begin a store, as a publish does after its live copy."""
        line = b"Nmqtt-Pub:%d\r\n" % qos if qos else b""
        headers = b"NATS/1.0\r\n%bNmqtt-Id:%b\r\n\r\n" % (line, name.encode())
        self.store.put(b"HPUB %b " % subject, headers, name.encode(), Note(self.log, name))

    def stored(self, name: str) -> None:
        """JetStream acknowledges a store."""
        for token, op in list(self.store.pending.items()):
            if op.frame.endswith(b"\r\n%b\r\n" % name.encode()):
                self.store._arrived(self.store.prefix + token, b"", b"", b'{"stream":"$MQTT_msgs", "seq":1}')

    def passes(self, seconds: float) -> None:
        """Let time pass; every second is noted."""
        for _ in range(int(seconds)):
            self.timers.pass_to(self.timers.now + 1)
            self.copies.tick(self.timers.now)
        self.timers.pass_to(self.timers.now + seconds % 1)

    def lose(self) -> None:
        self.link.fake_changed(False)

    def connect(self) -> list[str]:
        """Names of the messages whose live copies are sent again."""
        self.link.fake_changed(True)
        frames, self.link.out[:] = list(self.link.out), []
        return [frame.split(b"\r\n")[-2].decode() for frame in frames]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_what_a_live_copy_looks_like(scene: Scene) -> None:
    scene.publish("one")
    scene.lose()
    scene.link.fake_changed(True)
    headers = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:one\r\n\r\n"
    sizes = len(headers), len(headers) + 3
    assert scene.link.out == [b"HPUB $MQTT.again.a.b %d %d\r\n%bone\r\n" % (*sizes, headers)]
    assert scene.copies.sent == 1


def test_nothing_is_sent_on_the_first_connection_or_when_all_is_stored(scene: Scene) -> None:
    scene.publish("one")
    assert scene.connect() == []
    scene.lose()
    scene.stored("one")
    assert scene.connect() == []


def test_messages_that_were_under_way_and_those_of_the_gap_go_in_order(scene: Scene) -> None:
    scene.publish("one")
    scene.publish("two", 2)
    scene.lose()
    scene.lose()  # it is noticed twice
    scene.passes(5)
    scene.publish("three")
    scene.publish("four", 2)
    assert scene.connect() == ["one", "two", "three", "four"]


def test_many_large_ones_go_a_few_at_a_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-server has to hold them for each gateway. What is left when the connection is lost goes on the next one."""
    monkeypatch.setattr(module, "SLICE_BYTES", 100)
    scene.lose()
    for number in range(6):
        scene.publish(f"m{number}")
    assert scene.connect() == ["m0", "m1"]
    scene.timers.pass_to(scene.timers.now + module.SLICE_PAUSE)
    assert [frame.split(b"\r\n")[-2] for frame in scene.link.out] == [b"m2", b"m3"]
    scene.link.out.clear()
    scene.lose()
    scene.timers.pass_to(scene.timers.now + module.SLICE_PAUSE)
    assert scene.link.out == []
    assert scene.connect() == ["m0", "m1"]


def test_other_stores_have_no_live_copies(scene: Scene) -> None:
    """Retained copies, held publishes, and marks in the stream."""
    scene.publish("retained", subject=b"$MQTT.rmsgs.a")
    scene.publish("mark", 0)
    scene.lose()
    assert scene.connect() == []


def test_a_live_copy_that_has_arrived_long_ago_is_not_sent_again(scene: Scene) -> None:
    """Its store waits, as without a leader: gateways may have forgotten its id."""
    scene.publish("old")
    scene.passes(module.COPY_ARRIVED_S + 1)
    scene.publish("new")
    scene.lose()
    assert scene.connect() == ["new"]


def test_a_live_copy_that_was_sent_again_may_be_lost_again(scene: Scene) -> None:
    scene.lose()
    scene.publish("one")
    assert scene.connect() == ["one"]
    scene.passes(module.COPY_ARRIVED_S - 2)
    scene.lose()
    assert scene.connect() == ["one"]
    scene.passes(module.COPY_ARRIVED_S + 2)
    scene.lose()
    assert scene.connect() == []
    scene.stored("one")
    scene.passes(1)
    assert scene.copies._again == {}


@pytest.mark.parametrize("gap", [module.IDS_REMEMBERED_S - 3, module.IDS_REMEMBERED_S + 3])
def test_at_qos_2_nothing_is_sent_that_gateways_may_have_had_and_forgotten(scene: Scene, gap: float) -> None:
    """Whatever was published in the gap itself, nobody has had. At QoS 1 a message may come twice, and is not lost."""
    scene.passes(1)
    scene.publish("one")
    scene.publish("two", 2)
    scene.passes(1)
    scene.lose()
    scene.passes(gap)
    scene.publish("three", 2)
    forgotten = gap > module.IDS_REMEMBERED_S
    assert scene.connect() == (["one", "three"] if forgotten else ["one", "two", "three"])
    assert scene.dropped == ([("gap", 1)] if forgotten else [])
