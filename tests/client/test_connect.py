# SPDX-License-Identifier: Apache-2.0
"""CONNECT and CONNACK: limits and options of a client, and the answers to what cannot be accepted."""

from __future__ import annotations

import asyncio
from math import inf
from time import monotonic
from typing import Any, cast

import pytest

from mqtt_nats.base.admission import Admission, Verdict
from mqtt_nats.client.client import Client
from mqtt_nats.client.connect import EXPIRY_NEVER, _wait_for_rate, bounded_expiry, refusal, terms
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
from mqtt_nats.transport.connection import Connection
from mqtt_nats.transport.listener_settings import ConnectionSettings
from tests.codec.support import decoder
from tests.harness.doubles import stands_for


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


@stands_for(Connection)
class FakeAdmittedConnection:
    """Stands for `Connection`, which the rate of its listener lets in later."""

    def __init__(self, due: float) -> None:
        self.admission = Admission(Verdict.ADMITTED, due)
        self.fake_restarts = 0

    def restart_timeout(self, now: float) -> None:
        self.fake_restarts += 1


@stands_for(Client)
class FakeAdmittedClient:
    """Stands for `Client`; notes whether it waits."""

    def __init__(self, due: float) -> None:
        self.connection = FakeAdmittedConnection(due)
        self.fake_waits: list[bool] = []

    def begin_waiting(self, since: float = inf) -> None:
        self.fake_waits.append(True)

    def end_waiting(self) -> None:
        self.fake_waits.append(False)


@pytest.mark.sources
async def test_a_connect_waits_until_the_rate_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile nothing counts that the client has to do in time."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    late, at_once = FakeAdmittedClient(monotonic() + 100), FakeAdmittedClient(0.0)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        for client in (late, at_once):
            await _wait_for_rate(cast("Client", client))
    (seconds,) = slept
    assert 0 < seconds <= 100
    assert (late.fake_waits, late.connection.fake_restarts) == ([True, False], 1)
    assert (at_once.fake_waits, at_once.connection.fake_restarts) == ([], 0)
