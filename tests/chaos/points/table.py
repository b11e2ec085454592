# SPDX-License-Identifier: Apache-2.0
"""The single points: what clients do, and at which frame or packet their gateway dies meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from mqtt_streams.hashing import name_hash
from tests.chaos.points.peer import Peer
from tests.chaos.points.proxy import Action
from tests.chaos.points.scenes import PATIENCE, Expected, Point, Scene, Script
from tests.harness.waiting import aeventually

BOTH: Final = (Action.BEFORE, Action.AFTER)
DROP: Final = Action.DROP


def named(name: str) -> Callable[[Script], Script]:
    """Give a scene the name under which its points are listed."""

    def name_it(script: Script) -> Script:
        script.name = name  # type: ignore[attr-defined]
        return script

    return name_it


def publishing(qos: int, retain: bool = False, count: int = 3) -> Script:
    """A client publishes through the gateway; a durable and a regular subscriber are on another one."""

    @named(f"publish{'' if count == 3 else f' {count}'} at QoS {qos}{' retained' if retain else ''}")
    async def script(scene: Scene) -> None:
        await scene.subscriber("durable", scene.other)
        await scene.subscriber("regular", scene.other, clean=True)
        publisher = scene.main = scene.peer("publisher", scene.victim, scene.other)
        publisher.publish(scene.topic, 0, qos, retain=retain)
        await scene.settled(publisher)
        scene.arm(scene)
        for n in range(1, count + 1):
            publisher.publish(scene.topic, n, qos, retain=retain)

        async def once_more() -> None:
            publisher.publish(scene.topic, count + 1, qos, retain=retain)
            await scene.settled(publisher)
            if retain:
                late = scene.peer("late", scene.other)
                late.subscribe(scene.topic, 2)
                await scene.has(late, 1)
                await scene.settled(late)
                kept = [(one.payload.split()[-1], one.retain) for one in late.delivered]
                assert kept == [(b"%d" % (count + 1), True)]

        scene.later.append(once_more)

    return script


def receiving(qos: int) -> Script:
    """A durable session gets messages through the gateway."""

    @named(f"receive at QoS {qos}")
    async def script(scene: Scene) -> None:
        scene.main = await scene.subscriber("durable", scene.victim, scene.other)
        publisher = scene.peer("publisher", scene.other)
        publisher.publish(scene.topic, 0, qos)
        await scene.has(scene.main, 1)
        await scene.live(scene.main)
        await scene.at_rest()
        scene.arm(scene)
        for n in range(1, 4):
            publisher.publish(scene.topic, n, qos)

        async def once_more() -> None:
            publisher.publish(scene.topic, 4, qos)

        scene.later.append(once_more)

    return script


@named("take over")
async def taking_over(scene: Scene) -> None:
    """The gateway takes a session over that has messages in every state."""
    client = scene.main = await scene.subscriber("durable", scene.other)
    await scene.live(client)
    publisher = scene.peer("publisher", scene.other)
    await scene.unanswered(client, publisher, (2, 2), (3, 1), (4, 2))
    client.publish(f"{scene.topic}/own", 1, 1)
    client.ports = [scene.victim.port, scene.other.port]
    scene.arm(scene)
    client.abandon()

    async def once_more() -> None:
        publisher.publish(scene.topic, 5, 2)

    scene.later.append(once_more)


@named("take over between releases")
async def taking_over_publisher(scene: Scene) -> None:
    """The gateway takes over a session with held publishes."""
    await scene.subscriber("durable", scene.other)
    await scene.subscriber("regular", scene.other, clean=True)
    client = scene.main = scene.peer("publisher", scene.other)
    client.withheld = {"PUBREC"}
    for n in range(3):
        client.publish(scene.topic, n, 2)
    await aeventually(lambda: len(client.unanswered) == 3, PATIENCE)
    client.withheld.clear()
    client.ports = [scene.victim.port, scene.other.port]
    scene.arm(scene)
    client.abandon()


@named("subscribe")
async def subscribing(scene: Scene) -> None:
    """A durable session subscribes, while it has another subscription that matches the same."""
    client = scene.main = await scene.subscriber("durable", scene.victim, scene.other)
    scene.arm(scene)
    client.subscribe(f"{scene.topic}/#", 1)

    async def use_it() -> None:
        publisher = scene.peer("publisher", scene.other)
        for n, topic in enumerate((scene.topic, f"{scene.topic}/below") * 2):
            scene.expected.append(Expected(client, topic))
            publisher.publish(topic, n, 2)
        await scene.settled(publisher)

    scene.later.append(use_it)


@named("unsubscribe")
async def unsubscribing(scene: Scene) -> None:
    """A durable session unsubscribes while it has messages in flight; another subscription matches the same."""
    topic = f"{scene.topic}/in"
    client = scene.main = await scene.subscriber("durable", scene.victim, scene.other, topic=topic)
    client.subscribe(f"{scene.topic}/+", 2)
    await scene.settled(client)
    publisher = scene.peer("publisher", scene.other)
    client.withheld = {"PUBREL"}
    publisher.publish(topic, 0, 2)
    await aeventually(lambda: client.unanswered == ["PUBCOMP"], PATIENCE)
    client.withheld = {"PUBLISH", "PUBREL"}
    for n in (1, 2):
        publisher.publish(topic, n, n)
    await scene.has(client, 3)
    scene.arm(scene)
    client.unsubscribe(topic)
    await scene.settled()
    client.answer()

    async def once_more() -> None:
        publisher.publish(topic, 3, 2)

    scene.later.append(once_more)


@named("begin anew")
async def beginning_anew(scene: Scene) -> None:
    """A clean start at the gateway ends a session with messages in every state on another gateway."""
    client = scene.main = scene.peer("durable", scene.other, version=5)
    client.subscribe(scene.topic, 2)
    await scene.settled(client)
    publisher = scene.peer("publisher", scene.other)
    client.withheld = {"PUBLISH", "PUBREC"}
    publisher.publish(scene.topic, 0, 2)
    publisher.publish(scene.topic, 1, 1)
    client.publish(f"{scene.topic}/own", 0, 2)
    await scene.has(client, 2)
    await aeventually(lambda: "PUBREL" in client.unanswered, PATIENCE)
    client.withheld.clear()
    client.begin_anew(scene.topic)
    client.ports = [scene.victim.port, scene.other.port]
    scene.arm(scene)
    client.abandon()

    async def nothing_old() -> None:
        client.publish(scene.topic, 7, 1)
        await scene.settled()
        assert len(client.delivered) == 2, "a message of the former session, or without a subscription"
        await scene.subscriber("regular", scene.other, clean=True)
        client.subscribe(scene.topic, 2)
        await scene.settled()
        publisher.publish(scene.topic, 8, 2)
        await scene.has(client, 3)
        assert client.delivered[-1].payload.endswith(b" 8")
        scene.expected.clear()

    scene.later.append(nothing_old)


async def _wills(scene: Scene, client: Peer) -> None:
    """Every will that was armed is published once when its connection has ended."""
    watchers = [scene.peers[0], scene.peers[1]]
    await client.close()
    scene.peers.remove(client)
    wanted = {b"%s %d" % (client.client_id.encode(), -conn) for conn in client.armed}
    assert wanted

    def all_there() -> bool:
        return all(wanted <= {one.payload for one in watcher.delivered} for watcher in watchers)

    await aeventually(all_there, PATIENCE, what=f"{len(wanted)} wills")

    async def all_gone() -> bool:
        return not await scene.fleet.count("$MQTT_wills", f"$MQTT.wills.*.{name_hash(client.client_id)}")

    await aeventually(all_gone, PATIENCE, what="no stored will")
    for watcher in watchers:
        got = [one.payload for one in watcher.delivered]
        assert len(set(got)) == len(got), f"{watcher.client_id}: {got}"


def will(qos: int) -> Script:
    """The gateway publishes the will of a client whose connection breaks."""

    @named(f"will at QoS {qos}")
    async def script(scene: Scene) -> None:
        await scene.subscriber("durable", scene.other)
        await scene.subscriber("regular", scene.other, clean=True)
        client = scene.main = scene.peer("client", scene.victim, clean=True, will=(scene.topic, qos))
        await scene.settled(client)
        scene.arm(scene)
        await _wills(scene, client)

    return script


@named("will at CONNECT")
async def arming(scene: Scene) -> None:
    """The gateway stores the will of a client that connects."""
    await scene.subscriber("durable", scene.other)
    await scene.subscriber("regular", scene.other, clean=True)
    client = scene.main = scene.peer("client", will=(scene.topic, 1))
    scene.arm(scene)
    client.ports = [scene.victim.port, scene.other.port]
    scene.later.append(lambda: _wills(scene, client))


@named("will at takeover")
async def taking_over_will(scene: Scene) -> None:
    """The gateway takes over a session whose former connection had a will, which it has to publish."""
    await scene.subscriber("durable", scene.other)
    await scene.subscriber("regular", scene.other, clean=True)
    client = scene.main = scene.peer("client", scene.other, will=(scene.topic, 2))
    await scene.settled(client)
    client.ports = [scene.victim.port, scene.other.port]
    scene.arm(scene)
    client.abandon()
    scene.later.append(lambda: _wills(scene, client))


@named("will and lease")
async def renewing(scene: Scene) -> None:
    """The gateway renews its lease, while it has a client with a will."""
    await scene.subscriber("durable", scene.other)
    await scene.subscriber("regular", scene.other, clean=True)
    client = scene.main = scene.peer("client", scene.victim, clean=True, will=(scene.topic, 1))
    await scene.settled(client)
    scene.arm(scene)
    await aeventually(lambda: not scene.victim.alive, PATIENCE, what="end of the gateway")
    await _wills(scene, client)


def each(scene: Script, way: str, *prefixes: str, nth: int = 1, actions: Iterable[Action] = BOTH) -> list[Point]:
    """Points at the nth frame of each of these."""
    return [Point(scene, way, prefix, action, nth) for prefix in prefixes for action in actions]


def packets(scene: Script, kind: str, *modes: str, nth: int = 1) -> list[Point]:
    """Points at the nth packet of a kind."""
    return [Point(scene, kind, mode, nth=nth) for mode in modes]


def _points() -> Iterator[Point]:
    stored, deleting = "$MQTT.msgs.{bare}", "$JS.API.STREAM.MSG.DELETE."
    one, two = publishing(1), publishing(2)
    few, many = publishing(2, count=2), publishing(2, count=40)  # records that go one by one, and together
    together = "$JS.API.STREAM.PURGE.$MQTT_qos2in"
    yield from each(one, "up", "{bare}", nth=2)
    yield from each(one, "up", stored, nth=2)
    yield from each(one, "answer", stored, nth=2)
    yield from packets(one, "PUBACK", "lost", "answered", nth=2)
    yield from each(two, "up", "$MQTT.qos2.in.", "{bare}", stored, nth=2)
    yield from each(two, "answer", "$MQTT.qos2.in.", stored, nth=2, actions=[*BOTH, DROP])
    yield from each(few, "up", deleting + "$MQTT_qos2in", nth=2)
    yield from each(few, "answer", deleting + "$MQTT_qos2in", nth=2, actions=[*BOTH, DROP])
    yield from each(many, "up", together)
    yield from each(many, "answer", together, actions=[*BOTH, DROP])
    yield from packets(two, "PUBREC", "lost", "unanswered", "answered", nth=2)
    yield from packets(two, "PUBCOMP", "lost", nth=2)
    for qos in (1, 2):
        kept = publishing(qos, retain=True)
        yield from each(kept, "up", "$MQTT.rmsgs.{bare}", stored, nth=2)
        yield from each(kept, "answer", "$MQTT.rmsgs.{bare}", nth=3)

    pubrels, consumers = "$JS.API.CONSUMER.DURABLE.CREATE.$MQTT_out.", "$JS.API.CONSUMER.DURABLE.CREATE.$MQTT_msgs."
    claim = "$MQTT.sess.{hash}"
    for way in ("up", "answer"):
        yield from each(taking_over, way, "$JS.API.STREAM.MSG.GET.$MQTT_timers", pubrels)
        yield from each(taking_over, way, pubrels, nth=2)
    yield from each(taking_over, "answer", "$JS.API.STREAM.MSG.GET.$MQTT_qos2in", "$JS.API.STREAM.MSG.GET.$MQTT_out")
    yield from each(taking_over_publisher, "up", stored, "{bare}", deleting + "$MQTT_qos2in", nth=2)
    yield from each(taking_over_publisher, "answer", claim)
    yield from each(taking_over_publisher, "answer", "$JS.API.STREAM.MSG.GET.$MQTT_qos2in", stored, nth=2)

    yield from each(subscribing, "up", claim, consumers)
    yield from each(subscribing, "answer", "$JS.API.STREAM.INFO.$MQTT_msgs", claim, consumers)
    yield from packets(subscribing, "SUBACK", "lost")
    dropping = "$JS.API.CONSUMER.DELETE.$MQTT_msgs"
    yield from each(unsubscribing, "up", claim)
    yield from each(unsubscribing, "answer", claim)
    yield from packets(unsubscribing, "UNSUBACK", "lost", "answered")
    yield from each(unsubscribing, "up", dropping)
    yield from each(unsubscribing, "answer", dropping)
    yield from each(beginning_anew, "up", claim, dropping, "$JS.API.STREAM.PURGE.")
    yield from each(beginning_anew, "answer", claim, dropping, "$JS.API.STREAM.PURGE.")
    yield from packets(beginning_anew, "CONNACK", "lost")

    yield from each(will(1), "up", stored, deleting + "$MQTT_wills")
    yield from each(will(2), "up", "{bare}", stored)
    yield from each(will(2), "answer", stored, deleting + "$MQTT_wills")
    yield from each(renewing, "up", "$KV.MQTT_gateways.lease.")
    yield from each(renewing, "answer", "$KV.MQTT_gateways.lease.")
    yield from each(arming, "up", "$MQTT.wills.")
    yield from each(arming, "answer", claim, "$MQTT.wills.")
    yield from each(taking_over_will, "up", stored, deleting + "$MQTT_wills", "$MQTT.wills.")
    yield from each(taking_over_will, "answer", claim, stored, deleting + "$MQTT_wills", "$MQTT.wills.")


def _served_points() -> Iterator[Point]:
    stored, position = "$MQTT.msgs.{bare}", "$MQTT.pos.{hash}"
    one, two = receiving(1), receiving(2)
    for script in (one, two):
        yield from each(script, "down", stored, nth=2)
        yield from each(script, "up", position)
        yield from each(script, "answer", position, actions=[*BOTH, DROP])
        yield from packets(script, "PUBLISH", "lost", "unanswered", "answered", nth=2)
    yield from each(two, "up", position, nth=2)
    yield from each(two, "answer", position, nth=2)
    yield from packets(two, "PUBREL", "lost", "unanswered", "answered", nth=2)
    for way in ("up", "answer"):
        yield from each(taking_over, way, "$MQTT.sess.{hash}", position)
        for nth in (2, 3):
            yield from each(taking_over, way, position, nth=nth)
    yield from each(taking_over, "answer", "$JS.API.STREAM.MSG.GET.$MQTT_pos", "$JS.API.STREAM.INFO.$MQTT_msgs")
    for kind in ("CONNACK", "PUBREL", "PUBLISH"):
        yield from packets(taking_over, kind, "lost", "unanswered", "answered")


SERVED_POINTS: Final = list(_served_points())
"""Those at which a session gets its messages: whether it has consumers, or none."""
POINTS: Final = [*_points(), *SERVED_POINTS]
"""Those of gateways whose sessions have consumers."""

SOME: Final = [
    point
    for slow, every in ((False, 4), (True, 9))
    for point in [one for one in POINTS if str(one).startswith("will") is slow][::every]
]
"""Those of them that tests take. A will that its gateway has not published waits until its lease has lapsed."""
