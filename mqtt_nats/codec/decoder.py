# SPDX-License-Identifier: Apache-2.0
"""Decoder: bytes to packets. One loop parses all complete packets of a read.

Theory of operation. The first byte of a packet selects an action from a table of 256 entries, which depends on the
protocol version and on the sender (client or server). PUBLISH and acknowledgements are parsed in the loop itself,
without a call per packet; other packets are parsed by the functions of their modules. Consecutive packets that differ
only in their payload become one run, whose length is determined in blocks. An incomplete packet at the end of a read is
kept, unless its size exceeds the limit, and is parsed when enough bytes have arrived.
"""

from __future__ import annotations

from struct import iter_unpack, unpack
from typing import Final

from mypy_extensions import mypyc_attr

from mqtt_nats.codec.acks import FIRST, Ack, AckRun, read_ack
from mqtt_nats.codec.connect import Connack, Connect, read_connack, read_connect, read_protocol
from mqtt_nats.codec.control import Auth, Disconnect, PingReq, PingResp, read_auth, read_disconnect
from mqtt_nats.codec.errors import MalformedPacket, MqttError, PacketTooLarge, ProtocolError, QosNotSupported
from mqtt_nats.codec.publish import Publish, PublishRun, read_publish5
from mqtt_nats.codec.subscribe import (
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    read_suback,
    read_subscribe,
    read_unsuback,
    read_unsubscribe,
)
from mqtt_nats.codec.wire import Limits, PacketKind, Reader

_NAMES: Final = {kind.value: kind.name for kind in PacketKind}

Packet = (
    Publish
    | PublishRun
    | AckRun
    | Ack
    | Connect
    | Connack
    | Subscribe
    | Suback
    | Unsubscribe
    | Unsuback
    | PingReq
    | PingResp
    | Disconnect
    | Auth
)

_REFUSE: Final = 0
_RUN: Final = 1  # PUBLISH that may be part of a run
_PUBLISH: Final = 2  # any other PUBLISH
_ACK: Final = 3
_OTHER: Final = 4

_PINGREQ: Final = PingReq()
_PINGRESP: Final = PingResp()

_BLOCK: Final = 16  # packets of one struct layout: cheap to compile, with a sufficiently low cost per packet
_PART: Final = 2048  # bytes from which a part of an incomplete packet is referenced and not copied

OPENING: Final = 1024
"""Bytes within which the topic of a large PUBLISH must end; otherwise the packet gets no buffer of its own."""

OWN_BUFFER_BYTES: Final = 128 * 1024
"""Least bytes of a PUBLISH that may be read into a buffer of its own. A remaining length of three bytes: up to 2 MB."""


def _actions(version: int, from_server: bool, max_qos: int) -> bytes:
    """Return the action for each first byte of packets of a client or server in a version (0: before CONNECT)."""
    table = bytearray(256)
    if not version:
        table[0x10] = _OTHER  # [MQTT-3.1.0-1] (3.1.1, 5.0)
        return bytes(table)
    table[0x30] = _RUN
    for first in (0x31, *range(0x32, 0x36), *range(0x3A, 0x3E)):  # [MQTT-3.3.1-2] [MQTT-3.3.1-4] (3.1.1, 5.0)
        if first >> 1 & 3 <= max_qos:
            table[first] = _PUBLISH
    for first in FIRST.values():
        table[first] = _ACK
    others = (0x20, 0x90, 0xB0, 0xD0) if from_server else (0x82, 0xA2, 0xC0, 0xE0)
    for first in others:
        table[first] = _OTHER
    if version == 5:
        table[0xE0] = table[0xF0] = _OTHER
    elif version == 3 and not from_server:  # in MQTT 3.1 SUBSCRIBE, UNSUBSCRIBE and PUBREL are repeated with DUP
        table[0x8A] = table[0xAA] = _OTHER
        table[0x6A] = _ACK
    return bytes(table)


_ACTIONS: Final = {
    (version, side, qos): _actions(version, side, qos)
    for version in (0, 3, 4, 5)
    for side in (False, True)
    for qos in (0, 1, 2)
}


