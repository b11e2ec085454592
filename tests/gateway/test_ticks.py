# SPDX-License-Identifier: Apache-2.0
"""What a gateway does now and then, by its clock."""

from __future__ import annotations

import pytest

from mqtt_nats.gateway import account as tenant
from mqtt_nats.pubsub.fanout import SEEN_FOR, Fanout
from mqtt_nats.transport.connection import CLOCK_STEP
from tests.base.support import PATIENCE, running
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually


@pytest.mark.sources
@pytest.mark.parametrize("seen_for", [SEEN_FOR, CLOCK_STEP])
def test_ids_of_messages_are_forgotten_after_their_time(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, seen_for: float
) -> None:
    """Not at each step of the clock: a copy that comes later would be delivered once more."""
    rotations: list[Fanout] = []
    monkeypatch.setattr(tenant, "SEEN_FOR", seen_for)
    monkeypatch.setattr(Fanout, "rotate", lambda fanout: rotations.append(fanout))
    with running(nats_server.url) as inside:
        account = inside.gateway.account
        assert account is not None
        if seen_for < SEEN_FOR:
            eventually(lambda: rotations, PATIENCE)
            return
        clock = account.services.clock
        until = clock.now + 4 * CLOCK_STEP
        eventually(lambda: clock.now > until, PATIENCE)
        assert not rotations
