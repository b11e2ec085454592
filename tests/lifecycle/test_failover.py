# SPDX-License-Identifier: Apache-2.0
"""The failover of a dead gateway: what is left when JetStream does not answer in the middle of it."""

from __future__ import annotations

from typing import cast

import pytest

from mqtt_nats.lifecycle.failover import fail_over
from mqtt_nats.lifecycle.will import Wills
from mqtt_nats.observability.presence import Presence
from mqtt_streams.api import RequestTimeout
from mqtt_streams.gateways import Entry
from mqtt_streams.sessions import PREFIX, V5, SessionRecord
from tests.harness.doubles import stands_for
from tests.harness.generators import all_closed
from tests.lifecycle.fakes import FakeEndingWills

pytestmark = pytest.mark.sources


@stands_for(Presence)
class FakePresence:
    """Stands for `Presence`: whose connections have ended with their gateway."""

    def __init__(self) -> None:
        self.fake_lost: list[str] = []

    def lost(self, gateway: str, client_id: str, epoch: int) -> None:
        self.fake_lost.append(client_id)


async def test_the_records_are_not_read_on_when_a_session_cannot_be_ended() -> None:
    wills, presence = FakeEndingWills(), FakePresence()
    js = wills.services.fake_inbox
    for name, owner in (("dead's", "dead0000"), ("another's", "other000")):
        record = SessionRecord(name, v5=V5("regular", 0))
        record.sign(owner, "nonce")
        js.put(f"{PREFIX}{record.key}", record.encode())

    def silent(subject: str) -> None:
        if subject.startswith(PREFIX):
            raise RequestTimeout("no leader")

    js.before = silent
    dead = Entry("dead0000", 0.0, {}, 1, True, "")
    with all_closed(), pytest.raises(RequestTimeout):
        await fail_over(cast(Wills, wills), cast(Presence, presence), dead)
    assert presence.fake_lost == []
    js.before = lambda subject: None
    await fail_over(cast(Wills, wills), cast(Presence, presence), dead)
    assert presence.fake_lost == ["dead's"]
