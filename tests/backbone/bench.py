# SPDX-License-Identifier: Apache-2.0
"""A store on a link that keeps what it is given to send."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.backbone.link import Handler, NatsConnection
from mqtt_nats.backbone.pending_stores import PendingStore
from mqtt_streams.api import ApiError, NoResponders

ACK = b"$JS.ACK.$MQTT_msgs.C.1.1.1.1.0"

NO_RESPONDERS = b"NATS/1.0 503\r\n\r\n"


class FakeLink:
    """A link that keeps what it is given to send."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.max_payload = 1000
        self.online = True
        self.handler: Handler | None = None
        self.renewed: list[bytes] = []

    def kick(self) -> None:
        """Nothing to schedule."""

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
        outlasts: bool = False,
        by: object | None = None,
    ) -> None:
        self.log = log
        self.name = name
        self.optional = optional
        self._waits = waits
        self._outlasts = outlasts
        self._by = by

    def waits(self) -> bool:
        return self._waits

    def outlasts(self) -> bool:
        return self._outlasts

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
        subject: bytes = b"$MQTT.msgs.s",
        waits: bool = False,
        outlasts: bool = False,
        by: object | None = None,
    ) -> None:
        before = set(self.store.pending)
        headers = b"NATS/1.0\r\n%b\r\n" % (b"Nats-Msg-Id:%b\r\n" % identity if identity else b"")
        note = Note(self.log, name, waits=waits, outlasts=outlasts, by=by)
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
        self.stored = stored
        self.failures = 0
        bench.store.find = self.find

    async def find(self, since: float, ids: set[bytes]) -> dict[bytes, int]:
        self.asked.append(ids)
        self.since.append(since)
        if self.failures:
            self.failures -= 1
            raise NoResponders("a test")
        return {name: seq for name, seq in self.stored.items() if name in ids}
