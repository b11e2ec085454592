# SPDX-License-Identifier: Apache-2.0
"""The packets of one client that wait."""

from __future__ import annotations

from mqtt_nats.codec import Ack, AckRun, Disconnect, Packet, PingReq, ProtocolError, Publish, Subscribe, Subscription
from mqtt_nats.transport.connection import Hold
from mqtt_nats.transport.packet_order import WAITING_BYTES_MOST, PacketOrder, passes


class Holding:
    """A connection of which only the reasons not to read matter."""

    def __init__(self) -> None:
        self.holds = 0

    def hold(self, why: int) -> None:
        self.holds |= why

    def release(self, why: int) -> None:
        self.holds &= ~why


def order() -> tuple[PacketOrder, Holding]:
    connection = Holding()
    return PacketOrder(connection), connection


def publish(size: int) -> Publish:
    return Publish(0, False, False, b"\0\1a", 0, bytes(size))


def test_what_waits_is_bounded() -> None:
    """Nothing more is read, until all of it may go."""
    waiting, connection = order()
    packets: list[Packet] = []
    while not connection.holds:
        packets.append(publish(1000))
        waiting.add(packets[-1:])
    assert connection.holds == Hold.ORDER
    assert len(packets) <= WAITING_BYTES_MOST // 1000
    waiting.add([publish(1)])
    assert waiting.take_packets() == [*packets, publish(1)]
    assert not connection.holds


def test_many_small_packets_are_bounded_too() -> None:
    waiting, connection = order()
    for _ in range(WAITING_BYTES_MOST // 200):
        waiting.add([Disconnect()])
    assert connection.holds == Hold.ORDER


def test_only_what_depends_on_nothing_passes() -> None:
    assert all(passes(one) for one in (PingReq(), Ack(4, 1, 0), Ack(5, 1, 0), Ack(7, 1, 0), AckRun(4, [1, 2])))
    waits = (Ack(6, 1, 0), AckRun(6, [1]), publish(1), Disconnect(), Subscribe(1, (Subscription("a", 0),)))
    assert not any(passes(one) for one in waits)


def test_pings_can_be_taken_out() -> None:
    waiting, _ = order()
    waiting.add([publish(1), PingReq(), Disconnect(), PingReq()])
    assert waiting.pings() == [PingReq(), PingReq()]
    assert waiting.pings() == []
    assert waiting.take_packets() == [publish(1), Disconnect()]


def test_requests() -> None:
    """Each counts once, however often it is said to have taken effect; one that is put off goes on counting."""
    waiting, _ = order()
    waiting.request()
    waiting.request()
    waiting.obey()
    waiting.put_off()
    waiting.took_effect()
    assert waiting.requested
    for _ in range(2):
        assert waiting.requested
        waiting.obey()
        waiting.took_effect()
        waiting.took_effect()
    assert not waiting.requested


def test_nothing_is_handled_behind_a_violation() -> None:
    waiting, _ = order()
    error = ProtocolError("wrong")
    waiting.add([publish(1)])
    waiting.fail(error)
    waiting.fail(ProtocolError("later"))
    waiting.add([Disconnect()])
    assert waiting.error is error
    assert waiting.take_packets() == [publish(1)]
    assert not waiting.gone
