# SPDX-License-Identifier: Apache-2.0
"""Node-RED with a flow that passes messages on: from ``NAME/in/#`` to ``NAME/out/…``, at the QoS that they had."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from tests.clients import build
from tests.clients.peer import Peer
from tests.clients.place import Place
from tests.clients.program import Message
from tests.clients.scenarios import COUNT, Command, Scenarios, published
from tests.harness.process import LoggedProcess
from tests.harness.waiting import eventually

NODE_RED = "4.1.8"

_SETTINGS = """\
module.exports = {
  uiHost: "127.0.0.1", httpAdminRoot: false, httpNodeRoot: false, mqttReconnectTime: 500,
  flowFile: "flows.json", logging: { console: { level: "info" } },
  externalModules: { autoInstall: false, palette: { allowInstall: false } }, telemetry: { enabled: false },
};
"""


def flow(name: str, port: int, version: str) -> list[dict[str, Any]]:
    """The nodes: a broker, one that receives, one that changes the topic, one that publishes."""
    broker = {
        "id": "broker",
        "type": "mqtt-broker",
        "broker": "127.0.0.1",
        "port": str(port),
        "clientid": name,
        "autoConnect": True,
        "usetls": False,
        "protocolVersion": "5" if version == "5" else "4",
        "keepalive": "60",
        "cleansession": False,
        "autoUnsubscribe": False,
        "sessionExpiry": "300",
        "birthTopic": f"{name}/state",
        "birthQos": "1",
        "birthRetain": "false",
        "birthPayload": "here",
        "birthMsg": {},
        "willTopic": f"{name}/state",
        "willQos": "1",
        "willRetain": "false",
        "willPayload": "gone",
        "willMsg": {},
    }
    change = "return {topic: msg.topic.replace('/in/', '/out/'), payload: msg.payload, qos: msg.qos};"
    source = {"topic": f"{name}/in/#", "qos": "2", "datatype": "utf8", "nl": False, "rap": True, "rh": 0, "inputs": 0}
    return [
        {"id": "tab", "type": "tab", "label": "kit"},
        broker,
        {"id": "source", "type": "mqtt in", "z": "tab", "broker": "broker", "wires": [["change"]], **source},
        {"id": "change", "type": "function", "z": "tab", "func": change, "outputs": 1, "wires": [["target"]]},
        {"id": "target", "type": "mqtt out", "z": "tab", "broker": "broker", "topic": "", "qos": "", "wires": []},
    ]


class NodeRed:
    """Its row in the table."""

    name = "Node-RED"
    versions: Sequence[str] = ("3", "5")

    def prepare(self) -> Command:
        """Install it."""
        program = build.npm(f"node-red@{NODE_RED}") / "node-red" / "red.js"
        return Command([build.find("node"), str(program)], NODE_RED)

    def scenarios(self, command: Command, place: Place, version: str) -> Scenarios:
        """What a flow does."""
        use = _Use(command, place, version)
        by_qos = {f"QoS {qos}": partial(use.messages, qos) for qos in (0, 1, 2)}
        return {
            "connect": use.connect,
            **by_qos,
            "will": use.will,
            "session": use.session,
            "restart": use.restart,
        }


class _Use:
    """The scenarios of a flow with one version of MQTT."""

    def __init__(self, command: Command, place: Place, version: str) -> None:
        self._command = command
        self._place = place
        self._version = version

    @contextlib.contextmanager
    def _flow(self) -> Iterator[tuple[str, LoggedProcess, Peer]]:
        """A flow that runs: its name, its process, and a peer that has seen its birth and gets what it publishes."""
        name = f"kit{secrets.token_hex(4)}"
        directory = self._place.directory / name
        directory.mkdir()
        (directory / "settings.js").write_text(_SETTINGS, encoding="utf-8")
        nodes = flow(name, self._place.port, self._version)
        (directory / "flows.json").write_text(json.dumps(nodes), encoding="utf-8")
        process = LoggedProcess("Node-RED", directory / "log")
        with Peer(self._place.port, f"peer-{name}") as peer:
            for topic_filter in (f"{name}/state", f"{name}/out/#"):
                peer.subscribe(topic_filter)
            try:
                self.run(process)
                assert peer.receive(1) == [Message(f"{name}/state", 1, "here")]
                _passing(self._place.port, name)
                peer.receive_all([Message(f"{name}/out/probe", 1, "?")])
                yield name, process, peer
            finally:
                process.discard()
        for client_id in (name, f"peer-{name}"):
            Peer(self._place.port, client_id, clean=True).close()

    def run(self, process: LoggedProcess) -> None:
        """Start it."""
        directory = str(process.log.parent)
        process.start([*self._command.words, "--userDir", directory, "--settings", f"{directory}/settings.js"])

    def connect(self) -> None:
        """It connects and publishes its birth message."""
        with self._flow():
            pass

    def messages(self, qos: int) -> None:
        """Messages at one QoS, through the flow."""
        with self._flow() as (name, _, peer):
            for number in range(COUNT):
                peer.publish(f"{name}/in/x", qos, str(number))
            wanted = [Message(f"{name}/out/x", qos, str(number)) for number in range(COUNT)]
            found = [one for one in peer.receive_all(wanted) if one.topic == f"{name}/out/x"]
            assert found == wanted

    def will(self) -> None:
        """Its will, when it is killed."""
        with self._flow() as (name, process, peer):
            process.discard()
            peer.receive_all([Message(f"{name}/state", 1, "gone")])

    def session(self) -> None:
        """What is published while it does not run passes through the flow when it runs again."""
        with self._flow() as (name, process, peer):
            process.discard()
            wanted = _out(published(self._place.port, f"{name}/in"))
            self.run(process)
            peer.receive_all(wanted)

    def restart(self) -> None:
        """The gateway is killed and started again: the flow goes on, and nothing is lost."""
        with self._flow() as (name, process, peer):
            peer.receive_all(_out(published(self._place.port, f"{name}/in", "before")))
            # By now: a flow drops what it has to publish while it is not connected.
            self._place.gateway.restart(kill=True)
            eventually(lambda: len(re.findall("Connected to broker", process.text)) == 2, what="Node-RED")
            wanted = published(self._place.port, f"{name}/in", "after")
            with Peer(self._place.port, f"peer-{name}") as again:
                again.receive_all(_out(wanted))


def _out(sent: Sequence[Message]) -> list[Message]:
    return [one._replace(topic=one.topic.replace("/in/", "/out/")) for one in sent]


def _passing(port: int, name: str) -> None:
    """Wait until the flow has subscribed."""
    with Peer(port) as one:
        one.subscribe(f"{name}/out/probe", 0)

        def passes() -> bool:
            one.publish(f"{name}/in/probe", 1, "?")
            return bool(one.settled())

        eventually(passes, what="the flow")
