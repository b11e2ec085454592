# SPDX-License-Identifier: Apache-2.0
"""PUBRELs whose records and positions are stored at different times."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.broker.durable import DurableSide


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
    found: list[tuple[int, bytes]] = []
    side: Any = DurableSide.__new__(DurableSide)
    side._releasing, side._storable = deque([1, 2, 3]), {}
    side.machine = SimpleNamespace(
        pubrel_stored=lambda identifier: found.append((identifier, b"")),
        pubrel_kept=lambda identifier, mark: found.append((identifier, mark)),
    )
    for identifier, some in zip(stored, sent, strict=True):
        side.pubrel_stored(identifier, b"" if identifier % 2 else b"mark")
        assert found == [(one, b"" if one % 2 else b"mark") for one in some]
        found.clear()
    assert not side._releasing
    assert not side._storable
