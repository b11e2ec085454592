# SPDX-License-Identifier: Apache-2.0
"""A fake of the admin listener, for what it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from mqtt_nats.admin.listener import AdminListener
from mqtt_nats.config.settings import Settings
from mqtt_nats.config.worker_identity import WorkerIdentity
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeInbox, as_inbox

if TYPE_CHECKING:
    from mqtt_nats.backbone.inbox import RequestInbox
    from mqtt_nats.gateway.gateway import Gateway


@stands_for(AdminListener)
class FakeListener:
    """Stands for `AdminListener`: what is known of the gateway, and of NATS."""

    gateway: Gateway

    def __init__(self, settings: Settings | None = None, workers: int = 1, obstacle: str = "") -> None:
        self.settings = settings or Settings()
        self.place = WorkerIdentity("g", 1, workers)
        self.obstacle = obstacle
        self.certificates: dict[str, float] = {}

    async def inbox(self) -> RequestInbox:
        return as_inbox(FakeInbox())


def as_listener(fake: FakeListener) -> AdminListener:
    """The fake, for what wants an `AdminListener`."""
    return cast("AdminListener", fake)
