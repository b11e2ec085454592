# SPDX-License-Identifier: Apache-2.0
"""Codec of MQTT 3.1.1 and 5.0: decoder, encoder, packets, topics. No sockets, no clock; only the decoder has state."""

from mqtt_nats.codec.acks import Ack, AckRun
from mqtt_nats.codec.connect import Connack, Connect, Will
from mqtt_nats.codec.control import Auth, Disconnect, PingReq, PingResp
from mqtt_nats.codec.decoder import ClientDecoder, Decoder, Packet
from mqtt_nats.codec.encoder import ID, PINGREQ, PINGRESP, ack_bytes, ack_run_bytes, encode
from mqtt_nats.codec.errors import (
    EncodeError,
    InvalidClientId,
    MalformedPacket,
    MqttError,
    NewerProtocolVersion,
    NotAuthorized,
    PacketTooLarge,
    PayloadFormatInvalid,
    ProtocolError,
    QosNotSupported,
    QuotaExceeded,
    ReceiveMaximumExceeded,
    TopicAliasInvalid,
    TopicFilterInvalid,
    TopicNameInvalid,
    UnsupportedProtocolVersion,
    UseAnotherServer,
)
from mqtt_nats.codec.properties import Properties
from mqtt_nats.codec.publish import Publish, PublishRun, encode_publish, publish_head
from mqtt_nats.codec.reasons import ConnackCode, ReasonCode, connack_code
from mqtt_nats.codec.subscribe import Suback, Subscribe, Subscription, Unsuback, Unsubscribe
from mqtt_nats.codec.topics import check_topic_name, matches, validate_topic_filter, validate_topic_name
from mqtt_nats.codec.wire import MAX_REMAINING_LENGTH, Limits, PacketKind, put_varint

__all__ = [
    "ID",
    "MAX_REMAINING_LENGTH",
    "PINGREQ",
    "PINGRESP",
    "Ack",
    "AckRun",
    "Auth",
    "ClientDecoder",
    "Connack",
    "ConnackCode",
    "Connect",
    "Decoder",
    "Disconnect",
    "EncodeError",
    "InvalidClientId",
    "Limits",
    "MalformedPacket",
    "MqttError",
    "NewerProtocolVersion",
    "NotAuthorized",
    "Packet",
    "PacketKind",
    "PacketTooLarge",
    "PayloadFormatInvalid",
    "PingReq",
    "PingResp",
    "Properties",
    "ProtocolError",
    "Publish",
    "PublishRun",
    "QosNotSupported",
    "QuotaExceeded",
    "ReasonCode",
    "ReceiveMaximumExceeded",
    "Suback",
    "Subscribe",
    "Subscription",
    "TopicAliasInvalid",
    "TopicFilterInvalid",
    "TopicNameInvalid",
    "Unsuback",
    "Unsubscribe",
    "UnsupportedProtocolVersion",
    "UseAnotherServer",
    "Will",
    "ack_bytes",
    "ack_run_bytes",
    "check_topic_name",
    "connack_code",
    "encode",
    "encode_publish",
    "matches",
    "publish_head",
    "put_varint",
    "validate_topic_filter",
    "validate_topic_name",
]
