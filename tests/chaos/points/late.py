# SPDX-License-Identifier: Apache-2.0
"""A gateway whose connection to NATS stands still at a frame until its clients have gone on elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from mqtt_streams.hashing import name_hash
from tests.chaos.history import Event
from tests.chaos.points.fleet import Fleet, Slot
from tests.chaos.points.moves import MOVES_POINTS
from tests.chaos.points.proxy import Action, Trap
from tests.chaos.points.records import RECORDS_POINTS
from tests.chaos.points.scenes import DELIVERY, PATIENCE, Point, Scene
from tests.chaos.points.table import POINTS, beginning_anew, named, renewing
from tests.harness.waiting import aeventually


@named("leave")
async def leaving(scene: Scene) -> None:
    """A connection ends whose session has messages in every state; the client comes back elsewhere."""
    client = scene.main = await scene.subscriber("durable", scene.victim, scene.other)
    await scene.live(client)
    publisher = scene.peer("publisher", scene.other)
    await scene.unanswered(client, publisher, (2, 2), (3, 1), (4, 2))
    client.ports = [scene.other.port, scene.victim.port]
    scene.arm(scene)
    client.drop()

    async def once_more() -> None:
        publisher.publish(scene.topic, 5, 2)

    scene.later.append(once_more)


def _held(points: list[Point]) -> Iterator[Point]:
    """The same frames, each once; not where the gateway has to die."""
    known = set()
    for point in points:
        where = (point.scene, point.way, point.prefix, point.nth)
        if not point.way.isupper() and point.scene is not renewing and where not in known:
            known.add(where)
            yield Point(point.scene, point.way, point.prefix, Action.HOLD, point.nth)


def _served_held(points: list[Point], *more: str) -> Iterator[Point]:
    """The frames of points, and those with which a connection ends; ``more``: prefixes of others."""
    yield from _held(points)
    for way in ("up", "answer"):
        for prefix in ("$MQTT.pos.{hash}", "$JS.API.STREAM.MSG.GET.$MQTT_sess", *more):
            yield Point(leaving, way, prefix, Action.HOLD)


LATE: Final = list(_served_held(POINTS, "$MQTT.out.pubrel.{hash}", "$JS.API.CONSUMER.RESET.$MQTT_msgs."))
"""Those of gateways whose sessions have consumers."""
LATE_RECORDS: Final = list(_served_held(RECORDS_POINTS))
"""Those of gateways whose sessions have no consumers: the sessions leave PUBRELs in their positions."""
LATE_MOVES: Final = list(_held(MOVES_POINTS))
"""Those of gateways whose sessions move between consumers and records."""

SOME_LATE: Final = LATE[::9]
SOME_LATE_RECORDS: Final = LATE_RECORDS[::9]
SOME_LATE_MOVES: Final = LATE_MOVES[::8]
"""Those of them that tests take."""


async def run_late(fleet: Fleet, point: Point, victim: Slot, other: Slot, *, dropped: bool) -> list[Event]:
    """Hold a connection of a gateway up at a point, and see that what it does afterwards harms nobody.

    Args:
        fleet: of both gateways.
        point: where; its action is `HOLD`.
        victim: that gateway.
        other: where its clients go.
        dropped: their connections to the victim are closed by then; else they stay open, unread.

    Returns:
        The history of all clients.

    Raises:
        AssertionError: a promise was broken, or the point was not reached.
    """
    traps: list[Trap] = []
    movers: list[asyncio.Task[None]] = []

    async def move(scene: Scene, trap: Trap) -> None:
        await trap.sprung.wait()
        for peer in scene.peers:
            if peer.port == victim.port:
                peer.ports = [other.port, victim.port]
                if dropped or not peer.online.is_set():
                    peer.drop()
                else:
                    peer.abandon()

    def arm(scene: Scene) -> None:
        client = name_hash(scene.main.client_id) if scene.main is not None else ""
        prefix = point.prefix.format(bare=scene.topic.replace("/", "."), hash=client)
        trap = victim.proxy.set(point.way, prefix, point.action, point.nth)
        traps.append(trap)
        movers.append(asyncio.get_running_loop().create_task(move(scene, trap)))

    scene = Scene(fleet, victim, other, arm)

    def all_there() -> bool:
        missing = scene.missing()
        assert not missing, missing
        return True

    try:
        await point.scene(scene)
        (trap,) = traps
        await aeventually(trap.sprung.is_set, PATIENCE, what=f"reached: {point}")
        await asyncio.gather(*movers)
        if point.scene is not beginning_anew:
            publisher = scene.peer("meanwhile", other)
            for topic in {expected.topic for expected in scene.expected}:
                for n in range(1, 5):
                    publisher.publish(topic, n, n % 2 + 1)
        await scene.settled()
        await aeventually(all_there, DELIVERY, what="everything delivered meanwhile")
        await aeventually(lambda: not any(peer.holding for peer in scene.peers), DELIVERY, what="everything released")
        trap.release()
        probe = scene.peer("probe", victim, clean=True)
        probe.publish(f"{scene.topic}/probe", 1, 1)
        await scene.settled(probe)
        for step in scene.later:
            await step()
        await scene.settled()
        await aeventually(all_there, DELIVERY, what="everything delivered")
        await scene.at_rest()
        assert not scene.missing()
        wrong = scene.wrong()
        assert not wrong, wrong
        assert victim.alive
    finally:
        for mover in movers:
            mover.cancel()
        for trap in traps:
            trap.release()
            if trap in victim.proxy.traps:
                victim.proxy.traps.remove(trap)
        await scene.close()
    return scene.events
