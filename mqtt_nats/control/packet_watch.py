# SPDX-License-Identifier: Apache-2.0
"""Packets of one connection as events of a trace: kinds and fields of packets, and response times.

No event contains a payload, a password or a property.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.client.message_hooks import message_id
from mqtt_nats.codec import (
    Ack,
    AckRun,
    Auth,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    Publish,
    PublishRun,
    ReasonCode,
    Subscribe,
    Unsubscribe,
)
from mqtt_nats.codec.wire import PacketKind
from mqtt_nats.messages.delivery_hooks import DeliveryHooks, extent

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client

ANSWERED: Final = {
    PacketKind.PUBACK: PacketKind.PUBLISH,
    PacketKind.PUBREC: PacketKind.PUBLISH,
    PacketKind.PUBREL: PacketKind.PUBREC,
    PacketKind.PUBCOMP: PacketKind.PUBREL,
    PacketKind.SUBACK: PacketKind.SUBSCRIBE,
    PacketKind.UNSUBACK: PacketKind.UNSUBSCRIBE,
    PacketKind.PINGRESP: PacketKind.PINGREQ,
}
"""Packet kind by the kind that answers it: answer -> answered packet."""

WAITED: Final = frozenset(ANSWERED.values())
"""Packet kinds that have an answer."""

UNANSWERED_MOST: Final = 70_000
"""Most packets without an answer whose times are stored; more than there are packet identifiers."""

Event = dict[str, Any]


class Watch:
    """Watch of one connection. Times are seconds of the caller's clock."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._reader = DeliveryHooks(
            client, client.services.hooks, lambda data: None, False, partial(message_id, client)
        )
        self._begun: dict[tuple[bool, int, int], float] = {}
        """Time of each unanswered packet, by direction (True: sent to the client), kind and packet identifier."""
        self._aliases: dict[int, str] = {}

    def received(self, packets: Sequence[Packet], now: float) -> list[Event]:
        """Return the events of packets from the client."""
        found: list[Event] = []
        for packet in packets:
            match packet:
                case PublishRun():
                    topic = packet.key[2:].decode(errors="replace")
                    size = packet.step - packet.head
                    found += [_publish(topic, 0, False, False, 0, size) for _ in range(packet.count)]
                case Publish():
                    found.append(
                        _publish(
                            self._topic(packet),
                            packet.qos,
                            packet.retain,
                            packet.dup,
                            packet.packet_id,
                            len(packet.payload),
                        )
                    )
                    if packet.qos:
                        self._note(False, PacketKind.PUBLISH, packet.packet_id, now)
                case AckRun():
                    kind = PacketKind(packet.kind)
                    found += [self._answer(False, kind, identifier, 0, now) for identifier in packet.ids]
                case Ack():
                    found.append(
                        self._answer(False, PacketKind(packet.kind), packet.packet_id, int(packet.reason), now)
                    )
                case Subscribe():
                    self._note(False, PacketKind.SUBSCRIBE, packet.packet_id, now)
                    filters = [f"{one.topic_filter} at QoS {one.qos}" for one in packet.filters]
                    found.append({"packet": "SUBSCRIBE", "id": packet.packet_id, "filters": filters})
                case Unsubscribe():
                    self._note(False, PacketKind.UNSUBSCRIBE, packet.packet_id, now)
                    found.append({"packet": "UNSUBSCRIBE", "id": packet.packet_id, "filters": list(packet.filters)})
                case PingReq():
                    self._note(False, PacketKind.PINGREQ, 0, now)
                    found.append({"packet": "PINGREQ"})
                case Disconnect() | Auth():
                    found.append({"packet": type(packet).__name__.upper(), "reason": _reason(int(packet.reason))})
                case Connect():
                    found.append({"packet": "CONNECT"})
                case _:
                    found.append({"packet": type(packet).__name__.upper()})
        return found

    def sent(self, data: bytes, now: float) -> list[Event]:
        """Return the events of whole packets sent to the client."""
        found: list[Event] = []
        at = 0
        while at < len(data):
            first = data[at]
            body, end = extent(data, at)
            at = end
            kind = PacketKind(first >> 4)
            if kind is PacketKind.PUBLISH:
                one = self._reader.parse(first, data, body, end)
                found.append(_publish(one.topic, one.qos, one.retain, one.dup, one.packet_id, len(one.payload)))
                if one.qos:
                    self._note(True, kind, one.packet_id, now)
            elif kind in ANSWERED:
                has_id = kind is not PacketKind.PINGRESP
                identifier = data[body] << 8 | data[body + 1] if has_id else 0
                codes = kind in (PacketKind.SUBACK, PacketKind.UNSUBACK)
                reason = data[body + 2] if has_id and not codes and end - body > 2 else 0
                event = self._answer(True, kind, identifier, reason, now)
                if kind is PacketKind.SUBACK:
                    start = extent(data, body + 1)[1] if self._client.version == 5 else body + 2
                    event["codes"] = list(data[start:end])
                found.append(event)
            elif kind is PacketKind.DISCONNECT:
                found.append({"packet": kind.name, "reason": _reason(data[body] if end > body else 0)})
            else:
                found.append({"packet": kind.name})
        return found

    def _topic(self, packet: Publish) -> str:
        topic = packet.key[2:].decode(errors="replace")
        alias = (packet.properties or {}).get("topic_alias", 0)
        if not alias:
            return topic
        if topic:
            self._aliases[alias] = topic
            return topic
        known = (self._client.memory.aliases or {}).get(alias, b"")
        return self._aliases.get(alias) or known[2:].decode(errors="replace")

    def _note(self, sent: bool, kind: PacketKind, identifier: int, now: float) -> None:
        if len(self._begun) < UNANSWERED_MOST:
            self._begun.setdefault((sent, kind, identifier), now)

    def _answer(self, sent: bool, kind: PacketKind, identifier: int, reason: int, now: float) -> Event:
        """Return the event of an answering packet with its response time; note the packet if it has an answer too."""
        event: Event = {"packet": kind.name}
        if identifier:
            event["id"] = identifier
        if reason:
            event["reason"] = _reason(reason)
        begun = self._begun.pop((not sent, ANSWERED[kind], identifier), None)
        if begun is not None:
            event["ms"] = round((now - begun) * 1000, 3)
            event["answers"] = ANSWERED[kind].name
        if kind in WAITED and reason < 0x80:
            self._note(sent, kind, identifier, now)
        return event


def _publish(topic: str, qos: int, retain: bool, dup: bool, identifier: int, size: int) -> Event:
    event: Event = {"packet": "PUBLISH", "topic": topic, "qos": qos, "bytes": size}
    if retain:
        event["retain"] = True
    if dup:
        event["dup"] = True
    if identifier:
        event["id"] = identifier
    return event


def _reason(number: int) -> str:
    try:
        return f"{ReasonCode(number).name.lower().replace('_', ' ')} ({number:#04x})"
    except ValueError:
        return f"{number:#04x}"


class WatchedSend:
    """Replacement of a socket's ``write`` that passes the sent bytes to a watch."""

    def __init__(self, send: Callable[[bytes | bytearray], None], see: Callable[[bytes], None]) -> None:
        self.send = send
        self._see = see

    def __call__(self, data: bytes | bytearray) -> None:
        """Send the bytes, then pass them to the watch."""
        self.send(data)
        self._see(bytes(data))

    def is_of(self, see: Callable[[bytes], None]) -> bool:
        """Whether the sent bytes are passed to ``see``."""
        return self._see == see
