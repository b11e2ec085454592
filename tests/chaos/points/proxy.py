# SPDX-License-Identifier: Apache-2.0
"""A proxy between a gateway and nats-server that knows NATS's protocol, and does something at one frame.

Theory of operation. Each direction is cut into frames; each frame that carries a message is known by its *way* and
its subject. ``up`` is from the gateway; ``answer`` is a message to a reply subject that the gateway has named, known by
the subject on which it had asked; ``down`` is any other message to the gateway. A :class:`Trap` waits for the nth frame
of one way whose subject begins as it says.

From the moment of a kill on, nothing that the gateway has written passes any more, on none of its connections: what was
in its sockets is lost, as when its machine dies. What the server had already been sent, it gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Final, NamedTuple

HOST: Final = "127.0.0.1"

HANDLED: Final = 2.0
"""Seconds in which a gateway has handled a frame."""

_READ: Final = 65_536
_CARRIERS: Final = frozenset((b"PUB", b"HPUB", b"MSG", b"HMSG"))


class Action(Enum):
    """What is done at a frame."""

    DROP = "drop"
    """It does not arrive; everything else goes on."""
    HOLD = "hold"
    """It and everything behind it on its connection wait until :meth:`Trap.release`."""
    ALTER = "alter"
    """What its answer says is changed by :attr:`Trap.alter`."""
    BEFORE = "kill before"
    """The gateway dies, and the frame does not arrive."""
    AFTER = "kill after"
    """The gateway dies; the server has got the frame, or the gateway has handled it, to no effect on NATS."""


class Frame(NamedTuple):
    """One frame. ``way``: up, answer or down; ``subject``: for an answer, on which it was asked; empty without one."""

    way: str
    verb: str
    subject: str
    data: bytes


class Trap:
    """Waits for one frame.

    Args:
        way: up, answer or down.
        prefix: how its subject begins.
        action: what is done then.
        nth: which of the frames that match; 1 is the first.
        part: bytes that the frame contains.
    """

    def __init__(self, way: str, prefix: str, action: Action, nth: int = 1, part: bytes = b"") -> None:
        self.way, self.prefix, self.action, self.nth, self.part = way, prefix, action, nth, part
        self.alter: Callable[[dict[str, Any]], None] = lambda answer: None
        """Changes what JetStream answers."""
        self.frame: Frame | None = None
        """The frame at which something was done."""
        self.sprung = asyncio.Event()
        self._released = asyncio.Event()
        self._seen = 0

    def matches(self, frame: Frame) -> bool:
        """Whether this is the frame; counts those before it."""
        if frame.way != self.way or not frame.subject.startswith(self.prefix) or self.part not in frame.data:
            return False
        self._seen += 1
        return self._seen == self.nth

    def release(self) -> None:
        """Let go of what is held."""
        self._released.set()

    async def released(self) -> None:
        """Wait for :meth:`release`."""
        await self._released.wait()

    def __str__(self) -> str:
        return f"{self.action.value} {self.way} {self.prefix} #{self.nth}"


class Splitter:
    """Cuts one direction of a NATS connection into frames."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> Iterator[tuple[list[bytes], bytes]]:
        """The words of the first line, and the whole frame, of each that is complete."""
        self._data += data
        start = 0
        while (end := self._data.find(b"\r\n", start)) >= 0:
            words = self._data[start:end].split(b" ")
            end += 2
            if words[0] in _CARRIERS:
                end += int(words[-1]) + 2
                if end > len(self._data):
                    break
            yield words, self._data[start:end]
            start = end
        self._data = self._data[start:]


