# SPDX-License-Identifier: Apache-2.0
"""PUBRELs whose records and positions are stored at different times."""

from __future__ import annotations

import pytest

from mqtt_nats.protocol.release_order import ReleaseOrder


@pytest.mark.parametrize(
    ("stored", "sent"),
    [
        ([1, 2, 3], [[1], [2], [3]]),
        ([2, 1, 3], [[], [1, 2], [3]]),
        ([3, 2, 1], [[], [], [1, 2, 3]]),
        ([3, 1, 2], [[], [1], [2, 3]]),
    ],
)
def test_they_leave_in_the_order_of_their_pubrecs(stored: list[int], sent: list[list[int]]) -> None:
    """[MQTT-4.6.0-4]"""
    order = ReleaseOrder()
    for identifier in (1, 2, 3):
        order.received(identifier)
    found = [order.stored(identifier, b"" if identifier % 2 else b"mark") for identifier in stored]
    assert found == [[(one, b"" if one % 2 else b"mark") for one in some] for some in sent]
