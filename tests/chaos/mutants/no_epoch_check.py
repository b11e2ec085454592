# SPDX-License-Identifier: Apache-2.0
"""A connection does not notice that another gateway has claimed its session."""

from __future__ import annotations

from mqtt_nats.backbone.link import Handler
from mqtt_nats.broker import opening
from mqtt_nats.broker.client import Client
from mqtt_nats.cli import main


def _deaf(client: Client) -> Handler:
    own = client.broker.identity.encode()

    def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if subject.split(b".")[2] == own:
            client.broker.inbox.literal(subject, headers, payload)

    return arrived


if __name__ == "__main__":
    opening.takeover_handler = _deaf
    main()
