# SPDX-License-Identifier: Apache-2.0
"""A nats-server is lost with the live copies that it had not passed on: other gateways read the stored copies."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.base import server_clock
from mqtt_nats.messages.live_copies import IDS_REMEMBERED_S
from mqtt_nats.pubsub import lost_servers as module
from mqtt_nats.pubsub.backfill import BACKLOG_BYTES, GAP_BEFORE_S
from mqtt_nats.pubsub.lost_servers import LostServers
from mqtt_streams.api import NoResponders
from mqtt_streams.gateway_subjects import ECHO, LOST
from tests.pubsub.support import Subscriber
from tests.pubsub.test_backfill import SINCE, Gap, begun
from tests.sessions.fakes import FakeLink, as_link, as_tasks


class Scene(Gap):
    """A gateway on the server OWN, and gateways elsewhere that name lost servers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.nats.gaps.clear()
        self.link = self.lost
        self.link.heard = 0.0
        self.link.server = {"server_id": "OWN"}
        self.servers = LostServers(self.nats, self.gaps, as_tasks(self.services.tasks))
        self.alive = False
        self.js.before = self.asked
        monkeypatch.setattr(server_clock, "now", lambda: SINCE + 1)
        monkeypatch.setattr(server_clock, "converted", lambda here: SINCE + here)

    def asked(self, subject: str) -> None:
        if subject.startswith(ECHO.decode()) and not self.alive:
            raise NoResponders(subject)

    def store(self, payload: bytes, at: float = SINCE + 1, topic: str = "a.b", identity: str | None = None) -> None:
        """Store a message; each has an id of its own."""
        super().store(payload, at, topic, f"{payload.decode():0>24}" if identity is None else identity)

    def name(self, payload: bytes = b"GONE 1000") -> None:
        """Another gateway names the server that it has lost."""
        self.link.fake_bring(LOST, payload)

    async def done(self) -> None:
        await self.services.tasks.fake_settle()

    def moves_to(self, server: str) -> list[bytes]:
        """Lose the connection, and connect to a server; what is sent then."""
        for up in (False, True):
            if up:
                self.link.server = {"server_id": server}
            for changed in self.link.fake_wired:
                changed(up)
        sent, self.link.out[:] = list(self.link.out), []
        return sent


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


async def test_a_gateway_names_the_server_that_it_has_left(scene: Scene) -> None:
    scene.link.heard = 7.9
    assert scene.moves_to("NEW") == [b"PUB $MQTT.gateways.lost 8\r\nOWN 1007\r\n"]
    scene.nats.reconnect.renew(Phase.SESSIONS)  # nats-server has it
    assert scene.moves_to("NEW") == []
    assert scene.moves_to("THIRD") == [b"PUB $MQTT.gateways.lost 8\r\nNEW 1007\r\n"]


async def test_a_name_that_may_not_have_left_is_repeated(scene: Scene) -> None:
    """The next connection was lost at once. A server that comes back has lost nothing."""
    scene.moves_to("NEW")
    scene.link.heard = 3.0
    assert scene.moves_to("THIRD") == [
        b"PUB $MQTT.gateways.lost 8\r\nOWN 1000\r\n",
        b"PUB $MQTT.gateways.lost 8\r\nNEW 1003\r\n",
    ]
    assert scene.moves_to("NEW")[:1] == [b"PUB $MQTT.gateways.lost 8\r\nOWN 1000\r\n"]


async def test_the_other_connection_may_have_been_there(scene: Scene) -> None:
    cast(FakeLink, scene.nats.wild).server = {"server_id": "GONE"}
    scene.subscribe("a/b")
    scene.store(b"1")
    scene.name()
    await scene.done()
    assert scene.taken == b"1"


@pytest.mark.parametrize("alive", [True, False])
async def test_a_gap_of_the_connection_itself_is_repaired_as_a_whole(scene: Scene, alive: bool) -> None:
    """The connection is back, its repair has not begun, and another gateway names a server."""
    scene.alive = alive
    link = as_link(scene.link)
    scene.subscribe("a/b")
    scene.store(b"1", SINCE - 30)
    scene.nats.gaps[link] = SINCE - 30
    scene.expect()
    scene.name()
    await scene.done()
    assert scene.taken == b""
    scene.bring(b"2")
    await scene.repair()
    assert scene.taken == b"12"


async def test_messages_without_an_id_are_not_read(scene: Scene) -> None:
    """Nothing tells which of them have come."""
    scene.subscribe("a/b")
    scene.store(b"1", identity="")
    scene.store(b"2")
    scene.name()
    await scene.done()
    assert scene.taken == b"2"


async def test_messages_without_an_id_that_had_no_room_are_read(scene: Scene) -> None:
    """They have come, and were dropped; those of before have come, too."""
    scene.subscribe("a/b")
    scene.store(b"1", SINCE, identity="")
    scene.name()
    scene.bring(bytes(BACKLOG_BYTES))
    scene.store(b"2", SINCE + 1, identity="")
    await scene.done()
    assert scene.taken == b"2"


async def test_nothing_stays_queued_when_the_last_regular_session_leaves_meanwhile(scene: Scene) -> None:
    scene.alive = True
    durable = Subscriber(scene.bench, "durable", durable=True)
    found = scene.subscribe("a/b")
    scene.subscribe("a/b", member=durable)
    scene.name()
    scene.bench.table.leave(scene.member)
    await scene.done()
    assert found.backlog is None


