# SPDX-License-Identifier: Apache-2.0
"""What every client library does: its scenarios, each a function of a ``Library``."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tests.clients.peer import Peer
from tests.clients.place import Place
from tests.clients.program import Message, Program

NAMES = ("connect", "QoS 0", "QoS 1", "QoS 2", "will", "session", "restart")
"""Of all scenarios, in the order of the table."""

MQTT = {"3": "3.1.1", "5": "5.0"}
"""The argument of programs → the version of MQTT."""

Scenario = Callable[[], None]
Scenarios = dict[str, Scenario]
COUNT = 5


class Command:
    """How the program of a library is run.

    Args:
        words: the command, without the arguments that every program has.
        version: of the library.
        env: added to the environment; ``{authority}`` stands for the file with the authority of ``wss``.
    """

    def __init__(self, words: Sequence[str], version: str, env: dict[str, str] | None = None) -> None:
        self.words = words
        self.version = version
        self.env = env or {}


class Library:
    """A client library with a program.

    Args:
        name: in the table.
        prepare: installs and builds it; raises ``build.MissingError`` where it cannot be had.
        versions: of MQTT, as programs take them.
        address: as the program takes it, with ``{port}``, ``{ws}`` or ``{wss}``.
        resumes_qos2: whether the library goes on with a QoS 2 message that was half-way when the connection ended.
    """

    def __init__(
        self,
        name: str,
        prepare: Callable[[], Command],
        versions: Sequence[str] = ("3", "5"),
        address: str = "127.0.0.1:{port}",
        *,
        resumes_qos2: bool = True,
    ) -> None:
        self.name = name
        self.versions = versions
        self._prepare = prepare
        self._address = address
        self._resumes_qos2 = resumes_qos2

    def prepare(self) -> Command:
        """Install and build it, unless that has been done.

        Raises:
            MissingError: it cannot be had here.
        """
        return self._prepare()

    def scenarios(self, command: Command, place: Place, version: str) -> Scenarios:
        """Its scenarios with a version of MQTT, by name."""
        session = Session(command, place, version, self._address, self._resumes_qos2)
        by_qos = {f"QoS {qos}": partial(session.messages, qos) for qos in (0, 1, 2)}
        return {
            "connect": session.connect,
            **by_qos,
            "will": session.will,
            "session": session.durable,
            "restart": session.restart,
        }


class Session:
    """The scenarios of one library and one version of MQTT. The name of each topic and client is new."""

    def __init__(self, command: Command, place: Place, version: str, address: str, resumes_qos2: bool) -> None:
        self._command = command
        self._place = place
        self._version = version
        self._address = address
        self._resumes_qos2 = resumes_qos2

    @contextlib.contextmanager
    def _start(self, client_id: str, *, clean: bool = True, will: str = "") -> Iterator[Program]:
        """A program that has asked to be connected; ended at the end."""
        place = self._place
        address = self._address.format(port=place.port, ws=place.ws, wss=place.wss)
        words = [*self._command.words, address, self._version, client_id, str(int(clean)), *([will] if will else [])]
        env = {name: value.format(authority=place.authority) for name, value in self._command.env.items()}
        program = Program(words, env, place.directory / "programs.log")
        try:
            yield program
        finally:
            program.discard()

    def connect(self) -> None:
        """CONNECT with a clean session, and DISCONNECT."""
        with self._start(_name()) as program:
            assert program.connected() in ("0", "?")
            program.disconnect()

    def messages(self, qos: int) -> None:
        """Messages at one QoS, to the client and from it."""
        name = _name()
        with self._start(name) as program, Peer(self._place.port) as peer:
            program.connected()
            program.subscribe(f"{name}/down", qos)
            peer.subscribe(f"{name}/up")
            for number in range(COUNT):
                program.publish(f"{name}/up", qos, str(number))
                peer.publish(f"{name}/down", 2, str(number))
            for side, arrived in (("up", peer.receive(COUNT)), ("down", program.receive(COUNT))):
                assert arrived == [Message(f"{name}/{side}", qos, str(number)) for number in range(COUNT)]
            program.disconnect()
        assert len(program.messages) == COUNT

    def will(self) -> None:
        """A client that ends without DISCONNECT has its will published; one that ends with it has not."""
        name = _name()
        with Peer(self._place.port) as peer:
            peer.subscribe(f"{name}/will")
            with self._start(name, will=f"{name}/will") as program:
                program.connected()
                program.disconnect()
            assert peer.settled() == []
            with self._start(name, will=f"{name}/will") as program:
                program.connected()
                program.kill()
            assert peer.receive(1) == [Message(f"{name}/will", 1, "gone")]

    def durable(self) -> None:
        """What is published while the client is away arrives when it comes back, in order, once."""
        name = _name()
        with self._start(name, clean=False) as program:
            program.connected()
            for qos in (1, 2):
                program.subscribe(f"{name}/{qos}", qos)
            program.disconnect()
        wanted = published(self._place.port, name)
        with self._start(name, clean=False) as program:
            assert program.connected() in ("1", "?")
            _compare(program.receive(len(wanted)), wanted)
            program.disconnect()
        assert len(program.messages) == len(wanted)
        self._forget(name)

    def restart(self) -> None:
        """The gateway is killed and started again: the client comes back by itself, and nothing is lost."""
        name = _name()
        with self._start(name, clean=False) as program:
            program.connected()
            for qos in (1, 2):
                program.subscribe(f"{name}/{qos}", qos)
            wanted = published(self._place.port, name, "before", (1, 2) if self._resumes_qos2 else (1,))
            self._place.gateway.restart(kill=True)
            assert program.connected(2) in ("1", "?")
            wanted += published(self._place.port, name, "after")
            with Peer(self._place.port) as peer:
                peer.subscribe(f"{name}/up")
                for qos in (0, 1, 2):
                    program.publish(f"{name}/up", qos, str(qos))
                assert peer.receive(3) == [Message(f"{name}/up", qos, str(qos)) for qos in (0, 1, 2)]
            _wait_for(program, wanted)
            twice = [one for one in program.messages if one.qos == 2]
            assert len(twice) == len(set(twice)), f"messages at QoS 2 came twice: {twice}"
            program.disconnect()
        self._forget(name)

    def _forget(self, name: str) -> None:
        """Remove a durable session."""
        with self._start(name) as program:
            assert program.connected() in ("0", "?")
            program.disconnect()


def published(port: int, name: str, payload: str = "", levels: Sequence[int] = (1, 2)) -> list[Message]:
    """Publish some messages below ``name`` at these QoS, and return them."""
    sent = [Message(f"{name}/{qos}", qos, f"{payload}{number}") for number in range(COUNT) for qos in levels]
    with Peer(port) as peer:
        for one in sent:
            peer.publish(*one)
    return sent


def _name() -> str:
    return f"kit{secrets.token_hex(4)}"


def _compare(arrived: list[Message], wanted: list[Message]) -> None:
    """Each topic has its messages in order."""
    for topic in {one.topic for one in wanted}:
        assert [one for one in arrived if one.topic == topic] == [one for one in wanted if one.topic == topic]


def _wait_for(program: Program, wanted: list[Message]) -> None:
    """Wait until each message has arrived, once or more."""
    count = len(wanted)
    while missing := set(wanted) - set(program.receive(count)):
        count = len(program.messages) + 1
        assert count <= 3 * len(wanted), f"{missing} did not arrive"
