# SPDX-License-Identifier: Apache-2.0
"""When tombstones go."""

import pytest

from mqtt_nats.backbone.pending_stores import IgnoredStore, PendingStore
from mqtt_nats.ingress.retained.store import TOMBSTONE_READ_S, RetainedStores, Tombstones, retain
from mqtt_nats.pubsub.routing_table import Route
from mqtt_streams.api import ApiError
from tests.harness.doubles import Timers
from tests.sessions.fakes import FakeServices, as_services


class Waiting(PendingStore):
    """What a removal is part of."""

    def __init__(self) -> None:
        self.done: list[bytes] = []

    def stored(self, ack: bytes) -> None:
        """It is done."""
        self.done.append(ack)


class Bench:
    """A gateway's tombstones, a clock, and what was removed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at_once: bool = False) -> None:
        self.timers = Timers(monkeypatch)
        self.pass_to = self.timers.pass_to
        services = FakeServices()
        self._called = services.fake_store.fake_called
        self.tombstones = Tombstones(services.nats, b"purge", at_once=at_once)

    @property
    def calls(self) -> list[bytes]:
        """Bodies of the requests."""
        return [body for _, body, _ in self._called]

    @property
    def operations(self) -> list[PendingStore]:
        """What waits for their answers."""
        return [operation for _, _, operation in self._called]

    def add(self, sequence: int) -> Waiting:
        waiting = Waiting()
        self.tombstones.add("$MQTT.rmsgs.a", sequence, waiting, b"ack")
        return waiting

    @property
    def gone(self) -> int:
        return len(self.calls)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_each_stays_until_listeners_have_heard_of_it(bench: Bench) -> None:
    assert bench.add(7).done  # nobody waits for it
    bench.pass_to(TOMBSTONE_READ_S / 2)
    bench.add(8)
    assert bench.gone == 0
    bench.pass_to(TOMBSTONE_READ_S)
    assert bench.calls == [b'{"filter":"$MQTT.rmsgs.a","seq":8}']
    bench.pass_to(TOMBSTONE_READ_S * 1.5)
    assert bench.gone == 2
    bench.add(9)
    assert bench.gone == 2
    bench.pass_to(TOMBSTONE_READ_S * 3)
    assert bench.gone == 3
    assert not bench.timers.due


def test_none_is_left_by_a_gateway_that_ends(bench: Bench) -> None:
    bench.add(7)
    bench.add(8)
    bench.tombstones.delete_all()
    assert bench.gone == 2
    bench.pass_to(TOMBSTONE_READ_S * 2)
    assert bench.gone == 2
    bench.add(9)  # stored while the gateway ends
    assert bench.gone == 3


def test_one_takes_no_place_that_a_message_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, at_once=True)
    waiting = [bench.add(7), bench.add(8)]
    assert bench.gone == 2
    assert not any(one.done for one in waiting)  # PUBACK says that the place is free
    bench.operations[0].stored(b"")
    bench.operations[1].failed(ApiError(404, 10037, "no message found"))
    assert [one.done for one in waiting] == [[b"ack"], [b"ack"]]


@pytest.mark.parametrize(("payload", "ends"), [(b"", True), (b"x", False)])
def test_one_ends_by_itself_where_its_gateway_dies(payload: bytes, ends: bool) -> None:
    services = FakeServices()
    stores = RetainedStores(as_services(services), limited=False)
    retain(stores, Route(b"\0\1a", "a", "a"), payload, 1, IgnoredStore(), b"")
    ((_, headers, _, _),) = services.fake_store.fake_put
    assert (b"\r\nNats-TTL:60s\r\n" in headers) is ends