@mypyc_attr(allow_interpreted_subclasses=True)
class Decoder:
    """Decoder of a server: reads the packets of a client.

    `version` 0: starts with CONNECT, which sets the version; 4 (MQTT 3.1.1, also 3.1) or 5: starts after CONNECT.
    """

    __slots__ = ("_actions", "_held", "_limit", "_limits", "_need", "_size", "error", "version")

    from_server = False

    def __init__(self, limits: Limits, version: int = 0) -> None:
        self._limits = limits
        self._limit = limits.max_packet_size if version else limits.connect_packet_size
        self._actions = _ACTIONS[version, self.from_server, limits.max_qos]
        self._held: list[bytes | bytearray | memoryview] = []  # beginning of an incomplete packet, in parts
        self._size = 0  # bytes of `_held`
        self._need = 0  # bytes that `_held` must have before the next parsing
        self.error: MqttError | None = None
        """Error that ended decoding; None = none."""
        self.version = version
        """Protocol version; 0 until CONNECT has named it. It stays set when the rest of CONNECT is in error."""

    def feed(self, data: bytes) -> list[Packet]:
        """Return the packets that `data` completes, in order. After an error `error` is set and no packet follows."""
        if self.error is not None:
            return []
        packets: list[Packet] = []
        start = 0
        try:
            while self._held:  # only the bytes that complete the packet are joined: the rest of `data` is not copied
                more = self._need - self._size
                if len(data) - start < more:
                    self._keep(data, start)
                    return packets
                held, self._held = self._held, []
                held.append(data[start : start + more])
                start += more
                self._parse(b"".join(held), 0, packets)
            if start < len(data):
                self._parse(data, start, packets)
        except MqttError as error:
            self.error = error.with_traceback(None)  # frames of a traceback would keep the read data alive
        return packets

    def fail(self, error: MqttError) -> None:
        """End decoding because of an error that was found outside the decoder."""
        self.error = self.error or error

    @property
    def large(self) -> bool:
        """Whether a large packet is incomplete."""
        return self._need >= OWN_BUFFER_BYTES and len(self._held) > 0 and self.error is None

    def opening(self, start: bytes) -> PublishRun | None:
        """Return the PUBLISH that begins with `start`, without its bytes, which are set when all have arrived.

        None for a packet that is not large or cannot be part of a run, and where `start` is too short to decide.
        """
        if len(start) < 6 or self._actions[start[0]] != _RUN or not start[1] & start[2] & 128 or not 0 < start[3] < 128:
            return None
        step = 4 + (start[1] & 127) + ((start[2] & 127) << 7) + (start[3] << 14)
        top = 6 + (start[4] << 8 | start[5])
        if not OWN_BUFFER_BYTES <= step <= self._limit or top >= len(start):
            return None
        key = start[4:top]
        if self.version == 5:
            if start[top] or top == 6:
                return None
            top += 1
        return PublishRun(key, b"", 1, step, top)

    def surrender(self, part: int) -> tuple[PublishRun, list[bytes | bytearray | memoryview]] | None:
        """Hand over the incomplete large PUBLISH with its bytes, if at least one byte in `part` has arrived.

        None without such a packet, or with fewer bytes.
        """
        if not self.large or self._size * part < self._need:
            return None
        run = self.opening(bytes(self._held[0][:OPENING]))
        if run is None:
            return None
        parts, self._held = self._held, []
        return run, parts

    def trust(self) -> None:
        """Allow the full packet size, after the client with an authentication method has been authenticated."""
        self._limit = self._limits.max_packet_size

    def _parse(self, data: bytes, pos: int, packets: list[Packet]) -> None:
        end = len(data)
        actions = self._actions
        limit = self._limit
        v5 = self.version == 5
        startswith = data.startswith
        append = packets.append
        while pos < end:
            first = data[pos]
            action = actions[first]
            if not action:
                raise self._refusal(first)
            body = pos + 2
            if body > end:
                self._hold(data, pos, 2)
                return
            size = data[pos + 1]
            if size > 127:
                if body == end:
                    self._hold(data, pos, 3)
                    return
                more = data[body]
                body += 1
                if 0 < more < 128:
                    size += (more << 7) - 128
                else:
                    size, body = _remaining_length(data, pos, end, v5)
                    if not body:
                        self._hold(data, pos, end - pos + 1)
                        return
                    if action == _RUN and not data[body - 1]:
                        action = _PUBLISH  # overlong lengths (legal in 3.1.1) must not be forwarded with a run
            after = body + size
            if after - pos > limit:  # [MQTT-3.2.2-15] (5.0)
                raise PacketTooLarge(f"packet of {after - pos} bytes, more than {limit}")
            if after > end:
                self._hold(data, pos, after - pos)
                return

            if action == _RUN:
                if size < 2:
                    raise MalformedPacket("PUBLISH without topic")
                top = body + 2 + (data[body] << 8 | data[body + 1])
                if top > after:
                    raise MalformedPacket("topic ends after the packet")
                key = data[body:top]
                if v5:
                    if top == after or data[top] or top == body + 2:
                        reader = Reader(data, body, after)
                        append(read_publish5(first, reader, self.from_server, self._limits))
                        pos = after
                        continue
                    top += 1
                step = after - pos
                if startswith(key, after + body - pos):
                    count = _run_length(data, pos, end, data[pos:top], step)
                    after = pos + count * step
                    append(PublishRun(key, data[pos:after], count, step, top - pos))
                else:
                    append(PublishRun(key, data[pos:after], 1, step, top - pos))
                pos = after

            elif action == _PUBLISH:
                if size < 2:
                    raise MalformedPacket("PUBLISH without topic")
                top = body + 2 + (data[body] << 8 | data[body + 1])
                at = top
                packet_id = 0
                qos = first >> 1 & 3
                if qos:
                    at += 2
                    if at > after:
                        raise MalformedPacket("PUBLISH ends before its payload")
                    packet_id = data[top] << 8 | data[top + 1]
                    if not packet_id:  # [MQTT-2.3.1-1] (3.1.1), [MQTT-2.2.1-3] (5.0)
                        raise ProtocolError("packet identifier is 0")
                elif at > after:
                    raise MalformedPacket("topic ends after the packet")
                if v5:
                    if at == after or data[at] or top == body + 2:
                        reader = Reader(data, body, after)
                        append(read_publish5(first, reader, self.from_server, self._limits))
                        pos = after
                        continue
                    at += 1
                append(Publish(qos, first & 1 != 0, first & 8 != 0, data[body:top], packet_id, data[at:after]))
                pos = after

            elif action == _ACK:
                kind = first >> 4
                if size == 2:
                    packet_id = data[body] << 8 | data[body + 1]
                    if not packet_id:  # [MQTT-2.3.1-6] (3.1.1), [MQTT-2.2.1-5] (5.0)
                        raise ProtocolError("packet identifier is 0")
                    if after < end and data[after] == first and after - pos == 4:
                        count = _run_length(data, pos, end, data[pos:body], 4)
                        ids = list(unpack(f">{count * 2}H", data[pos : pos + count * 4])[1::2])
                        if 0 in ids:
                            del ids[ids.index(0) :]  # the next iteration raises the error for the 0
                        append(AckRun(kind, ids))
                        after = pos + len(ids) * 4
                    else:
                        append(AckRun(kind, [packet_id]))
                elif size > 2 and v5:
                    append(read_ack(kind, Reader(data, body, after), self._limits))
                else:
                    raise MalformedPacket("acknowledgement is not two bytes long")
                pos = after

            else:
                append(self._read(first, Reader(data, body, after)))
                if first == 0x10:
                    actions = self._actions
                    limit = self._limit
                    v5 = self.version == 5
                pos = after

    def _hold(self, data: bytes, pos: int, need: int) -> None:
        """Keep the packet that starts at `pos` until `need` bytes of it have arrived."""
        self._size = 0
        self._need = need
        self._keep(data, pos)

    def _keep(self, data: bytes, pos: int) -> None:
        """Keep the rest of a read. Small rests are joined in one part, so that many of them need no further memory."""
        held = self._held
        size = len(data) - pos
        self._size += size
        if size >= _PART:
            held.append(memoryview(data)[pos:] if size > pos else data[pos:])  # a view wastes at most half of `data`
            return
        last = held[-1] if held else None
        if isinstance(last, bytearray):
            last += data[pos:]
        else:
            held.append(bytearray(data[pos:]))

    def _read(self, first: int, reader: Reader) -> Packet:
        """Read any packet except PUBLISH and acknowledgements."""
        kind = first >> 4
        version = self.version
        limits = self._limits
        if kind == PacketKind.CONNECT:
            level, bridge = read_protocol(reader)
            self.version = max(level, 4)
            connect = read_connect(reader, level, bridge, limits)
            self._actions = _ACTIONS[level, False, limits.max_qos]
            if connect.properties is None or "authentication_method" not in connect.properties:
                self._limit = limits.max_packet_size
            return connect
        if kind == PacketKind.CONNACK:
            return read_connack(reader, version, limits)
        packet: Packet
        if kind == PacketKind.SUBSCRIBE:
            packet = read_subscribe(reader, version, limits)
        elif kind == PacketKind.UNSUBSCRIBE:
            packet = read_unsubscribe(reader, version, limits)
        elif kind == PacketKind.SUBACK:
            packet = read_suback(reader, version, limits)
        elif kind == PacketKind.UNSUBACK:
            packet = read_unsuback(reader, version, limits)
        elif kind == PacketKind.DISCONNECT:
            packet = read_disconnect(reader, version, limits, self.from_server)
        elif kind == PacketKind.AUTH:
            packet = read_auth(reader, limits, self.from_server)
        else:
            packet = _PINGREQ if kind == PacketKind.PINGREQ else _PINGRESP
        reader.finish()
        return packet

    def _refusal(self, first: int) -> MqttError:
        """Return the error for a first byte that is not accepted."""
        kind = first >> 4
        if not kind or (kind == PacketKind.AUTH and self.version == 4):
            return MalformedPacket(f"packet type {kind} is reserved")
        if kind == PacketKind.PUBLISH and self.version:
            if self._limits.max_qos < first >> 1 & 3 < 3:  # [MQTT-3.2.2-11] (5.0)
                return QosNotSupported(f"QoS above {self._limits.max_qos}")
            return MalformedPacket("QoS is 3, or DUP is set at QoS 0")  # [MQTT-3.3.1-2] [MQTT-3.3.1-4] (3.1.1, 5.0)
        flags = 2 if kind in (PacketKind.PUBREL, PacketKind.SUBSCRIBE, PacketKind.UNSUBSCRIBE) else 0
        # [MQTT-2.2.2-1] [MQTT-2.2.2-2] (3.1.1), [MQTT-2.1.3-1] (5.0)
        # [MQTT-3.6.1-1] [MQTT-3.8.1-1] [MQTT-3.10.1-1] [MQTT-3.14.1-1] (3.1.1, 5.0), [MQTT-3.15.1-1] (5.0)
        if kind != PacketKind.PUBLISH and first & 0x0F != flags:
            return MalformedPacket("reserved flags of the fixed header")
        name = _NAMES[kind]
        if not self.version and not self.from_server:
            return ProtocolError(f"{name} before CONNECT")  # [MQTT-3.1.0-1] (3.1.1, 5.0)
        if kind == PacketKind.CONNECT and not self.from_server:
            return ProtocolError("second CONNECT")  # [MQTT-3.1.0-2] (3.1.1, 5.0)
        return ProtocolError(f"{name} is not sent by this side")