class _Pair:
    """A connection of the gateway's and the one to the server that belongs to it."""

    def __init__(
        self, proxy: NatsProxy, gateway: tuple[asyncio.StreamReader, asyncio.StreamWriter], server: _Streams
    ) -> None:
        self.proxy = proxy
        self.gateway_reader, self.gateway = gateway
        self.server_reader, self.server = server
        self.dead = False
        self.handled: asyncio.Event | None = None
        self._asked: dict[str, str] = {}

    async def run(self) -> None:
        await asyncio.gather(self._up(), self._down())

    async def _up(self) -> None:
        splitter = Splitter()
        with contextlib.suppress(OSError):
            while data := await self.gateway_reader.read(_READ):
                for words, frame in splitter.feed(data):
                    if self.handled is not None and words[0] == b"PONG":
                        self.handled.set()
                    if not self.dead:
                        await self._pass(self._of_gateway(words, frame), self.server)
        if not self.dead:
            self._end(self.server)

    async def _down(self) -> None:
        splitter = Splitter()
        with contextlib.suppress(OSError):
            while data := await self.server_reader.read(_READ):
                for words, frame in splitter.feed(data):
                    if not self.dead:
                        await self._pass(self._of_server(words, frame), self.gateway)
        self._end(self.gateway)

    @staticmethod
    def _end(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()

    def _of_gateway(self, words: list[bytes], data: bytes) -> Frame:
        verb = words[0].decode()
        if words[0] not in _CARRIERS:
            return Frame("up", verb, "", data)
        subject = words[1].decode("utf-8", "replace")
        if len(words) > (4 if words[0] == b"HPUB" else 3):
            self._asked[words[2].decode("utf-8", "replace")] = subject
        return Frame("up", verb, subject, data)

    def _of_server(self, words: list[bytes], data: bytes) -> Frame:
        verb = words[0].decode()
        if verb == "INFO":
            info = json.loads(data[5:])
            info.pop("connect_urls", None)  # the gateway is to know no other way
            return Frame("down", verb, "", b"INFO " + json.dumps(info).encode() + b"\r\n")
        if words[0] not in _CARRIERS:
            return Frame("down", verb, "", data)
        subject = words[1].decode("utf-8", "replace")
        asked = self._asked.get(subject)
        return Frame("down", verb, subject, data) if asked is None else Frame("answer", verb, asked, data)

    @staticmethod
    def _write(sink: asyncio.StreamWriter, data: bytes) -> None:
        """Write; uvloop raises no OSError where the connection was lost meanwhile."""
        if sink.transport.is_closing():
            raise ConnectionResetError
        sink.write(data)

    async def _pass(self, frame: Frame, sink: asyncio.StreamWriter) -> None:
        proxy = self.proxy
        trap = proxy.trapped(frame) if frame.subject else None
        if trap is None:
            self._write(sink, frame.data)
            return
        trap.frame = frame
        if trap.action is Action.ALTER:
            self._write(sink, _altered(frame.data, trap.alter))
            trap.sprung.set()
            return
        if trap.action is Action.HOLD:
            trap.sprung.set()
            await trap.released()
            if not self.dead:
                self._write(sink, frame.data)
            return
        if trap.action is Action.AFTER:
            self._write(sink, frame.data)
            if frame.way != "up":
                await self._until_handled()
        if trap.action is not Action.DROP:
            proxy.crash()
        trap.sprung.set()

    async def _until_handled(self) -> None:
        """Let nothing more pass, and wait until the gateway has handled what it was sent."""
        self.proxy.deafen()
        self.handled = asyncio.Event()
        self._write(self.gateway, b"PING\r\n")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.handled.wait(), HANDLED)

    def let_server_go(self) -> None:
        """The server gets what it was sent, and then the end."""
        self._end(self.server)

    def close(self) -> None:
        for writer in (self.gateway, self.server):
            writer.close()


def _altered(data: bytes, alter: Callable[[dict[str, Any]], None]) -> bytes:
    """A message without headers, whose JSON is changed."""
    line, _, payload = data.partition(b"\r\n")
    answer = json.loads(payload)
    alter(answer)
    payload = json.dumps(answer).encode()
    return b"%b %d\r\n%b\r\n" % (line.rpartition(b" ")[0], len(payload), payload)


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class NatsProxy:
    """Between one gateway and one nats-server.

    Args:
        target: port of the server.
        kill: ends the gateway at once.
        on_frame: is told of every message that passes.
    """

    def __init__(
        self, target: int, kill: Callable[[], None], on_frame: Callable[[Frame], None] = lambda frame: None
    ) -> None:
        self._target = target
        self._kill = kill
        self._on_frame = on_frame
        self._server: asyncio.Server | None = None
        self._pairs: dict[_Pair, asyncio.Task[None]] = {}
        self.traps: list[Trap] = []
        self.port = 0
        self.away = False
        """There is no server for the gateway."""
        self.crashed_at: list[Frame] = []
        """The frames at which the gateway was killed."""

    async def start(self) -> None:
        """Accept connections of the gateway."""
        self._server = await asyncio.start_server(self._accepted, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        """URL for the gateway."""
        return f"nats://{HOST}:{self.port}"

    def set(self, way: str, prefix: str, action: Action, nth: int = 1, part: bytes = b"") -> Trap:
        """Wait for a frame from now on."""
        trap = Trap(way, prefix, action, nth, part)
        self.traps.append(trap)
        return trap

    def trapped(self, frame: Frame) -> Trap | None:
        """The trap that waits for this frame."""
        self._on_frame(frame)
        for trap in self.traps:
            if trap.matches(frame):
                self.traps.remove(trap)
                if trap.action in (Action.BEFORE, Action.AFTER):
                    self.crashed_at.append(frame)
                return trap
        return None

    def deafen(self) -> None:
        """Let nothing more of the gateway's pass."""
        for pair in self._pairs:
            pair.dead = True

    def cut(self) -> None:
        """End every connection; new ones are accepted."""
        for pair in self._pairs:
            pair.close()

    def lose(self) -> None:
        """End every connection, and accept none until `away` is False again."""
        self.away = True
        self.cut()

    def crash(self) -> None:
        """Kill the gateway: what it has written and did not pass is lost."""
        self.deafen()
        self._kill()
        for pair in self._pairs:
            pair.let_server_go()

    async def close(self) -> None:
        """End everything."""
        if self._server is not None:
            self._server.close()
        for trap in self.traps:
            trap.release()
        for pair, task in list(self._pairs.items()):
            pair.close()
            task.cancel()
        await asyncio.gather(*self._pairs.values(), return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.away:
            writer.close()
            return
        try:
            server = await asyncio.open_connection(HOST, self._target)
        except OSError:
            writer.close()
            return
        pair = _Pair(self, (reader, writer), server)
        self._pairs[pair] = task = asyncio.get_running_loop().create_task(pair.run())
        await asyncio.wait([task])
        del self._pairs[pair]
        pair.close()
