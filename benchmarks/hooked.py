# SPDX-License-Identifier: Apache-2.0
"""Plugins that do nothing, to see what it costs to ask them."""

from __future__ import annotations

from typing import Final

from mqtt_nats.hooks.chain import Point
from mqtt_nats.hooks.points import CLIENT_AUTHORIZE, POINTS
from mqtt_nats.plugins import NoOptions, Plugin

MESSAGES: Final = tuple(point for point in POINTS if point.name.startswith("message."))
"""The points that each message passes."""

ELSEWHERE: Final = tuple(point for point in POINTS if point not in (*MESSAGES, CLIENT_AUTHORIZE))
"""Those that no message passes."""


def _nothing(*_: object) -> None:
    """A hook that has no say."""


class Elsewhere(Plugin[NoOptions]):
    """Hooks at every point but those of messages."""

    points: tuple[Point, ...] = ELSEWHERE

    async def load(self) -> None:
        for point in self.points:
            self.gateway.on(point, _nothing)


class Everywhere(Elsewhere):
    """One at those of messages too."""

    points = ELSEWHERE + MESSAGES
