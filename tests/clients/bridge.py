# SPDX-License-Identifier: Apache-2.0
"""mosquitto as a bridge: one topic tree in both directions, with its notifications, as its default has it."""

from __future__ import annotations

import contextlib
import re
import secrets
import signal
from collections.abc import Iterator, Sequence
from functools import partial

from tests.clients import build
from tests.clients.peer import Peer
from tests.clients.place import Place
from tests.clients.program import Message
from tests.clients.scenarios import COUNT, Command, Scenarios, published
from tests.harness.process import LoggedProcess
from tests.harness.waiting import eventually, free_port

_CONFIGURATION = """\
listener {port} 127.0.0.1
allow_anonymous true
user root
persistence true
persistence_location {directory}/
log_dest stderr
connection {name}
address 127.0.0.1:{gateway}
bridge_protocol_version {protocol}
remote_clientid {name}
cleansession false
restart_timeout 1
topic # both 2 {name}/ {name}/
"""
_PROTOCOLS = {"3": "mqttv311", "5": "mqttv50"}


class Mosquitto:
    """A mosquitto with a bridge to the gateway.

    Args:
        program: where mosquitto is.
        place: of the gateway.
        version: of MQTT, on the bridge.
    """

    def __init__(self, program: str, place: Place, version: str) -> None:
        self.name = f"kit{secrets.token_hex(4)}"
        self.port = free_port()
        directory = place.directory / self.name
        directory.mkdir()
        self._file = directory / "mosquitto.conf"
        protocol = _PROTOCOLS[version]
        values = {"name": self.name, "port": self.port, "gateway": place.port, "protocol": protocol}
        self._file.write_text(_CONFIGURATION.format(directory=directory, **values), encoding="utf-8")
        self._process = LoggedProcess("mosquitto", directory / "log")
        self._program = program
        self._place = place

    @property
    def state(self) -> str:
        """The topic on which the bridge says at the gateway whether it is connected."""
        return f"$SYS/broker/connection/{self.name}/state"

    def start(self) -> None:
        """Start it, and wait until messages pass in both directions."""
        self._process.start([self._program, "-c", str(self._file)])
        eventually(lambda: "running" in self._process.text, what="mosquitto")
        self.passing()

    def passing(self) -> None:
        """Wait until messages pass in both directions."""
        topic = f"{self.name}/probe"
        for source, target in ((self.port, self._place.port), (self._place.port, self.port)):
            with Peer(source) as one, Peer(target) as other:
                other.subscribe(topic)
                eventually(partial(_passes, one, other, topic), what="the bridge")

    def stop(self, *, kill: bool = False) -> None:
        """End it, by SIGKILL if ``kill``."""
        self._process.send(signal.SIGKILL if kill else signal.SIGTERM)
        self._process.wait()

    def discard(self) -> None:
        """End it, whatever its state."""
        self._process.discard()


def _passes(one: Peer, other: Peer, topic: str) -> bool:
    one.publish(topic, 0, "?")
    return bool(other.settled())


class Bridge:
    """Its row in the table."""

    name = "mosquitto as a bridge"
    versions: Sequence[str] = ("3", "5")

    def prepare(self) -> Command:
        """Find it."""
        program = build.find("mosquitto")
        found = re.search(r"version (\S+)", build.output([program, "-h"]))
        return Command([program], found[1] if found else "?")

    def scenarios(self, command: Command, place: Place, version: str) -> Scenarios:
        """What a bridge does."""
        use = _Use(command.words[0], place, version)
        by_qos = {f"QoS {qos}": partial(use.messages, qos) for qos in (0, 1, 2)}
        # A 5.0 bridge of mosquitto 2.0 names no session expiry interval: its session ends with its connection.
        durable: Scenarios = {"session": use.session} if version == "3" else {}
        return {"connect": use.connect, **by_qos, "will": use.will, **durable, "restart": use.restart}


class _Use:
    """The scenarios of a bridge with one version of MQTT."""

    def __init__(self, program: str, place: Place, version: str) -> None:
        self._place = place
        self._version = version
        self._arguments = (program, place, version)

    @contextlib.contextmanager
    def _bridge(self) -> Iterator[Mosquitto]:
        found = Mosquitto(*self._arguments)
        try:
            found.start()
            yield found
        finally:
            found.discard()
            Peer(self._place.port, found.name, clean=True).close()

    def connect(self) -> None:
        """The bridge connects, and says so on its topic below `$SYS`."""
        with self._bridge() as bridge, Peer(self._place.port) as peer:
            peer.subscribe(bridge.state)
            assert peer.receive(1) == [Message(bridge.state, 1, "1")]

    def messages(self, qos: int) -> None:
        """Messages in both directions, each once."""
        with self._bridge() as bridge, Peer(bridge.port) as near, Peer(self._place.port) as far:
            name = f"{bridge.name}/messages"
            for peer in (near, far):
                peer.subscribe(f"{name}/#")
            wanted: list[Message] = []
            for one, side in ((near, "up"), (far, "down")):
                sent = [Message(f"{name}/{side}", qos, str(number)) for number in range(COUNT)]
                for message in sent:
                    one.publish(*message)
                wanted += sent
            for peer in (near, far):
                peer.receive_all(wanted)
            bridge.passing()  # what goes round in a circle would have come by now
            for peer in (near, far):
                assert sorted(peer.settled()) == sorted(wanted)

    def will(self) -> None:
        """A bridge that is killed is seen as not connected."""
        with self._bridge() as bridge, Peer(self._place.port) as peer:
            peer.subscribe(bridge.state)
            peer.receive(1)
            bridge.stop(kill=True)
            assert peer.receive(2)[1] == Message(bridge.state, 1, "0")

    def session(self) -> None:
        """What is published at the gateway while mosquitto does not run is there when it runs again."""
        with self._bridge() as bridge:
            with Peer(bridge.port, "near") as near:
                near.subscribe(f"{bridge.name}/messages/+")
            bridge.stop()
            wanted = published(self._place.port, f"{bridge.name}/messages")
            bridge.start()
            with Peer(bridge.port, "near") as near:
                assert sorted(near.receive(len(wanted))) == sorted(wanted)

    def restart(self) -> None:
        """The gateway is killed and started again: messages of both sides from before, meanwhile and after arrive."""
        with self._bridge() as bridge:
            name = f"{bridge.name}/messages"
            far_id = f"far-{bridge.name}"
            with Peer(self._place.port, far_id) as far:
                far.subscribe(f"{name}-up/+")
            with Peer(bridge.port) as near:
                near.subscribe(f"{name}-down/+")
                down = published(self._place.port, f"{name}-down", "before")
                up = published(bridge.port, f"{name}-up", "before")
                if self._version == "5":
                    near.receive_all(down)  # what has not arrived ends with the session
                self._place.gateway.kill()
                up += published(bridge.port, f"{name}-up", "meanwhile")
                self._place.gateway.start()
                bridge.passing()
                up += published(bridge.port, f"{name}-up", "after")
                down += published(self._place.port, f"{name}-down", "after")
                _complete(near, down)
            with Peer(self._place.port, far_id) as far:
                _complete(far, up)
            Peer(self._place.port, far_id, clean=True).close()


def _complete(peer: Peer, wanted: list[Message]) -> None:
    """Every message arrives, at QoS 2 once."""
    found = peer.receive_all(wanted)
    once = [one for one in found if one.qos == 2]
    assert len(once) == len(set(once)), f"messages at QoS 2 came twice: {once}"
