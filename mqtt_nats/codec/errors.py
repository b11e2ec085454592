# SPDX-License-Identifier: Apache-2.0
"""Errors of the codec.

MqttError                       an error of the peer; has the reason code of the answer
├── MalformedPacket             0x81
├── ProtocolError               0x82
├── UnsupportedProtocolVersion  0x84
│   └── NewerProtocolVersion    0x84
├── InvalidClientId             0x85
├── NotAuthorized               0x87
├── TopicFilterInvalid          0x8F
├── TopicNameInvalid            0x90
├── ReceiveMaximumExceeded      0x93
├── TopicAliasInvalid           0x94
├── PacketTooLarge              0x95
├── QuotaExceeded               0x97
├── PayloadFormatInvalid        0x99
└── QosNotSupported             0x9B
EncodeError (ValueError)        an error of the encoder's caller; no peer gets an answer
"""

from __future__ import annotations

from mqtt_nats.codec.reasons import ReasonCode


class MqttError(Exception):
    """An error of the peer. `reason`: code for DISCONNECT, CONNACK or the acknowledgement; `str()`: readable text."""

    reason: ReasonCode = ReasonCode.UNSPECIFIED_ERROR

    def __init__(self, text: str, reason: ReasonCode | None = None) -> None:
        super().__init__(text)
        if reason is not None:
            self.reason = reason


class MalformedPacket(MqttError):
    """The bytes are no packet according to the protocol."""

    reason = ReasonCode.MALFORMED_PACKET


class ProtocolError(MqttError):
    """The packet can be parsed, but is not allowed at this point or with this content."""

    reason = ReasonCode.PROTOCOL_ERROR


class UnsupportedProtocolVersion(MqttError):
    """CONNECT names a protocol or level that is not supported."""

    reason = ReasonCode.UNSUPPORTED_PROTOCOL_VERSION


class NewerProtocolVersion(UnsupportedProtocolVersion):
    """CONNECT names a version of MQTT newer than 5.0; the answer has the form of 5.0."""


class InvalidClientId(MqttError):
    """The client identifier is not allowed."""

    reason = ReasonCode.CLIENT_IDENTIFIER_NOT_VALID


class NotAuthorized(MqttError):
    """The client is not authorized for this action."""

    reason = ReasonCode.NOT_AUTHORIZED


class TopicFilterInvalid(MqttError):
    """The topic filter is illegal or not accepted."""

    reason = ReasonCode.TOPIC_FILTER_INVALID


class TopicNameInvalid(MqttError):
    """The topic name is illegal or not accepted."""

    reason = ReasonCode.TOPIC_NAME_INVALID


class ReceiveMaximumExceeded(MqttError):
    """The peer has sent more unacknowledged QoS 1 and 2 publishes than the receive maximum."""

    reason = ReasonCode.RECEIVE_MAXIMUM_EXCEEDED


class TopicAliasInvalid(MqttError):
    """The topic alias is 0, above the maximum, or has no topic."""

    reason = ReasonCode.TOPIC_ALIAS_INVALID


class PacketTooLarge(MqttError):
    """The packet is larger than the receiver accepts."""

    reason = ReasonCode.PACKET_TOO_LARGE


class QuotaExceeded(MqttError):
    """A limit of this implementation or of its administrator is exceeded."""

    reason = ReasonCode.QUOTA_EXCEEDED


class PayloadFormatInvalid(MqttError):
    """The payload contradicts its payload format indicator."""

    reason = ReasonCode.PAYLOAD_FORMAT_INVALID


class QosNotSupported(MqttError):
    """The QoS is above the accepted maximum."""

    reason = ReasonCode.QOS_NOT_SUPPORTED


class UseAnotherServer(MqttError):
    """The server stops; `reference` is the Server Reference that names other servers to the client."""

    reason = ReasonCode.USE_ANOTHER_SERVER

    def __init__(self, text: str, reference: str) -> None:
        super().__init__(text)
        self.reference = reference


class EncodeError(ValueError):
    """The packet has no legal encoding: a value out of range, a string or packet too long, a property out of place."""
