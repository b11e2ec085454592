# SPDX-License-Identifier: Apache-2.0
"""What clients do with a gateway that is going to die, and what has to be true afterwards."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from mqtt_streams.hashing import name_hash
from tests.chaos.checker import check
from tests.chaos.history import Event
from tests.chaos.points.fleet import Fleet, Slot
from tests.chaos.points.peer import PacketTrap, Peer
from tests.chaos.points.proxy import Action, Trap
from tests.harness.waiting import aeventually

PATIENCE: Final = 40.0
"""Seconds in which everything is done again."""

DELIVERY: Final = PATIENCE
"""Seconds in which everything that was acknowledged has been delivered, after the clients have recovered."""

_NUMBERS: Final = itertools.count(1)


@dataclass
class Expected:
    """A subscriber that has to get everything of a topic that was acknowledged, even in a regular session."""

    peer: Peer
    topic: str


@dataclass
class Scene:
    """Some clients, the gateway that dies, and another one.

    ``arm`` is to be called when everything is prepared; what comes then has to reach the point.
    """

    fleet: Fleet
    victim: Slot
    other: Slot
    arm: Callable[[Scene], None]
    name: str = ""
    events: list[Event] = field(default_factory=list)
    """The history of all clients."""
    main: Peer | None = None
    """Whose packets a point may name."""
    peers: list[Peer] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)
    later: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """What is done when the clients have recovered."""

    def __post_init__(self) -> None:
        self.name = f"p{next(_NUMBERS)}-{self.victim.kills}"

    @property
    def topic(self) -> str:
        """A topic of this scene's own."""
        return f"points/{self.name}"

    def peer(self, name: str, *slots: Slot, **options: Any) -> Peer:
        """A client that connects to these gateways in turn."""
        client_id = f"{name}-{self.name}"

        def note(what: str, **fields: Any) -> None:
            self.events.append(Event(time.monotonic_ns(), client_id, what, fields))

        peer = Peer(client_id, [slot.port for slot in slots], note, **options)
        self.peers.append(peer)
        peer.start()
        return peer

    async def subscriber(self, name: str, *slots: Slot, qos: int = 2, topic: str = "", **options: Any) -> Peer:
        """A client that has subscribed, and has to get what is published."""
        peer = self.peer(name, *slots, **options)
        topic = topic or self.topic
        peer.subscribe(topic, qos)
        await self.settled(peer)
        self.expected.append(Expected(peer, topic))
        return peer

    async def settled(self, *peers: Peer) -> None:
        """Wait until all has been done that clients were asked for."""
        waited = peers or tuple(self.peers)
        what = ", ".join(peer.client_id for peer in waited)
        await aeventually(lambda: all(peer.settled for peer in waited), PATIENCE, what=f"settled: {what}")

    async def has(self, peer: Peer, count: int) -> None:
        """Wait until a client has got so many messages."""
        await aeventually(lambda: len(peer.delivered) >= count, PATIENCE, what=f"{count} messages to {peer.client_id}")

    async def unanswered(self, client: Peer, publisher: Peer, *later: tuple[int, int]) -> None:
        """Have a client receive messages in every state: one whose PUBREL is not answered, and ``later`` ones.

        Args:
            later: number and QoS of messages that are not acknowledged.
        """
        client.withheld = {"PUBREL"}
        publisher.publish(self.topic, 1, 2)
        await aeventually(lambda: client.unanswered == ["PUBCOMP"], PATIENCE)
        client.withheld = {"PUBLISH", "PUBREL"}
        for n, qos in later:
            publisher.publish(self.topic, n, qos)
        await self.has(client, 1 + len(later))
        client.withheld.clear()

    async def live(self, peer: Peer, consumers: int = 1) -> None:
        """Wait until a session's messages come from the shared reader, in place of at least so many consumers."""

        async def speaks() -> bool:
            at = await self.fleet.position(peer.client_id)
            return len(at.live) >= consumers and not at.clean

        await aeventually(speaks, PATIENCE, what=f"{peer.client_id} is live")

    async def close(self) -> None:
        """End all clients."""
        await asyncio.gather(*(peer.close() for peer in self.peers))

    # -- afterwards ---------------------------------------------------------------------------------

    def publishers(self, topic: str) -> dict[str, list[int]]:
        """Acknowledged numbers of a topic by publisher."""
        return {peer.client_id: peer.acked[topic] for peer in self.peers if topic in peer.acked}

    def missing(self) -> list[str]:
        """What was acknowledged and has not been delivered."""
        found = []
        for expected in self.expected:
            got = {one.payload for one in expected.peer.delivered if one.topic == expected.topic}
            for publisher, numbers in self.publishers(expected.topic).items():
                lost = [n for n in numbers if b"%s %d" % (publisher.encode(), n) not in got]
                if lost:
                    found.append(f"{expected.peer.client_id}: {lost} of {publisher} lost")
        return found

    def wrong(self) -> list[str]:
        """Promises that were broken."""
        return [violation for peer in self.peers for violation in peer.violations] + check(self.events).lines()

    async def at_rest(self) -> None:
        """Wait until nothing is left to be done, for any durable session."""

        async def rest() -> bool:
            left = [
                line for peer in self.peers if not peer.clean for line in await self.fleet.unfinished(peer.client_id)
            ]
            assert not left, left
            return True

        await aeventually(rest, PATIENCE, what="rest")


