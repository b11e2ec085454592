# SPDX-License-Identifier: Apache-2.0
"""The single points of sessions that move between consumers and records (`session_positions = "auto"`)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Final

from tests.chaos.points.fleet import Slot
from tests.chaos.points.scenes import PATIENCE, Point, Scene, Script
from tests.chaos.points.table import each, named, packets
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually

BOUND: Final = 200
"""`session_consumers` of the gateways; sessions of all scenes together have fewer than three quarters of them."""

MOVING: Final = ("--session-positions", "auto", "--session-consumers", f"{BOUND}")
"""Flags of the gateways."""

MIXED: Final = tuple(
    ("--session-positions", *flags) for flags in (("records",), ("consumers",), ("auto", "--session-consumers", "4"))
)
"""Flags of three gateways, of which each has sessions move that come from another one."""

OTHERS: Final = BOUND + BOUND // 2
"""Consumers of nobody with which the number is beyond the bound."""

_PROBES: Final = itertools.count(1)


async def _set_number(scene: Scene, slot: Slot, *, beyond: bool) -> None:
    """Bring the number of consumers beyond the bound, or below it, and wait until a gateway knows it."""

    async def change(name: str) -> None:
        if beyond:
            config = {"durable_name": name, "filter_subject": "$MQTT.msgs.other", "ack_policy": "explicit"}
            body = {"stream_name": "$MQTT_msgs", "config": config}
            await scene.fleet.request(f"CONSUMER.DURABLE.CREATE.$MQTT_msgs.{name}", **body)
        else:
            await scene.fleet.request(f"CONSUMER.DELETE.$MQTT_msgs.{name}")

    await asyncio.gather(*(change(f"other{number}") for number in range(OTHERS)))

    async def known() -> bool:
        probe = f"number{next(_PROBES)}"
        client = await RawClient.connect(slot.port, probe, clean=False)
        await client.subscribe(probe, qos=1)
        found = await scene.fleet.in_records(probe)
        await client.disconnect()
        await (await RawClient.connect(slot.port, probe)).disconnect()
        return found is beyond

    await aeventually(known, PATIENCE, what=f"{slot.name} knows the number of consumers")


async def _move(scene: Scene, *, to_records: bool) -> None:
    """A session returns to the gateway, owes answers, has missed messages at each QoS, and moves."""
    await _set_number(scene, scene.other, beyond=not to_records)
    client = scene.main = await scene.subscriber("durable", scene.other)
    client.subscribe(f"{scene.topic}/#", 1)
    await scene.settled(client)
    await scene.live(client, 3)
    assert await scene.fleet.in_records(client.client_id) is not to_records
    publisher = scene.peer("publisher", scene.other)
    await scene.unanswered(client, publisher, (2, 2), (3, 1))
    client.ports = []
    client.drop()
    await aeventually(lambda: not client.online.is_set(), PATIENCE)
    for n, qos in ((4, 1), (5, 2), (6, 2)):
        publisher.publish(scene.topic, n, qos)
    await scene.settled(publisher)
    for slot in (scene.victim, scene.other):
        await _set_number(scene, slot, beyond=to_records)
    scene.arm(scene)
    client.ports = [scene.victim.port, scene.other.port]

    async def once_more() -> None:
        publisher.publish(scene.topic, 7, 2)
        await scene.live(client, 3)

        async def moved() -> bool:
            return await scene.fleet.in_records(client.client_id) is to_records

        await aeventually(moved, PATIENCE)  # consumers are removed while the session goes on

    scene.later.append(once_more)


to_records: Final[Script] = named("move to records")(partial(_move, to_records=True))
to_consumers: Final[Script] = named("move to consumers")(partial(_move, to_records=False))


def _points() -> Iterator[Point]:
    claim, position = "$MQTT.sess.{hash}", "$MQTT.pos.{hash}"
    creating = "$JS.API.CONSUMER.DURABLE.CREATE.$MQTT_msgs."
    deleting = "$JS.API.CONSUMER.DELETE.$MQTT_msgs."
    for way in ("up", "answer"):
        yield from each(to_records, way, claim, position, deleting)
        yield from each(to_records, way, claim, nth=2)
        yield from each(to_consumers, way, claim, position, creating)
        yield from each(to_consumers, way, claim, position, creating, nth=2)
    for script in (to_records, to_consumers):
        for kind in ("CONNACK", "PUBREL", "PUBLISH"):
            yield from packets(script, kind, "lost", "answered")


MOVES_POINTS: Final = list(_points())
SOME_MOVES: Final = MOVES_POINTS[::12]
"""Those of them that tests take."""