async def test_a_second_suspicion_keeps_the_queue_of_the_first_one(scene: Scene) -> None:
    """A server is named that is alive, and then one that is lost."""
    scene.subscribe("a/b")
    scene.store(b"1")

    def asked(subject: str) -> None:
        if subject.endswith("GONE"):
            raise NoResponders(subject)

    scene.js.before = asked
    scene.name(b"ALIVE 1000")
    scene.name()
    scene.bring(b"2")
    await scene.done()
    assert scene.taken == b"12"


async def test_what_the_lost_server_has_not_passed_on_comes_before_what_is_new(scene: Scene) -> None:
    scene.subscribe("a/b")
    scene.store(b"1")
    scene.name()
    scene.bring(b"2")
    assert scene.taken == b""
    await scene.done()
    assert scene.taken == b"12"


@pytest.mark.parametrize(("read_at", "wanted"), [(SINCE - 0.5, b"2"), (SINCE - 1.5, b"")])
async def test_what_a_new_subscription_counts_as_come_may_be_on_its_way_yet(
    scene: Scene, read_at: float, wanted: bytes
) -> None:
    """The leader has counted it, and another server has not passed it on."""
    found = scene.subscribe("a/b")
    begun(scene, found, scene.member, 2, SINCE, exact=True)
    assert found.beginnings
    found.beginnings[scene.member].read_at = read_at
    scene.store(b"1", SINCE - 1)
    scene.store(b"2")
    scene.name()
    await scene.done()
    assert scene.taken == wanted


async def test_nothing_is_read_while_a_gateway_answers_there(scene: Scene) -> None:
    scene.alive = True
    scene.subscribe("a/b")
    scene.store(b"1")
    scene.name()
    scene.bring(b"2")
    await scene.done()
    assert scene.taken == b"2"
    assert scene.js.asked == ["$MQTT.gateways.echo.GONE"]
    scene.alive = False  # a moment later it is lost
    scene.name()
    await scene.done()
    assert scene.taken == b"21"


async def test_what_had_no_room_is_read_although_the_server_is_there(scene: Scene) -> None:
    scene.alive = True
    scene.subscribe("a/b")
    scene.store(b"1")
    scene.name()
    scene.bring(bytes(BACKLOG_BYTES))
    await scene.done()
    assert scene.taken == b"1"


async def test_a_server_is_lost_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its gateways names it, and the gateway itself may have been connected there."""
    scene.name()
    scene.name()
    await scene.done()
    assert scene.js.asked.count("$MQTT.gateways.echo.GONE") == 1
    scene.moves_to("NEW")
    scene.name(b"OWN 1000")
    await scene.done()
    assert "$MQTT.gateways.echo.OWN" not in scene.js.asked
    monkeypatch.setattr(module, "ONE_LOSS_S", 0.0)
    scene.name(b"OWN 1000")
    await scene.done()
    assert "$MQTT.gateways.echo.OWN" in scene.js.asked


@pytest.mark.parametrize(
    "payload", [b"", b"OWN 1000", b"GONE", b"GONE x", b"GONE -1", b"A.B 1000", b"> 1000", b"A" * 65 + b" 1", b"A 1e9"]
)
async def test_what_is_not_looked_at(scene: Scene, payload: bytes) -> None:
    """The own server, and what no gateway sends."""
    found = scene.subscribe("a/b")
    scene.name(payload)
    assert (found.backlog, scene.services.tasks.fake_spawned) == (None, [])


async def test_the_number_of_servers_is_limited(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SERVERS_NOTED_MOST", 2)
    for number in range(4):
        scene.name(b"GONE%d 1000" % number)
    await scene.done()
    assert sum(one.startswith("$MQTT.gateways.echo.") for one in scene.js.asked) == 2


@pytest.mark.parametrize(("heard", "wanted"), [(SINCE - 100, "later"), (SINCE + 1, "here")])
async def test_messages_whose_ids_may_be_forgotten_are_not_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, heard: float, wanted: str
) -> None:
    """A gateway may name its server late."""
    sinces: list[float] = []

    async def repair(link: Any, since: float, missed: Any) -> None:
        sinces.append(since)

    monkeypatch.setattr(scene.gaps, "suspect", repair)
    scene.name(b"GONE %d" % heard)
    await scene.done()
    assert sinces == [{"later": SINCE + 1 - IDS_REMEMBERED_S + GAP_BEFORE_S, "here": heard}[wanted]]


async def test_a_connection_that_is_lost_meanwhile_repairs_both_gaps(scene: Scene) -> None:
    link = as_link(scene.link)
    scene.subscribe("a/b")
    scene.store(b"1")
    scene.name()
    scene.link.wire = object()
    scene.nats.gaps[link] = SINCE + 50
    await scene.done()
    assert scene.nats.gaps == {link: SINCE}
    scene.expect()
    await scene.repair()
    assert scene.taken == b"1"


async def test_both_connections_listen(scene: Scene) -> None:
    wild = cast(FakeLink, scene.nats.wild)
    assert [LOST in link.fake_subjects.values() for link in (scene.link, wild)] == [True, True]
    scene.servers.renew(as_link(scene.link))
    assert scene.link.fake_renewed[-1][1] == LOST