class ClientDecoder(Decoder):
    """Decoder of a client: reads the packets of a server. The client chooses the version, 4 or 5."""

    __slots__ = ()

    from_server = True

    def __init__(self, limits: Limits, version: int) -> None:
        super().__init__(limits, version)


def _remaining_length(data: bytes, pos: int, end: int, v5: bool) -> tuple[int, int]:
    """Return (value, offset behind it) of the remaining length at `pos + 1`; offset 0 for an incomplete one."""
    size = shift = 0
    for at in range(pos + 1, min(end, pos + 5)):
        byte = data[at]
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            if v5 and shift and not byte:  # [MQTT-1.5.5-1] (5.0)
                raise MalformedPacket("remaining length is longer than needed")
            return size, at + 1
        shift += 7
    if shift == 28:
        raise MalformedPacket("remaining length has more than four bytes")
    return 0, 0


def _run_length(data: bytes, pos: int, end: int, head: bytes, step: int) -> int:
    """Return the number of complete packets of `step` bytes from `pos` on that start with `head`; the first does."""
    whole = (end - pos) // step
    count = 1
    at = pos + step
    startswith = data.startswith
    few = min(whole, 8)
    while count < few and startswith(head, at):
        count += 1
        at += step
    if count == 8:
        blocks = (whole - count) // _BLOCK
        if blocks:
            same = (head,) * _BLOCK
            layout = f"{len(head)}s{step - len(head)}x" * _BLOCK
            for heads in iter_unpack(layout, memoryview(data)[at : at + blocks * _BLOCK * step]):
                if heads != same:
                    break
                count += _BLOCK
                at += _BLOCK * step
        while count < whole and startswith(head, at):
            count += 1
            at += step
    return count
