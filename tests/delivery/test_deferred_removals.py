# SPDX-License-Identifier: Apache-2.0
"""When records of what is complete may go."""

from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.backbone.pending import Silent
from mqtt_nats.delivery import deferred_removals as lingering
from mqtt_nats.delivery.deferred_removals import Lingering
from tests.harness.doubles import Timers


class Bench:
    """Records of one session, a clock, and what has gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timers = Timers(monkeypatch)
        self.pass_to = self.timers.pass_to
        monkeypatch.setattr(lingering, "LINGER", 10.0)
        monkeypatch.setattr(lingering, "AFTERWARDS", 100.0)
        self.link = SimpleNamespace(online=True, out=[], kick=lambda: None)
        self.gone: list[bytes] = []
        broker: Any = SimpleNamespace(
            link=self.link, relinked=-1e9, drop_assignment=lambda token, operation: self.gone.append(token)
        )
        self.broker = broker
        self.kept = Lingering(broker)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_nothing_goes_while_a_server_may_send_again_what_it_forgot(bench: Bench) -> None:
    """NATS is away, then it is back for a moment, then for long enough."""
    bench.kept.add(b"=1", Silent())
    bench.link.online = False
    bench.pass_to(50)
    bench.link.online, bench.broker.relinked = True, 50.0
    bench.kept.add(b"&reply", Silent())
    bench.pass_to(149)
    assert not bench.gone
    assert not bench.link.out
    bench.pass_to(161)
    assert bench.gone == [b"1"]
    assert bench.link.out == [b"PUB reply 0\r\n\r\n"]
    bench.kept.add(b"=2", Silent())
    bench.pass_to(172)
    assert bench.gone == [b"1", b"2"]


def test_all_of_it_goes_with_the_connection(bench: Bench) -> None:
    """Else the next owner would find a record that goes away under its hands."""
    bench.kept.add(b"=1", Silent())
    bench.kept.add(b"&reply", Silent())
    bench.kept.end()
    assert (bench.gone, bench.link.out) == ([b"1"], [b"PUB reply 0\r\n\r\n"])


@pytest.mark.parametrize("online", [False, True])
def test_the_next_owner_finds_what_a_server_may_send_again(bench: Bench, online: bool) -> None:
    bench.kept.add(b"=1", Silent())
    bench.kept.add(b"&reply", Silent())
    bench.link.online, bench.broker.relinked = online, 0.0
    bench.pass_to(5)
    bench.kept.end()
    bench.link.online = True
    bench.pass_to(1000)
    assert (bench.gone, bench.link.out) == ([], [])


def test_what_is_complete_after_the_end_is_left_to_the_next_owner(bench: Bench) -> None:
    """It may have read the record already."""
    bench.kept.end()
    bench.kept.add(b"&reply", Silent())
    bench.pass_to(1000)
    assert bench.link.out == []
