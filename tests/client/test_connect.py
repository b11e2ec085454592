# SPDX-License-Identifier: Apache-2.0
"""CONNECT and CONNACK: limits and options of a client, and the answers to what cannot be accepted."""

from __future__ import annotations

from typing import Any

import pytest

from mqtt_nats.client.connect import EXPIRY_NEVER, bounded_expiry, refusal, terms
from mqtt_nats.codec import (
    Connack,
    Connect,
    InvalidClientId,
    MalformedPacket,
    MqttError,
    ProtocolError,
    ReasonCode,
    UnsupportedProtocolVersion,
)
from mqtt_nats.transport.listener_settings import ConnectionSettings
from tests.codec.support import decoder


def code(data: bytes, version: int) -> int:
    """The return code or reason code of a CONNACK."""
    (packet,) = decoder(version, "server").feed(data)
    assert isinstance(packet, Connack)
    return packet.code


@pytest.mark.parametrize("properties", [None, {}])
def test_limits_of_a_client_that_names_none(properties: Any) -> None:
    """Section 3.1.2.11: receive maximum 65,535, no topic alias, problem information, no response information."""
    found = terms(Connect(5, "c", True, 0, properties=properties))
    assert (found.receive_maximum, found.topic_alias_maximum) == (65_535, 0)
    assert (found.problem_information, found.response_information) == (True, False)


def test_limits_of_a_client_that_names_them() -> None:
    found = terms(
        Connect(
            5,
            "c",
            True,
            0,
            properties={
                "receive_maximum": 3,
                "maximum_packet_size": 99,
                "topic_alias_maximum": 4,
                "request_problem_information": 0,
                "request_response_information": 1,
            },
        )
    )
    assert (found.receive_maximum, found.maximum_packet_size, found.topic_alias_maximum) == (3, 99, 4)
    assert (found.problem_information, found.response_information) == (False, True)


@pytest.mark.parametrize(
    ("asked", "most", "given"),
    [(0, None, 0), (60, None, 60), (EXPIRY_NEVER, None, None), (60, 30, 30), (EXPIRY_NEVER, 30, 30), (20, 30, 20)],
)
def test_the_session_expiry_interval_is_bounded(asked: int, most: int | None, given: int | None) -> None:
    assert bounded_expiry(asked, ConnectionSettings(max_session_expiry_interval=most)) == given


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ProtocolError("twice"), ReasonCode.PROTOCOL_ERROR),
        (MalformedPacket("cut"), ReasonCode.MALFORMED_PACKET),
        (InvalidClientId("empty"), ReasonCode.CLIENT_IDENTIFIER_NOT_VALID),
    ],
)
def test_a_5_0_client_gets_the_reason(error: MqttError, reason: ReasonCode) -> None:
    assert code(refusal(5, error), 5) == reason


@pytest.mark.parametrize(("error", "returned"), [(UnsupportedProtocolVersion("2"), 1), (InvalidClientId("empty"), 2)])
def test_a_3_1_1_client_gets_a_return_code_where_the_standard_has_one(error: MqttError, returned: int) -> None:
    """[MQTT-3.1.2-2], [MQTT-3.1.3-8] (3.1.1)."""
    assert code(refusal(4, error), 4) == returned


def test_any_other_bad_connect_of_3_1_1_gets_no_answer() -> None:
    """[MQTT-3.1.4-1] (3.1.1)"""
    assert refusal(4, ProtocolError("twice")) == b""
    assert refusal(0, MalformedPacket("cut")) == b""
