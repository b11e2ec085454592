# SPDX-License-Identifier: Apache-2.0
"""A store on a link that keeps what it is given to send."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import cast

from mqtt_nats.backbone.acked_publisher import FENCE, AckedPublisher
from mqtt_nats.backbone.link import Handler, NatsConnection
from mqtt_nats.backbone.pending_stores import PendingStore
from mqtt_streams.api import ApiError, NoResponders

ACK = b"$JS.ACK.$MQTT_msgs.C.1.1.1.1.0"

NO_RESPONDERS = b"NATS/1.0 503\r\n\r\n"

PASSED = b'{"error":{"code":400,"err_code":10060,"description":"expected stream does not match"}}'
"""What a stream answers to a fence."""


class FakeLink:
    """A link that keeps what it is given to send."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.max_payload = 1000
        self.online = True
        self.handler: Handler | None = None
        self.renewed: list[bytes] = []
        self.fences: list[bytes] = []
        """Reply subjects of fences, in order."""
        self.passes = True
        """Whether a fence is answered, as by a stream that has handled all before."""

    def kick(self) -> None:
        """Nothing to schedule. Fences do not stay in ``out``."""
        for frame in [frame for frame in self.out if FENCE in frame]:
            self.out.remove(frame)
            self.fences.append(frame.split(b" ")[2])
            if self.passes:
                asyncio.get_running_loop().call_soon(self.answer_fence)

    def answer_fence(self, payload: bytes = PASSED, headers: bytes = b"") -> None:
        """Answer the last fence."""
        assert self.handler is not None
        self.handler(self.fences[-1], b"", headers, payload)

    def subscribe_raw(self, subject: bytes, handler: Handler) -> bytes:
        self.handler = handler
        return b"1"

    def withdraw(self, frames: Iterable[bytes]) -> None:
        withdrawn = set(frames)
        self.out = [frame for frame in self.out if frame not in withdrawn]

    def renew(self, sid: bytes, subject: bytes) -> None:
        self.out.append(b"SUB " + subject)

    def take(self) -> list[bytes]:
        out, self.out = self.out, []
        return out


class Note(PendingStore):
    """Writes its end down."""

    def __init__(
        self,
        log: list[object],
        name: str,
        optional: bool = False,
        waits: bool = False,
        by: object | None = None,
    ) -> None:
        self.log = log
        self.name = name
        self.optional = optional
        self._waits = waits
        self._by = by

    def waits(self) -> bool:
        return self._waits

    def publisher(self) -> object | None:
        return self._by

    def stored(self, ack: bytes) -> None:
        self.log.append((self.name, ack))

    def failed(self, error: ApiError) -> None:
        self.log.append((self.name, error.err_code))


class Bench:
    """A store on a fake link."""

    def __init__(self) -> None:
        self.link = FakeLink()
        self.pressure: list[bool] = []
        self.store = AckedPublisher(cast(NatsConnection, self.link), self.pressure.append)
        self.log: list[object] = []
        self.replies: dict[str, bytes] = {}

    def put(
        self,
        name: str,
        payload: bytes = b"x",
        *,
        identity: bytes = b"",
        message_id: bytes = b"",
        subject: bytes = b"$MQTT.msgs.s",
        waits: bool = False,
        by: object | None = None,
    ) -> None:
        before = set(self.store.pending)
        lines = b"Nmqtt-Id:%b\r\n" % message_id if message_id else b""
        lines += b"Nats-Msg-Id:%b\r\n" % identity if identity else b""
        headers = b"NATS/1.0\r\n%b\r\n" % lines
        note = Note(self.log, name, waits=waits, by=by)
        self.store.put(b"HPUB %b " % subject, headers, payload, note)
        (token,) = set(self.store.pending) - before
        self.replies[name] = self.store.prefix + token

    @property
    def stalled(self) -> bool:
        """Something is not sent."""
        return self.store._in_outage

    def op(self, name: str) -> PendingStore:
        """The operation that was put under a name."""
        return self.store.pending[self.replies[name].removeprefix(self.store.prefix)]

    def acknowledge(self, name: str, subject: bytes = ACK) -> bytes:
        """An acknowledgement that is to be confirmed; its token."""
        self.store.call(subject, b"", Note(self.log, name, optional=True))
        token = list(self.store.pending)[-1]
        self.replies[name] = self.store.prefix + token
        return token

    def answer(self, name: str, payload: bytes = b'{"seq":1}', headers: bytes = b"") -> None:
        assert self.link.handler is not None
        self.link.handler(self.replies[name], b"", headers, payload)

    def sent(self) -> list[str]:
        """Names of the operations that were sent since the last look, in order."""
        names = {reply: name for name, reply in self.replies.items()}
        return [names[frame.split(b" ")[2]] for frame in self.link.take() if not frame.startswith(b"SUB ")]


class Look:
    """What is stored, for a store that wants to know."""

    def __init__(self, bench: Bench, stored: dict[bytes, int]) -> None:
        self.asked: list[set[bytes]] = []
        self.since: list[float] = []
        self.after: list[int] = []
        self.stored = stored
        self.failures = 0
        bench.store.find = self.find

    async def find(self, keys: set[bytes], since: float, after: int) -> dict[bytes, int]:
        self.asked.append(keys)
        self.since.append(since)
        self.after.append(after)
        if self.failures:
            self.failures -= 1
            raise NoResponders("a test")
        return {name: seq for name, seq in self.stored.items() if name in keys}
