# SPDX-License-Identifier: Apache-2.0
"""Records of owed PUBRELs that do not come are looked for, until they come or are seen to be gone."""

from __future__ import annotations

from mqtt_nats.delivery.pubrels import seek
from mqtt_nats.protocol.durable_sender import DurableSender
from mqtt_nats.protocol.ports import NOWHERE
from mqtt_streams.api import RequestTimeout
from mqtt_streams.pubrel import Owed

PUBCOMP = 7


async def test_until_they_are_gone() -> None:
    """What is there is waited for; and what JetStream does not answer is no answer."""
    machine = DurableSender(10, NOWHERE)
    for identifier, sequence in ((6, 5), (7, 6), (8, 7)):
        machine.owe(identifier, sequence)
    machine.start()
    machine.acknowledged(PUBCOMP, [6, 7])
    answers: list[RequestTimeout | list[Owed]] = [
        RequestTimeout("a test"),
        [Owed(6, 11, 5), Owed(7, 12, 5), Owed(8, 13, 7)],  # 7 with the sequence of another message
        [],
    ]
    left: list[list[int]] = []

    async def owed() -> list[Owed]:
        left.append(sorted(machine.releases))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    await seek(machine, owed, lambda: True, first_wait_s=0.001)
    assert left == [[6, 7, 8], [6, 7, 8], [6, 8]]
    assert list(machine.releases) == [8]  # the client has not let it go
