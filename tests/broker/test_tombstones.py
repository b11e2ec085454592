# SPDX-License-Identifier: Apache-2.0
"""When tombstones go."""

from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.backbone.store import Silent
from mqtt_nats.broker.retaining import retain
from mqtt_nats.broker.tombstones import HEARD, Tombstones
from tests.broker.support import Timers


class Bench:
    """A broker's tombstones, a clock, and what was removed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timers = Timers(monkeypatch)
        self.pass_to = self.timers.pass_to
        self.calls: list[bytes] = []
        self.settings = SimpleNamespace(max_retained=None)
        broker: Any = SimpleNamespace(
            settings=self.settings,
            delete_retained=b"delete",
            store=SimpleNamespace(call=lambda subject, body, operation: self.calls.append(body)),
            link=SimpleNamespace(kick=lambda: None),
        )
        self.tombstones = Tombstones(broker)

    @property
    def gone(self) -> int:
        return len(self.calls)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_each_stays_until_listeners_have_heard_of_it(bench: Bench) -> None:
    bench.tombstones.add(7)
    bench.pass_to(HEARD / 2)
    bench.tombstones.add(8)
    assert bench.gone == 0
    bench.pass_to(HEARD)
    assert bench.calls == [b'{"seq":7,"no_erase":true}']
    bench.pass_to(HEARD * 1.5)
    assert bench.gone == 2
    bench.tombstones.add(9)
    assert bench.gone == 2
    bench.pass_to(HEARD * 3)
    assert bench.gone == 3
    assert not bench.timers.due


def test_none_is_left_by_a_gateway_that_ends(bench: Bench) -> None:
    bench.tombstones.add(7)
    bench.tombstones.add(8)
    bench.tombstones.end()
    assert bench.gone == 2
    bench.pass_to(HEARD * 2)
    assert bench.gone == 2
    bench.tombstones.add(9)  # stored while the gateway ends
    assert bench.gone == 3


def test_one_takes_no_place_that_a_message_needs(bench: Bench) -> None:
    bench.settings.max_retained = 10
    bench.tombstones.add(7)
    assert bench.gone == 1


@pytest.mark.parametrize(("payload", "ends"), [(b"", True), (b"x", False)])
def test_one_ends_by_itself_where_its_gateway_dies(payload: bytes, ends: bool) -> None:
    put: list[bytes] = []
    broker: Any = SimpleNamespace(
        identity="gateway1",
        store=SimpleNamespace(put=lambda target, headers, payload, operation: put.append(headers)),
        retaining=set(),
    )
    route: Any = SimpleNamespace(topic="a", subject="a")
    retain(broker, route, payload, 1, Silent(), b"")
    assert (b"\r\nNats-TTL:60s\r\n" in put[0]) is ends
