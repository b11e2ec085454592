# SPDX-License-Identifier: Apache-2.0
"""A connection does not notice that another gateway has claimed its session."""

from __future__ import annotations

from mqtt_nats.cli import main
from mqtt_nats.client.client import Client
from mqtt_nats.sessions.takeover import Claims


def _deaf(claims: Claims, client: Client) -> None:
    """Nobody is told."""


if __name__ == "__main__":
    Claims.listen = _deaf  # type: ignore[method-assign,assignment]
    main()
