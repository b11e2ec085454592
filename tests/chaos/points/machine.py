# SPDX-License-Identifier: Apache-2.0
"""Gateways die at random points of what clients do at random: a state machine of Hypothesis over real processes.

Each run has new clients; servers and gateways stay. A run ends with every gateway running again, every client settled,
and its history checked. What is wrong is collected, not raised: a real process does not do the same thing twice, so
there is nothing to shrink.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.chaos.checker import check
from tests.chaos.points.fleet import Fleet, Slot
from tests.chaos.points.peer import PacketTrap, Peer
from tests.chaos.points.proxy import Action, Frame, Trap
from tests.chaos.points.scenes import Scene
from tests.harness.waiting import aeventually

PATIENCE: Final = 60.0
"""Seconds in which everything is done after a run."""

FRAMES: Final = (
    ("up", "{bare}"),
    ("up", "$MQTT.msgs."),
    ("answer", "$MQTT.msgs."),
    ("down", "$MQTT.msgs."),
    ("up", "$MQTT.qos2.in."),
    ("answer", "$MQTT.qos2.in."),
    ("up", "$JS.API.STREAM.MSG.DELETE.$MQTT_qos2in"),
    ("answer", "$JS.API.STREAM.MSG.DELETE.$MQTT_qos2in"),
    ("up", "$JS.API.STREAM.PURGE.$MQTT_qos2in"),
    ("answer", "$JS.API.STREAM.PURGE.$MQTT_qos2in"),
    ("answer", "$JS.API.STREAM.MSG.GET.$MQTT_qos2in"),
    ("up", "$MQTT.out.pubrel."),
    ("answer", "$MQTT.out.pubrel."),
    ("down", "$MQTT.out.pubrel."),
    ("answer", "$JS.API.STREAM.MSG.GET.$MQTT_out"),
    ("up", "$JS.ACK.$MQTT_msgs."),
    ("answer", "$JS.ACK.$MQTT_msgs."),
    ("up", "$JS.ACK.$MQTT_out."),
    ("up", "$MQTT.pos."),
    ("answer", "$MQTT.pos."),
    ("answer", "$JS.API.STREAM.MSG.GET.$MQTT_pos"),
    ("up", "$JS.API.CONSUMER.RESET."),
    ("answer", "$JS.API.CONSUMER.RESET."),
    ("up", "$MQTT.sess."),
    ("answer", "$MQTT.sess."),
    ("up", "$JS.API.CONSUMER.DURABLE.CREATE."),
    ("answer", "$JS.API.CONSUMER.DURABLE.CREATE."),
    ("up", "$JS.API.CONSUMER.DELETE."),
    ("answer", "$JS.API.CONSUMER.DELETE."),
)
"""Where a gateway may be killed, or a connection of its held up."""

KILLS: Final = (Action.BEFORE, Action.AFTER)
PACKETS: Final = ("CONNACK", "PUBLISH", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP", "SUBACK", "UNSUBACK")
MODES: Final = ("lost", "unanswered", "answered")
CLIENTS: Final = ("first", "second", "publisher", "other")
"""Two durable subscribers and two publishers, all with sessions that last."""

POINTS: Final = st.tuples(st.integers(0, 2), st.sampled_from(FRAMES), st.sampled_from(KILLS), st.integers(1, 3))
"""A gateway, where it dies, how, and at which of these frames."""

T = TypeVar("T")


def kind_of(frame: Frame) -> str:
    """What a frame does; empty for one that has nothing to do with a message or a session of a client."""
    subject = frame.subject
    if subject.startswith("$JS.API."):
        kind = ".".join(subject.split(".")[2:5])
        return f"{frame.way} {kind}" if "$MQTT_" in subject and "timers" not in subject else ""
    if subject.startswith(("$KV.", "$MQTT.inbox.", "$MQTT.JSA.", "$JS.EVENT.", "$MQTT.timers.")):
        return ""
    return f"{frame.way} {'.'.join(subject.split('.')[:3])}" if subject.startswith("$") else f"{frame.way} bare"


@dataclass
class Tally:
    """What all runs together have come to.

    Attributes:
        runs: how many.
        interleavings: of each run, the order in which the proxies let frames pass and gateways were killed, as a hash.
        situations: at which kind of frame a gateway was killed, and which requests it had under way at this moment.
        failures: what went wrong, with the steps of that run.
        figures: of the histories.
    """

    runs: int = 0
    interleavings: set[int] = field(default_factory=set)
    situations: set[tuple[str, ...]] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)
    _passed: list[str] = field(default_factory=list)
    _asked: dict[str, dict[str, int]] = field(default_factory=dict)

    def passes(self, slot: Slot, frame: Frame) -> None:
        """A frame is about to pass a proxy."""
        kind = kind_of(frame)
        if not kind:
            return
        self._passed.append(f"{slot.name} {kind}")
        way, _, what = kind.partition(" ")
        asked = self._asked.setdefault(slot.name, {})
        if way == "up":
            asked[what] = asked.get(what, 0) + 1
        elif way == "answer" and asked.get(what):
            asked[what] -= 1

    def killed(self, slot: Slot) -> None:
        """A gateway was killed at the frame that has passed last, or stands before its proxy."""
        asked = self._asked.pop(slot.name, {})
        last = next((one for one in reversed(self._passed) if one.startswith(slot.name)), "")[2:]
        self.situations.add((last, *sorted(f"{what}*{min(count, 3)}" for what, count in asked.items() if count)))
        self._passed.append(f"{slot.name} dies")

    def add(self, figures: dict[str, int]) -> None:
        """The end of a run."""
        self.runs += 1
        self.interleavings.add(hash(tuple(self._passed)))
        self._passed.clear()
        for name, value in figures.items():
            known = self.figures.get(name, 0)
            self.figures[name] = max(known, value) if name.startswith("longest") else known + value


class Crashes(RuleBasedStateMachine):
    """Some clients with three gateways behind proxies; see :func:`explore`."""

    fleet: Fleet
    loop: asyncio.AbstractEventLoop
    tally: Tally
    until: float
    """When there is nothing more to be done (``time.monotonic``)."""

    def __init__(self) -> None:
        super().__init__()
        self.scene: Scene | None = None
        self.steps: list[str] = []
        self.holds: list[Trap] = []
        self.numbers = dict.fromkeys(("publisher", "other"), 0)
        self.wide = False

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def _act(self, text: str, action: Callable[[dict[str, Peer]], None]) -> None:
        """Do something in the event loop, where the clients live."""
        scene = self.scene
        if scene is None:
            return
        self.steps.append(text)

        async def act() -> None:
            action(dict(zip(CLIENTS, scene.peers, strict=True)))
            await asyncio.sleep(0.01)

        self._do(act())

    @initialize(
        places=st.lists(st.integers(0, 2), min_size=4, max_size=4),
        points=st.lists(POINTS, min_size=1, max_size=3, unique_by=lambda point: point[0]),
    )
    def begin(self, places: list[int], points: list[tuple[int, tuple[str, str], Action, int]]) -> None:
        if time.monotonic() < self.until:
            self._do(self._begin(places))
            for point in points:
                self.trap(*point)

    async def _begin(self, places: list[int]) -> None:
        await self.fleet.ready()
        slots = self.fleet.slots
        self.scene = scene = Scene(self.fleet, slots[0], slots[1], lambda scene: None)
        self.steps.append(f"clients on {places}")
        for name, place in zip(CLIENTS, places, strict=True):
            peer = scene.peer(name, *slots[place:], *slots[:place])
            if name == "first":
                peer.subscribe(scene.topic, 2)
            elif name == "second":
                peer.subscribe(f"{scene.topic}/#", 1)
        with contextlib.suppress(AssertionError):  # then it is noticed in the end
            await scene.settled()

    # -- what happens -------------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(("publisher", "other")),
        qos=st.integers(1, 2),
        count=st.integers(1, 3),
        point=st.none() | POINTS,
    )
    def publish(self, name: str, qos: int, count: int, point: tuple[int, tuple[str, str], Action, int] | None) -> None:
        if point is not None:
            self.trap(*point)

        def act(peers: dict[str, Peer]) -> None:
            assert self.scene is not None
            for _ in range(count):
                self.numbers[name] += 1
                peers[name].publish(self.scene.topic, self.numbers[name], qos)

        self._act(f"{name} publishes {count} at QoS {qos}", act)

    @rule(
        number=st.integers(0, 2),
        frame=st.sampled_from(FRAMES),
        action=st.sampled_from((*KILLS, *KILLS, Action.HOLD)),
        nth=st.integers(1, 3),
    )
    def trap_frame(self, number: int, frame: tuple[str, str], action: Action, nth: int) -> None:
        self.trap(number, frame, action, nth)

    def trap(self, number: int, frame: tuple[str, str], action: Action, nth: int) -> None:
        """Kill a gateway, or hold a connection of its up, at a frame."""

        def act(peers: dict[str, Peer]) -> None:
            assert self.scene is not None
            slot = self.fleet.slots[number]
            if any(trap.action is not Action.HOLD for trap in slot.proxy.traps) and action is not Action.HOLD:
                return
            found = slot.proxy.set(frame[0], frame[1].format(bare=self.scene.topic.replace("/", ".")), action, nth)
            if action is Action.HOLD:
                self.holds.append(found)

        self._act(f"gateway {number}: {action.value} {frame[0]} {frame[1]} #{nth}", act)

    @rule(name=st.sampled_from(CLIENTS), kind=st.sampled_from(PACKETS), mode=st.sampled_from(MODES))
    def trap_packet(self, name: str, kind: str, mode: str) -> None:
        def act(peers: dict[str, Peer]) -> None:
            peer = peers[name]

            def kill() -> None:
                port = peer.port
                for slot in self.fleet.slots:
                    if slot.port == port:
                        slot.crash()

            peer.trap = PacketTrap(kind, mode, kill)

        self._act(f"{name}: its gateway dies at {kind}, {mode}", act)

    @rule(number=st.integers(0, 2))
    def crash(self, number: int) -> None:
        self._act(f"gateway {number} dies", lambda peers: self.fleet.slots[number].crash())

    @rule(number=st.integers(0, 2))
    def stop(self, number: int) -> None:
        self._act(f"gateway {number} is stopped", lambda peers: self.fleet.slots[number].stop())

    @rule(
        name=st.sampled_from(CLIENTS),
        number=st.integers(0, 2),
        end=st.sampled_from((Peer.drop, Peer.leave, Peer.abandon)),
    )
    def move(self, name: str, number: int, end: Callable[[Peer], None]) -> None:
        def act(peers: dict[str, Peer]) -> None:
            slots = self.fleet.slots
            peers[name].ports = [slot.port for slot in (*slots[number:], *slots[:number])]
            end(peers[name])

        self._act(f"{name} goes to gateway {number}: {end.__name__}", act)

    @rule(name=st.sampled_from(CLIENTS), kinds=st.sets(st.sampled_from(("PUBLISH", "PUBREC", "PUBREL"))))
    def withhold(self, name: str, kinds: set[str]) -> None:
        def act(peers: dict[str, Peer]) -> None:
            peers[name].answer()
            peers[name].withheld = set(kinds)

        self._act(f"{name} answers all but {sorted(kinds)}", act)

    @rule(leaves=st.booleans())
    def widen(self, leaves: bool) -> None:
        """The first subscriber has a second subscription that matches the same, or does not have it any more."""

        def act(peers: dict[str, Peer]) -> None:
            assert self.scene is not None
            self.wide = not self.wide
            topic_filter = f"{self.scene.topic}/#"
            if self.wide:
                peers["first"].subscribe(topic_filter, 2)
            else:
                peers["first"].unsubscribe(topic_filter)
            if leaves:
                peers["first"].leave()

        self._act(f"first changes its subscriptions{' and leaves at once' if leaves else ''}", act)

    @rule(qos=st.integers(1, 2))
    def grant_anew(self, qos: int) -> None:
        """The second subscriber subscribes again, maybe at another QoS."""

        def act(peers: dict[str, Peer]) -> None:
            assert self.scene is not None
            peers["second"].subscribe(f"{self.scene.topic}/#", qos)

        self._act(f"second subscribes again at QoS {qos}", act)

    @rule()
    def let_go(self) -> None:
        if self.holds:
            self._act("what is held goes on", lambda peers: self.holds.pop(0).release())

    @rule(seconds=st.sampled_from((0.02, 0.1, 0.3)))
    def wait(self, seconds: float) -> None:
        if self.scene is not None:
            self.steps.append(f"{seconds} s")
            self._do(asyncio.sleep(seconds))
            self._act("what was killed starts", self._restart)

    def _restart(self, peers: dict[str, Peer]) -> None:
        for slot in self.fleet.slots:
            slot.begin()

    # -- the end ------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if self.scene is not None:
            self._do(self._finish(self.scene))

    async def _finish(self, scene: Scene) -> None:
        for hold in self.holds:
            hold.release()
        for slot in self.fleet.slots:
            slot.proxy.traps.clear()
        for peer in scene.peers:
            peer.trap = None
            peer.answer()
        try:
            await self.fleet.ready()
            await aeventually(lambda: all(peer.settled for peer in scene.peers), PATIENCE, what="settled")

            def all_there() -> bool:
                missing = check(scene.events).missing
                assert not missing, missing
                return True

            await aeventually(all_there, PATIENCE, what="everything delivered")
            await scene.at_rest()
            wrong = scene.wrong()
            assert not wrong, wrong
        except AssertionError as error:
            lines = [f"{error} {error.__cause__ or ''}", *self.steps, *scene.wrong()]
            self.tally.failures.append("\n  ".join(lines))
        finally:
            await scene.close()
            self.tally.add(check(scene.events).figures)


async def explore(fleet: Fleet, tally: Tally, *, runs: int, steps: int, number: int, seconds: float) -> None:
    """Have gateways die at random.

    Args:
        fleet: runs, and tells ``tally`` of its frames and kills.
        tally: gets what comes out.
        runs: at most so many.
        steps: of each run, at most.
        number: seed of the choices.
        seconds: no run is begun later.
    """
    until = time.monotonic() + seconds
    fields = {"fleet": fleet, "loop": asyncio.get_running_loop(), "tally": tally, "until": until}
    machine: type[Crashes] = seed(number)(type("Crashes", (Crashes,), fields))
    options = settings(
        max_examples=runs,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    await asyncio.to_thread(run_state_machine_as_test, machine, settings=options)
