# SPDX-License-Identifier: Apache-2.0
"""Packets of one connection as events of a trace: kinds, fields and response times, and no contents."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mqtt_nats.client.client import Client
from mqtt_nats.codec import (
    Ack,
    AckRun,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    Properties,
    Publish,
    PublishRun,
    ReasonCode,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    encode,
)
from mqtt_nats.codec.wire import PacketKind
from mqtt_nats.control import packet_watch
from mqtt_nats.control.packet_watch import Watch, WatchedSend
from mqtt_nats.hooks.registry import Hooks
from mqtt_nats.pubsub.data_path import ClientMemory
from mqtt_nats.sessions.services import Services
from tests.harness.doubles import stands_for


@stands_for(Services)
class FakeServices:
    """Stands for `Services`: hooks, which are not asked."""

    def __init__(self) -> None:
        self.hooks = Hooks(lambda work, name: work.close())


@stands_for(ClientMemory)
class FakeMemory:
    """Stands for `ClientMemory`: topic aliases from before the trace."""

    def __init__(self) -> None:
        self.aliases: dict[int, bytes] | None = None


@stands_for(Client)
class FakeClient:
    """Stands for `Client`: a connected client without a durable session."""

    def __init__(self, version: int) -> None:
        self.services = FakeServices()
        self.memory = FakeMemory()
        self.version = version
        self.client_id, self.user, self.durable_side, self.outgoing = "lamp", None, None, None


def watch(version: int = 5) -> tuple[Watch, FakeClient]:
    fake = FakeClient(version)
    return Watch(cast("Client", fake)), fake


def message(topic: str, qos: int = 0, packet_id: int = 0, **properties: Any) -> Publish:
    key = len(topic).to_bytes(2) + topic.encode()
    return Publish(qos, False, False, key, packet_id, b"secret", cast("Properties", properties) or None)


def wire(version: int, *packets: Packet) -> bytes:
    return b"".join(encode(one, version) for one in packets)


# -- from the client --------------------------------------------------------------------------------------


def test_each_packet_of_a_client_has_an_event() -> None:
    seen, _ = watch()
    run = b"0\x0a\0\x03a/bsecre"
    packets: list[Packet] = [
        Connect(5, "lamp", True, 60, "ann", b"secret"),
        Auth(ReasonCode.CONTINUE_AUTHENTICATION),
        PublishRun(b"\0\x03a/b", run * 2, 2, len(run), 7),
        message("c", 1, 7),
        Subscribe(8, (Subscription("d/#", 1), Subscription("e", 2))),
        Unsubscribe(9, ("d/#",)),
        PingReq(),
        Disconnect(ReasonCode.DISCONNECT_WITH_WILL),
    ]
    found = seen.received(packets, 0.0)
    assert found == [
        {"packet": "CONNECT"},
        {"packet": "AUTH", "reason": "continue authentication (0x18)"},
        {"packet": "PUBLISH", "topic": "a/b", "qos": 0, "bytes": 5},
        {"packet": "PUBLISH", "topic": "a/b", "qos": 0, "bytes": 5},
        {"packet": "PUBLISH", "topic": "c", "qos": 1, "bytes": 6, "id": 7},
        {"packet": "SUBSCRIBE", "id": 8, "filters": ["d/# at QoS 1", "e at QoS 2"]},
        {"packet": "UNSUBSCRIBE", "id": 9, "filters": ["d/#"]},
        {"packet": "PINGREQ"},
        {"packet": "DISCONNECT", "reason": "disconnect with will (0x04)"},
    ]
    assert "secret" not in str(found)


def test_a_topic_alias_is_shown_as_its_topic() -> None:
    seen, fake = watch()
    fake.memory.aliases = {1: b"\0\x05known", 2: b"\0\x03old"}
    packets: list[Packet] = [
        message("", topic_alias=1),
        message("new", topic_alias=2),
        message("", topic_alias=2),
        message("", topic_alias=3),
    ]
    assert [one["topic"] for one in seen.received(packets, 0.0)] == ["known", "new", "new", ""]


# -- to the client ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [4, 5])
def test_each_packet_to_a_client_has_an_event(version: int) -> None:
    seen, _ = watch(version)
    sent: list[Packet] = [
        Connack(True, 0),
        message("a/b", 2, 300),
        Suback(8, (1, 0x80)),
        Unsuback(9, (0,) if version == 5 else ()),
        PingResp(),
    ]
    found = seen.sent(wire(version, *sent), 0.0)
    assert found == [
        {"packet": "CONNACK"},
        {"packet": "PUBLISH", "topic": "a/b", "qos": 2, "bytes": 6, "id": 300},
        {"packet": "SUBACK", "id": 8, "codes": [1, 0x80]},
        {"packet": "UNSUBACK", "id": 9},
        {"packet": "PINGRESP"},
    ]
    assert "secret" not in str(found)


def test_codes_of_suback_come_after_its_properties() -> None:
    seen, _ = watch()
    (found,) = seen.sent(wire(5, Suback(8, (2, 0x87), {"reason_string": "x" * 200})), 0.0)
    assert found["codes"] == [2, 0x87]


@pytest.mark.parametrize(
    ("reason", "text"),
    [(ReasonCode.NORMAL_DISCONNECTION, "success (0x00)"), (ReasonCode.SERVER_BUSY, "server busy (0x89)")],
)
def test_the_reason_of_disconnect(reason: ReasonCode, text: str) -> None:
    seen, _ = watch()
    assert seen.sent(wire(5, Disconnect(reason)), 0.0) == [{"packet": "DISCONNECT", "reason": text}]


# -- times ------------------------------------------------------------------------------------------------


def test_qos_2_of_a_client_has_a_response_time_for_each_answer() -> None:
    """PUBREC answers PUBLISH, PUBREL answers PUBREC, PUBCOMP answers PUBREL, in turn from both ends."""
    seen, _ = watch()
    seen.received([message("a", 2, 7)], 1.0)
    (rec,) = seen.sent(wire(5, AckRun(PacketKind.PUBREC, [7])), 1.010)
    (rel,) = seen.received([AckRun(PacketKind.PUBREL, [7])], 1.030)
    (comp,) = seen.sent(wire(5, AckRun(PacketKind.PUBCOMP, [7])), 1.060)
    assert [(one["packet"], one["answers"], one["ms"]) for one in (rec, rel, comp)] == [
        ("PUBREC", "PUBLISH", 10.0),
        ("PUBREL", "PUBREC", 20.0),
        ("PUBCOMP", "PUBREL", 30.0),
    ]


def test_a_message_of_each_end_under_the_same_identifier_has_its_own_time() -> None:
    seen, _ = watch()
    seen.received([message("a", 1, 7)], 1.0)
    seen.sent(wire(5, message("b", 1, 7)), 2.0)
    (by_client,) = seen.received([AckRun(PacketKind.PUBACK, [7])], 2.5)
    (by_gateway,) = seen.sent(wire(5, AckRun(PacketKind.PUBACK, [7])), 3.0)
    assert (by_client["ms"], by_gateway["ms"]) == (500.0, 2000.0)


def test_a_repeated_packet_counts_from_the_first_one() -> None:
    seen, _ = watch()
    seen.received([message("a", 1, 7)], 1.0)
    seen.received([message("a", 1, 7)], 5.0)
    (answer,) = seen.sent(wire(5, AckRun(PacketKind.PUBACK, [7])), 6.0)
    assert answer["ms"] == 5000.0


def test_an_answer_to_a_packet_from_before_the_trace_has_no_time() -> None:
    seen, _ = watch()
    (found,) = seen.sent(wire(5, AckRun(PacketKind.PUBACK, [7])), 1.0)
    assert found == {"packet": "PUBACK", "id": 7}


def test_a_refused_qos_2_publish_has_no_further_answer() -> None:
    seen, _ = watch()
    seen.received([message("a", 2, 7)], 1.0)
    (rec,) = seen.sent(wire(5, Ack(PacketKind.PUBREC, 7, ReasonCode.NOT_AUTHORIZED)), 2.0)
    assert rec["reason"] == "not authorized (0x87)"
    (rel,) = seen.received([AckRun(PacketKind.PUBREL, [7])], 3.0)
    assert "ms" not in rel


def test_pings_and_subscriptions_are_timed_too() -> None:
    seen, _ = watch(4)
    seen.received([PingReq(), Subscribe(8, (Subscription("a", 0),)), Unsubscribe(9, ("a",))], 1.0)
    found = seen.sent(wire(4, PingResp(), Suback(8, (0,)), Unsuback(9)), 1.5)
    assert [(one["answers"], one["ms"]) for one in found] == [
        ("PINGREQ", 500.0),
        ("SUBSCRIBE", 500.0),
        ("UNSUBSCRIBE", 500.0),
    ]


def test_times_of_packets_without_an_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packet_watch, "UNANSWERED_MOST", 2)
    seen, _ = watch()
    seen.received([message("a", 1, number) for number in (1, 2, 3)], 1.0)
    found = seen.sent(wire(5, *(AckRun(PacketKind.PUBACK, [number]) for number in (1, 2, 3))), 2.0)
    assert ["ms" in one for one in found] == [True, True, False]


def test_bytes_are_sent_before_they_are_watched() -> None:
    order: list[tuple[str, bytes]] = []

    def see(data: bytes) -> None:
        order.append(("seen", data))

    send = WatchedSend(lambda data: order.append(("sent", bytes(data))), see)
    send(bytearray(b"abc"))
    assert order == [("sent", b"abc"), ("seen", b"abc")]
    assert send.is_of(see)
    assert not send.is_of(lambda data: None)
