# SPDX-License-Identifier: Apache-2.0
"""A client program that runs, and the lines that it reads and writes."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.harness.waiting import eventually

WAIT_S = 40.0
END_S = 30.0


class Message(NamedTuple):
    """A message that has arrived."""

    topic: str
    qos: int
    payload: str


class Program:
    """One run of a client program, which is one MQTT client.

    Args:
        command: with all its arguments.
        env: added to our environment.
        log: for what it writes to standard error.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.messages: list[Message] = []
        self._log = log
        self._events: dict[str, list[str]] = {"connected": [], "subscribed": [], "published": []}
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **env},
                text=True,
                bufsize=1,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            name, *words = line.split()
            if name == "message":
                topic, qos, payload = words
                self.messages.append(Message(topic, int(qos), payload))
            else:
                self._events[name].append(" ".join(words))

    def _wait(self, event: str, count: int) -> str:
        """Detail of the event number ``count``, from 1."""

        def happened() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(f"the program has ended: {self._errors()}")
            return len(self._events[event]) >= count

        eventually(happened, WAIT_S, what=f"{event!r} ({count})")
        return self._events[event][count - 1]

    def _errors(self) -> str:
        return " ".join(self._log.read_text(encoding="utf-8", errors="replace").split())[-300:]

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def connected(self, count: int = 1) -> str:
        """Wait for CONNACK number ``count``; whether it said that the session was present."""
        return self._wait("connected", count)

    def subscribe(self, topic_filter: str, qos: int) -> None:
        """Subscribe, and wait for the SUBACK that grants it."""
        before = len(self._events["subscribed"])
        self._send(f"subscribe {topic_filter} {qos}")
        granted = self._wait("subscribed", before + 1)
        assert granted == str(qos), f"SUBACK has {granted} in place of {qos}"

    def publish(self, topic: str, qos: int, payload: str) -> None:
        """Publish, and wait until it is acknowledged."""
        before = len(self._events["published"])
        self._send(f"publish {topic} {qos} {payload}")
        self._wait("published", before + 1)

    def receive(self, count: int) -> list[Message]:
        """Wait for ``count`` messages in all; every one so far."""
        try:
            eventually(lambda: len(self.messages) >= count, WAIT_S)
        except AssertionError:
            raise AssertionError(f"{len(self.messages)} of {count} messages arrived: {self.messages}") from None
        return self.messages

    def disconnect(self) -> None:
        """End it in an orderly way."""
        self._send("disconnect")
        status = self._process.wait(END_S)
        assert status == 0, f"exit status {status}: {self._errors()}"
        self.discard()

    def kill(self) -> None:
        """End it without a DISCONNECT."""
        self.discard()

    def discard(self) -> None:
        """End it, whatever its state."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
