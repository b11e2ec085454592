# SPDX-License-Identifier: Apache-2.0
"""Messages for some sessions only, which `mqtt-nats migrate sessions` carries over from another broker.

They waited there for clients that are absent; others have had them. So such a message is only stored, with a header
`Nmqtt-For` for each of these sessions: no copy goes to subscribers that are connected, and other sessions pass over it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqtt_nats.backbone.pending_stores import TooLarge
from mqtt_nats.codec import MqttError, NotAuthorized, PacketTooLarge, Properties, ProtocolError
from mqtt_nats.codec.wire import PUBACK
from mqtt_nats.ingress.publish import (
    ANSWERED,
    HEADERS,
    Acknowledgement,
    bound,
    checked,
    count,
    refuse_publish,
    route_for,
)
from mqtt_nats.ingress.publish_properties import extras
from mqtt_streams.headers import FOR, PUB, for_line

if TYPE_CHECKING:
    from mqtt_nats.codec import Publish
    from mqtt_nats.ingress.publish import Publisher


def publish_carried(client: Publisher, packet: Publish) -> bool:
    """Store a PUBLISH with user properties `Nmqtt-For`, each with a client id; False: it has none.

    An error of the message goes into its acknowledgement.

    Raises:
        MqttError: the connection has to end.
    """
    qos, lines = destination(packet)
    if not lines:
        return False
    count(client, packet)
    try:
        _store(client, packet, qos, lines)
    except MqttError as error:
        if error.reason not in ANSWERED:
            raise
        refuse_publish(client, packet, error)
    return True


def destination(packet: Publish) -> tuple[int, bytes]:
    """Return the QoS of a carried message, and the header lines for its sessions; without lines it is none.

    Raises:
        ProtocolError: the packet is not as that of a carried message has to be.
    """
    pairs = (packet.properties or {}).get("user_property", [])
    lines = b"".join(for_line(value) for name, value in pairs if name == FOR)
    qos = {"1": 1, "2": 2}.get(dict(pairs).get(PUB, ""), 0)
    if lines and (packet.qos != 1 or packet.retain or not qos or len(packet.key) == 2):
        raise ProtocolError("a carried message has QoS 1, its own QoS as a user property, and a topic")
    return qos, lines


def _store(client: Publisher, packet: Publish, qos: int, lines: bytes) -> None:
    path, payload = client.path, packet.payload
    route = route_for(client, packet.key)
    if client.guarded is not None and not client.guarded.may_publish(route.asked, qos, False):
        raise NotAuthorized("not authorized")
    properties: Properties = {**(packet.properties or {})}
    properties["user_property"] = [one for one in properties.get("user_property", []) if one[0] not in (FOR, PUB)]
    more = extras(properties)
    lines += client.sender_header if more is None else client.sender_header + more.lines
    size = len(payload) + checked(HEADERS + len(lines) + len(route.hpub))
    if size > path.store.max_payload:
        raise PacketTooLarge(f"nats-server takes messages of {path.store.max_payload} bytes, headers included")
    path.received[1] += 1
    path.received_bytes[1] += len(payload)
    receipt = Acknowledgement(client, PUBACK, packet.packet_id, 1)
    client.receipts.append(receipt)
    identity = path.ids.next()
    headers = b"NATS/1.0\r\nNmqtt-Pub:%d\r\nNmqtt-Id:%b\r\n%b" % (qos, identity, lines)
    if path.with_ids:
        headers += b"Nats-Msg-Id:%b\r\n" % identity
    try:
        path.store.put(route.msgs, headers + (b"\r\n" if more is None else more.stay + b"\r\n"), payload, receipt)
    except TooLarge as error:
        raise PacketTooLarge(str(error)) from None
    bound(client)
