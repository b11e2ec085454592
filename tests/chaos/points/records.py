# SPDX-License-Identifier: Apache-2.0
"""The single points of gateways whose sessions have no consumers (`session_positions = "records"`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.chaos.points.scenes import PATIENCE, Point, Scene
from tests.chaos.points.table import (
    SERVED_POINTS,
    beginning_anew,
    each,
    named,
    packets,
    subscribing,
    unsubscribing,
)
from tests.harness.waiting import aeventually


@named("catch up")
async def catching_up(scene: Scene) -> None:
    """A session returns to the gateway, owes answers, and has missed messages at each QoS."""
    client = scene.main = await scene.subscriber("durable", scene.other)
    await scene.live(client)
    publisher = scene.peer("publisher", scene.other)
    await scene.unanswered(client, publisher, (2, 2), (3, 1))
    client.ports = []
    client.drop()
    await aeventually(lambda: not client.online.is_set(), PATIENCE)
    for n, qos in ((4, 1), (5, 2), (6, 2)):
        publisher.publish(scene.topic, n, qos)
    await scene.settled(publisher)
    scene.arm(scene)
    client.ports = [scene.victim.port, scene.other.port]

    async def once_more() -> None:
        publisher.publish(scene.topic, 7, 2)

    scene.later.append(once_more)


def _points() -> Iterator[Point]:
    yield from SERVED_POINTS
    claim, position, stored = "$MQTT.sess.{hash}", "$MQTT.pos.{hash}", "$MQTT.msgs.{bare}"
    reading, asking = "$JS.API.CONSUMER.CREATE.$MQTT_msgs.", "$JS.API.CONSUMER.MSG.NEXT.$MQTT_msgs."
    for way in ("up", "answer"):
        yield from each(catching_up, way, claim, reading, position)
        yield from each(catching_up, way, position, nth=2)
    yield from each(catching_up, "up", asking)
    yield from each(catching_up, "down", stored)
    yield from each(catching_up, "down", stored, nth=2)
    for kind in ("CONNACK", "PUBREL", "PUBLISH"):
        yield from packets(catching_up, kind, "lost", "unanswered", "answered")
    for script in (subscribing, unsubscribing):
        yield from each(script, "up", claim, position)
        yield from each(script, "answer", claim, position)
    yield from packets(subscribing, "SUBACK", "lost")
    yield from packets(unsubscribing, "UNSUBACK", "lost", "answered")
    yield from each(beginning_anew, "up", claim, "$JS.API.STREAM.PURGE.")
    yield from each(beginning_anew, "answer", claim, "$JS.API.STREAM.PURGE.")


RECORDS_POINTS: Final = list(_points())
SOME_RECORDS: Final = RECORDS_POINTS[::6]
"""Those of them that tests take."""