Script = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True)
class Point:
    """Where the gateway dies.

    Args:
        scene: what the clients do.
        way: up, answer or down: a frame (see proxy.py); or the name of a packet to the scene's main client.
        prefix: of the frame's subject, with ``{bare}`` for the scene's topic as a subject, ``{hash}`` for its main
            client; or what becomes of the packet: lost, unanswered, answered.
        action: what is done.
        nth: at which of these.
    """

    scene: Script
    way: str
    prefix: str
    action: Action = Action.BEFORE
    nth: int = 1

    def __str__(self) -> str:
        what = f"{self.way} {self.prefix}" + (f" #{self.nth}" if self.nth > 1 else "")
        name = getattr(self.scene, "name", "")
        return f"{name}: {what}" if self.way.isupper() else f"{name}: {self.action.value} {what}"


async def run_point(fleet: Fleet, point: Point, victim: Slot, other: Slot) -> list[Event]:
    """Have a gateway die at a point, and see that everything is done all the same.

    Returns:
        The history of all clients.

    Raises:
        AssertionError: a promise was broken, or the point was not reached.
    """
    traps: list[Trap | PacketTrap] = []

    def arm(scene: Scene) -> None:
        if point.way.isupper():
            assert scene.main is not None
            scene.main.trap = PacketTrap(point.way, point.prefix, victim.crash, point.nth)
            traps.append(scene.main.trap)
        else:
            client = name_hash(scene.main.client_id) if scene.main is not None else ""
            prefix = point.prefix.format(bare=scene.topic.replace("/", "."), hash=client)
            traps.append(victim.proxy.set(point.way, prefix, point.action, point.nth))

    def reached() -> bool:
        (trap,) = traps
        return trap.sprung if isinstance(trap, PacketTrap) else trap.sprung.is_set()

    scene = Scene(fleet, victim, other, arm)
    try:
        await point.scene(scene)
        assert traps, "nothing was armed"
        await aeventually(reached, PATIENCE, what=f"reached: {point}")
        if point.action is not Action.DROP or point.way.isupper():
            assert not victim.alive
        await scene.settled()
        for step in scene.later:
            await step()
        await scene.settled()

        def all_there() -> bool:
            missing = scene.missing()
            assert not missing, missing
            return True

        await aeventually(all_there, DELIVERY, what="everything delivered")
        await scene.at_rest()
        assert not scene.missing()
        wrong = scene.wrong()
        assert not wrong, wrong
    finally:
        await scene.close()
        for trap in traps:
            if isinstance(trap, Trap) and trap in victim.proxy.traps:
                victim.proxy.traps.remove(trap)
    return scene.events
