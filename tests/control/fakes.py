# SPDX-License-Identifier: Apache-2.0
"""Fakes of what answers to administrators use of a gateway."""

from __future__ import annotations

from typing import cast

from mqtt_nats.client.account import Account
from mqtt_nats.client.kept_messages import KeptMessages
from mqtt_nats.control.server import Control, Powers
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeServices


@stands_for(Account)
class FakeAccount:
    """Stands for `Account`: its services, and the clients that register there."""

    def __init__(self) -> None:
        self.services = FakeServices()
        self.registry = self.services.registry
        self.kept = KeptMessages()


@stands_for(Control)
class FakeControl:
    """Stands for `Control`."""

    def __init__(self, powers: Powers | None = None) -> None:
        self.account = FakeAccount()
        self.powers = powers or Powers({}, None)
        self.kicks: dict[str, float] = {}


def as_control(fake: FakeControl) -> Control:
    """The fake, for a function that wants a `Control`."""
    return cast("Control", fake)
