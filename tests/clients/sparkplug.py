# SPDX-License-Identifier: Apache-2.0
"""Sparkplug B: an edge node with a device, and a host application, both of pysparkplug (MQTT 3.1.1, clean sessions)."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Iterator, Sequence

from tests.clients import build
from tests.clients.build import PROGRAMS
from tests.clients.place import Place
from tests.clients.program import Message, Program
from tests.clients.scenarios import Command, Scenarios
from tests.harness.waiting import eventually

PYSPARKPLUG = "0.6.1"


class Sparkplug:
    """Its row in the table."""

    name = "pysparkplug"
    versions: Sequence[str] = ("3",)

    def prepare(self) -> Command:
        """Install it."""
        path = str(build.pip(f"pysparkplug=={PYSPARKPLUG}"))
        return Command([sys.executable, str(PROGRAMS / "sparkplug_python.py")], PYSPARKPLUG, {"PYTHONPATH": path})

    def scenarios(self, command: Command, place: Place, version: str) -> Scenarios:
        """What both do; births, deaths and data have QoS 0."""
        use = _Use(command, place)
        return {"connect": use.connect, "QoS 0": use.messages, "will": use.will, "restart": use.restart}


class _Use:
    """The scenarios of a host application and an edge node."""

    def __init__(self, command: Command, place: Place) -> None:
        self._command = command
        self._place = place

    @contextlib.contextmanager
    def _pair(self) -> Iterator[tuple[Program, Program]]:
        """A host application, and an edge node whose birth it has seen."""
        group = f"kit{secrets.token_hex(4)}"
        with self._run("host", group) as host:
            host.connected()
            _until(host, host, "NCMD", 7)  # its subscription is in force when it gets what it sends itself
            with self._run("edge", group) as edge:
                _see(host, Message("NBIRTH", 0, "0"))
                yield host, edge

    @contextlib.contextmanager
    def _run(self, role: str, group: str) -> Iterator[Program]:
        words = [*self._command.words, role, f"127.0.0.1:{self._place.port}", group]
        program = Program(words, self._command.env, self._place.directory / "programs.log")
        try:
            yield program
        finally:
            program.discard()

    def connect(self) -> None:
        """The host sees the births of the node and of its device."""
        with self._pair() as (host, _):
            _see(host, Message("DBIRTH", 0, "0"))

    def messages(self) -> None:
        """Data to the host, a command to the node."""
        with self._pair() as (host, edge):
            edge.publish("NDATA", 0, "21")
            _see(host, Message("NDATA", 0, "21"))
            _until(host, edge, "NCMD", 42)

    def will(self) -> None:
        """The host sees the death of a node that is killed, with the number of its birth."""
        with self._pair() as (host, edge):
            edge.kill()
            _see(host, Message("NDEATH", 0, "0"))

    def restart(self) -> None:
        """The gateway is killed and started again: both come back, and the node's next death has the next number."""
        with self._pair() as (host, edge):
            self._place.gateway.restart(kill=True)
            host.connected(2)
            _until(host, edge, "NCMD", 43)
            _until(edge, host, "NDATA", 22)
            edge.kill()
            _see(host, Message("NDEATH", 0, "1"))


def _see(program: Program, wanted: Message) -> None:
    eventually(lambda: wanted in program.messages, what=f"{wanted} among {program.messages}")


def _until(source: Program, target: Program, kind: str, value: int) -> None:
    """Publish until it arrives: neither program says when it has subscribed."""

    def arrives() -> bool:
        source.publish(kind, 0, str(value))
        return Message(kind, 0, str(value)) in target.messages

    eventually(arrives, what=f"{kind} {value}")
