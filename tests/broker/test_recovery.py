# SPDX-License-Identifier: Apache-2.0
"""After NATS was lost: when what was sent again has been handled."""

from __future__ import annotations

from typing import Any

import pytest

from mqtt_nats.broker import recovery


class Slow:
    """A link whose server answers after some fences, or is lost after some."""

    def __init__(self, fences: int, lost: bool) -> None:
        self.wire: object | None = object()
        self.fences = fences
        self.lost = lost

    async def fence(self) -> None:
        self.fences -= 1
        if self.fences:
            raise TimeoutError("a test")
        if self.lost:
            self.wire = object()  # and there is another connection already
            raise TimeoutError("a test")


@pytest.mark.parametrize("fences", [1, 3])
@pytest.mark.parametrize("lost", [True, False])
async def test_a_server_that_answers_late_is_waited_for(fences: int, lost: bool) -> None:
    """Nothing begins where recovery gives up while the connection lives."""
    link: Any = Slow(fences, lost)
    assert await recovery._passed(link) is not lost
    assert not link.fences


async def test_a_connection_that_is_lost_is_not_waited_for() -> None:
    link: Any = Slow(1, False)
    link.wire = None
    assert not await recovery._passed(link)
