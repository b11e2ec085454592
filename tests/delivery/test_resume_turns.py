# SPDX-License-Identifier: Apache-2.0
"""A session with thousands of filters is resumed in turns of the event loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.base.support import PATIENCE, Inside, running
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually

FILTERS = 3000
AT_ONCE = 500


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer) -> Iterator[Inside]:
    with running(nats_server.url) as found:
        yield found


def test_its_filters_come_back_in_turns(inside: Inside) -> None:
    account, loop, port = inside.gateway.account, inside.loop, inside.ports[0]
    assert account is not None
    with Raw.connected(port, "many", clean=False, patience=PATIENCE) as client:
        for start in range(0, FILTERS, AT_ONCE):
            client.subscribe(*((f"many/{number}", 0) for number in range(start, start + AT_ONCE)))
    filters = account.services.path.table.filters
    eventually(lambda: not filters, PATIENCE)
    most: list[int] = []
    last = 0

    def beat() -> None:
        nonlocal last
        most.append(len(filters) - last)
        last = len(filters)
        if last < FILTERS:
            loop.call_soon(beat)

    loop.call_soon_threadsafe(beat)
    with Raw.connected(port, "many", clean=False, patience=PATIENCE) as client:
        client.send(raw.publish("many/2999", b"here"))
        assert client.expect(raw.PUBLISH, PATIENCE).payload == b"here"
    assert sum(most) == FILTERS
    assert max(most) < FILTERS // 2
