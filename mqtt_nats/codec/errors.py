# SPDX-License-Identifier: Apache-2.0
"""Errors of the codec.

MqttError                       what the peer did; carries the reason code to answer with
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
EncodeError (ValueError)        what the caller of the encoder did; there is no peer to answer
"""

from __future__ import annotations

from mqtt_nats.codec.reasons import ReasonCode


class MqttError(Exception):
    """A violation by the peer. `reason` goes into DISCONNECT, CONNACK or the acknowledgement; `str()` is for people."""

    reason: ReasonCode = ReasonCode.UNSPECIFIED_ERROR

    def __init__(self, text: str, reason: ReasonCode | None = None) -> None:
        super().__init__(text)
        if reason is not None:
            self.reason = reason


class MalformedPacket(MqttError):
    """The bytes cannot be parsed by the rules of the protocol."""

    reason = ReasonCode.MALFORMED_PACKET


class ProtocolError(MqttError):
    """The packet parses and is not allowed, here or with this content."""

    reason = ReasonCode.PROTOCOL_ERROR


class UnsupportedProtocolVersion(MqttError):
    """CONNECT names a protocol or level that is not spoken here."""

    reason = ReasonCode.UNSUPPORTED_PROTOCOL_VERSION


class NewerProtocolVersion(UnsupportedProtocolVersion):
    """CONNECT names a version of MQTT that is newer than 5.0: it is answered as 5.0 answers."""


class InvalidClientId(MqttError):
    """The client identifier is not allowed."""

    reason = ReasonCode.CLIENT_IDENTIFIER_NOT_VALID


class NotAuthorized(MqttError):
    """The client may not do this."""

    reason = ReasonCode.NOT_AUTHORIZED


class TopicFilterInvalid(MqttError):
    """The topic filter is not legal or not accepted."""

    reason = ReasonCode.TOPIC_FILTER_INVALID


class TopicNameInvalid(MqttError):
    """The topic name is not legal or not accepted."""

    reason = ReasonCode.TOPIC_NAME_INVALID


class ReceiveMaximumExceeded(MqttError):
    """More unacknowledged QoS 1 and 2 publishes than the receiver allowed."""

    reason = ReasonCode.RECEIVE_MAXIMUM_EXCEEDED


class TopicAliasInvalid(MqttError):
    """A topic alias of 0, above the maximum, or without a topic."""

    reason = ReasonCode.TOPIC_ALIAS_INVALID


class PacketTooLarge(MqttError):
    """The packet is larger than the receiver accepts."""

    reason = ReasonCode.PACKET_TOO_LARGE


class QuotaExceeded(MqttError):
    """A limit of this implementation or of its administrator is exceeded."""

    reason = ReasonCode.QUOTA_EXCEEDED


class PayloadFormatInvalid(MqttError):
    """The payload is not what its payload format indicator says."""

    reason = ReasonCode.PAYLOAD_FORMAT_INVALID


class QosNotSupported(MqttError):
    """The QoS is above what is accepted."""

    reason = ReasonCode.QOS_NOT_SUPPORTED


class EncodeError(ValueError):
    """The packet has no legal encoding: a value out of range, a string or packet too long, a property out of place."""
