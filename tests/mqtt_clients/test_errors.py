# SPDX-License-Identifier: Apache-2.0
"""Texts and exit statuses of errors of the clients."""

from __future__ import annotations

import pytest

from mqtt_nats.codec import Properties
from mqtt_nats.mqtt_clients.errors import ClientError, Refused, TimeoutReached, reason_text, return_text


@pytest.mark.parametrize(
    ("code", "detail", "text"),
    [
        (0x87, None, "not authorized (reason code 0x87)"),
        (0x87, "the rules deny it", "not authorized (reason code 0x87): the rules deny it"),
        (0x87, "not authorized", "not authorized (reason code 0x87)"),
        (0xEE, None, "unknown reason (reason code 0xee)"),
    ],
)
def test_a_reason_code_has_name_number_and_reason_string(code: int, detail: str | None, text: str) -> None:
    assert reason_text(code, Properties(reason_string=detail) if detail else None) == text


@pytest.mark.parametrize(
    ("code", "text"), [(5, "not authorized (return code 5)"), (77, "unknown reason (return code 77)")]
)
def test_a_return_code_has_name_and_number(code: int, text: str) -> None:
    assert return_text(code) == text


def test_exit_statuses() -> None:
    assert [kind.status for kind in (ClientError, Refused, TimeoutReached)] == [1, 1, 27]
