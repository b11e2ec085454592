# SPDX-License-Identifier: Apache-2.0
"""Held QoS 2 publishes of earlier connections: which of them a session goes on with, and which come too late."""

from __future__ import annotations

import pytest

from mqtt_nats.client.client import Client
from mqtt_nats.ingress import held_takeover
from mqtt_nats.ingress.held_takeover import take_over_held
from mqtt_nats.ingress.qos2 import Inbound
from mqtt_streams.hashing import held_token
from mqtt_streams.qos2 import LATE_NS, STREAM, held_block, held_subject
from mqtt_streams.sessions import V5, SessionRecord
from tests.harness.doubles import stands_for
from tests.harness.jetstream import NS
from tests.harness.waiting import aeventually
from tests.ingress.fakes import FakePublisher, FakePublishingServices, as_publisher

pytestmark = pytest.mark.sources

CLAIMED = 100 * NS
"""Time of the last record of the previous connection, in nanoseconds since 1970."""


@stands_for(Client)
class FakeHolder(FakePublisher):
    """Stands for `Client`, which has claimed its session with epoch 20, after epochs 5 and 10."""

    def __init__(self) -> None:
        super().__init__(FakePublishingServices())
        self.token = held_token(self.client_id, self.hash)
        self.qos2: Inbound | None = Inbound()
        self.epoch = 20

    @property
    def inbound(self) -> Inbound:
        assert self.qos2 is not None
        return self.qos2

    @property
    def fake_held(self) -> list[int]:
        """Packet identifiers of the records in the stream."""
        return [int(one.rpartition(".")[2]) for one in self.services.fake_inbox.subjects(STREAM)]

    def fake_hold(self, identifier: int, epoch: int, after: float = 0.0, subject: bytes = b"a") -> None:
        """A gateway holds a publish for a connection, some seconds after `CLAIMED`."""
        js = self.services.fake_inbox
        js.now = CLAIMED - NS + int(after * NS)
        js.put(held_subject(self.token, identifier), b"x", held_block(subject, 4, epoch, b"0" * 32))

    async def fake_take_over(self, first: int = 0) -> None:
        """Take over; the previous connection's claim had replaced the record with sequence 5."""
        record = SessionRecord(self.client_id, v5=V5(first=first), time_ns=CLAIMED)
        await take_over_held(as_publisher(self), 5, record)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late records are looked for at once."""
    monkeypatch.setattr(held_takeover, "FORMER_HOLDS_S", 0.0)


async def test_what_earlier_connections_held_is_held() -> None:
    """[MQTT-4.3.3-10] (5.0): their PUBREL is answered by PUBCOMP, and a repeated PUBLISH is not published twice."""
    client = FakeHolder()
    client.fake_hold(1, 5)
    client.fake_hold(7, 10)
    client.fake_hold(9, 0)  # of nats-server's listener
    await client.fake_take_over()
    assert list(client.inbound.machine.states) == [1, 7, 9]
    assert client.fake_held == [1, 7, 9]


async def test_a_record_that_names_no_topic_is_not_taken_over(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeHolder()
    client.fake_hold(1, 10, subject=b"a.+.b")
    await client.fake_take_over()
    assert client.inbound.machine.states == {}
    assert "names no topic" in caplog.text


@pytest.mark.parametrize(
    ("epoch", "after", "late"),
    [
        (5, LATE_NS / NS + 0.001, True),
        (4, LATE_NS / NS + 0.001, True),
        (5, LATE_NS / NS, False),  # the previous connection has seen it
        (6, LATE_NS / NS + 0.001, False),  # held by the previous connection itself
        (0, LATE_NS / NS + 0.001, False),  # nats-server's listener names no epoch
    ],
)
async def test_what_a_former_owner_held_too_late_is_removed(
    epoch: int, after: float, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The client has sent it again to the owner: a later PUBLISH with the identifier is another message."""
    caplog.set_level("INFO", "mqtt_nats.broker")
    client = FakeHolder()
    client.fake_hold(1, epoch, after)
    await client.fake_take_over()
    assert (client.fake_held, list(client.inbound.machine.states)) == (([], []) if late else ([1], [1]))
    assert ("a held publish that was stored too late is removed (sequence 1)" in caplog.text) is late


@pytest.mark.parametrize(("epoch", "kept"), [(7, False), (8, True), (0, True)])
async def test_what_was_held_for_an_earlier_session_is_removed(epoch: int, kept: bool) -> None:
    """[MQTT-3.1.2-4] (5.0): a clean start discards it; the session began with sequence 8."""
    client = FakeHolder()
    client.fake_hold(1, epoch)
    await client.fake_take_over(first=8)
    assert client.fake_held == ([1] if kept else [])
    assert list(client.inbound.machine.states) == ([1] if kept else [])


@pytest.mark.usefixtures("soon")
async def test_what_is_held_elsewhere_after_the_claim_is_removed_later() -> None:
    client = FakeHolder()
    client.fake_hold(1, 10)
    await client.fake_take_over()
    client.fake_hold(2, 10)
    client.fake_hold(3, 19)
    client.fake_hold(4, 20)
    client.fake_hold(5, 21)
    await aeventually(lambda: bool(client.fake_jobs))
    assert client.fake_held == [1, 2, 3, 4, 5]
    (job,) = client.fake_jobs
    await job
    assert client.fake_held == [1, 4, 5]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("how", ["gone", "ended", "connected again"])
async def test_a_later_connection_looks_for_itself(how: str) -> None:
    client = FakeHolder()
    await client.fake_take_over()
    if how == "gone":
        client.services.registry.clients.clear()
    elif how == "ended":
        client.alive = False
    else:
        client.qos2 = Inbound()
    other = FakeHolder()
    await other.fake_take_over()
    await aeventually(lambda: bool(other.fake_jobs))  # its timer is the later one
    assert client.fake_jobs == []
    await other.fake_jobs[0]
