# SPDX-License-Identifier: Apache-2.0
"""Copies of QoS 1 and 2 messages that NATS has brought to another subject: the gateway stores them in the stream.

The headers of a message at QoS 1 or 2 promise that it is stored under its subject. A stream that republishes, an import
under another name and a relay keep the headers: such a copy reaches subscribers, but is not stored. The fan-out reports
messages that may be copies. A moment later the gateway looks whether the stream has the message under that subject. If
not, the copy is stored, under an id that is the same on every gateway. A copy that another program may be about to
store there is only counted. See docs/internals/messages.md#copies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.backbone.pending_stores import PendingStore, TooLarge
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.base.logs import log_failure
from mqtt_nats.messages.headers import header
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.messages import PREFIX, STREAM
from mqtt_streams.pages import SubjectReader
from mqtt_streams.stored import rfc3339

log = logging.getLogger("mqtt_nats.broker")

DELAY_S: Final = 1.0
"""Seconds in which a message that its publisher stores has arrived in the stream."""

BEFORE_S: Final = 5.0
"""Seconds by which a message may have been stored before its bare copy came on the subject."""

WAITING_MAX: Final = 4096
"""Largest number of copies that wait, and of subjects with unclear ones; further copies are dropped."""

WAITING_BYTES_MAX: Final = 16 * 1024 * 1024
"""Largest number of bytes, headers and payloads, of the copies that wait."""

PAGES_MAX: Final = 32
"""Largest number of pages that are read for one subject; where the subject has more, its copies are dropped."""

PAGE_MESSAGES: Final = 512
PAGE_BYTES: Final = 2 * 1024 * 1024

TOO_MUCH: Final = f"more than {PAGES_MAX * PAGE_MESSAGES} messages are to be looked at"

COPIED: Final = b"copy-"
"""Beginning of the `Nats-Msg-Id` of a copy that a gateway has stored."""


class Copy(NamedTuple):
    """A message that may be a copy without a store."""

    subject: str
    target: bytes
    headers: bytes
    payload: bytes
    message_id: bytes
    """`Nmqtt-Id` of the message; empty = none."""
    known_by: bytes
    """`Nats-Msg-Id` under which the copy is stored."""
    since: float
    """Unix time in seconds, by nats-server's clock, at which the message came."""

    @property
    def size(self) -> int:
        """Size of the copy in bytes: headers and payload."""
        return len(self.headers) + len(self.payload)


class Unclear:
    """Copies on one subject that another program may be about to store: the check of the first one counts for all.

    One mechanism of NATS brings all of them, and stores either all or none.
    """

    __slots__ = ("count", "last", "message_id", "since")

    def __init__(self, message_id: bytes) -> None:
        self.message_id = message_id
        self.since = natstime.now()
        """Unix time in seconds, by nats-server's clock, at which the first one came."""
        self.count = 1
        self.last = message_id

    def add(self, message_id: bytes) -> None:
        """Count a further copy; a copy comes once for each NATS subscription that matches, one after the other."""
        if message_id != self.last:
            self.last = message_id
            self.count += 1


class Copies:
    """Possible copies of one gateway that wait for a look at the stream.

    Args:
        online: set while NATS is connected.
        spawn: runs a coroutine in the gateway's task group.
        dropped: is told the reason and the number of copies that are passed over.
    """

    def __init__(
        self,
        link: NatsConnection,
        inbox: RequestInbox,
        store: AckedPublisher,
        online: asyncio.Event,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        dropped: Callable[[str, int], None],
    ) -> None:
        self._link, self._inbox, self._store, self._online = link, inbox, store, online
        self._spawn, self._dropped = spawn, dropped
        self._waiting: dict[bytes, Copy] = {}
        """Waiting copies by `known_by`: a copy comes once for each NATS subscription that matches."""
        self._bytes = 0
        self._unclear: dict[str, Unclear] = {}
        """Unclear copies by subject."""
        self._working = False
        self.stored = 0
        """Number of copies that this gateway has stored."""

    def waiting(self) -> int:
        """Return the number of waiting copies."""
        return len(self._waiting) + len(self._unclear)

    def suspect(self, subject: str, target: bytes, headers: bytes, payload: bytes) -> None:
        """Queue a message at QoS 1 or 2 that may not be stored under the subject on which it has come.

        Args:
            target: beginning of the frame that stores the message.
        """
        message_id = header(headers, b"Nmqtt-Id:")
        if not message_id and b"\r\nNats-Stream:" not in headers:
            return  # a message of nats-server's own MQTT listener, which has stored it
        known_by = _known_by(message_id, headers, subject)
        found = Copy(subject, target, headers, payload, message_id, known_by, natstime.now())
        if known_by in self._waiting:
            return
        if header(headers, b"Nats-Msg-Id:").startswith(COPIED):
            self._pass_over(subject, "it is a copy of a copy")
        elif len(self._waiting) >= WAITING_MAX or self._bytes + found.size > WAITING_BYTES_MAX:
            self._pass_over(subject, "too many wait")
        else:
            self._waiting[known_by] = found
            self._bytes += found.size
            self._begin()

    def doubt(self, subject: str, headers: bytes) -> None:
        """Note a message at QoS 1 or 2 whose publisher stores it under another subject than the one on which it came.

        An import of another account, or a relay, has brought it. Either may bring the stored message to this subject as
        well, late, under an id that is not known here: to store the copy would double it. The copy is counted as
        dropped if the stream does not have it a moment later.
        """
        message_id = header(headers, b"Nmqtt-Id:")
        found = self._unclear.get(subject)
        if found is not None:
            found.add(message_id)
        elif len(self._unclear) >= WAITING_MAX:
            self._pass_over(subject, "too many wait")
        else:
            self._unclear[subject] = Unclear(message_id)
            self._begin()

    def _begin(self) -> None:
        if not self._working:
            self._working = True
            self._spawn(self._work(), "copies of messages")

    def _pass_over(self, subject: str, why: object, count: int = 1) -> None:
        self._dropped("copy", count)
        text = "%d copies of messages on subject %r were not stored: %s"
        log_failure(log, logging.WARNING, "copy", text, count, subject, why)

    async def _work(self) -> None:
        """Decide about waiting copies until none waits."""
        try:
            while self.waiting():
                await asyncio.sleep(DELAY_S)
                await self._online.wait()
                due = natstime.now() - DELAY_S
                await self._count_unclear(due)
                by_subject: dict[str, list[Copy]] = {}
                for one in [one for one in self._waiting.values() if one.since <= due]:
                    by_subject.setdefault(one.subject, []).append(one)
                for subject, copies in by_subject.items():
                    try:
                        await self._decide(subject, copies)
                    except (ApiError, NoResponders, RequestTimeout) as error:
                        log.debug("copies on subject %r wait: %s", subject, error)
                        continue
                    for one in copies:
                        del self._waiting[one.known_by]
                    self._bytes -= sum(one.size for one in copies)
        finally:
            self._working = False

    async def _decide(self, subject: str, copies: list[Copy]) -> None:
        """Store the copies that the stream does not have, in their order.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        there = await self._stored_ids(subject, copies[0].since)
        for one in copies:
            if there is None:
                self._pass_over(subject, TOO_MUCH)
            elif one.message_id not in there and one.known_by not in there:
                self._keep(one)

    async def _count_unclear(self, due: float) -> None:
        """Count the unclear copies that came up to ``due``, Unix time in seconds, and that the stream does not have."""
        for subject, one in [(subject, one) for subject, one in self._unclear.items() if one.since <= due]:
            try:
                there = await self._stored_ids(subject, one.since)
            except (ApiError, NoResponders, RequestTimeout) as error:
                log.debug("copies on subject %r wait: %s", subject, error)
                continue
            del self._unclear[subject]
            if there is None:
                self._pass_over(subject, TOO_MUCH, one.count)
            elif one.message_id not in there:
                self._pass_over(subject, "an import or another program has brought them", one.count)

    async def _stored_ids(self, subject: str, since: float) -> set[bytes] | None:
        """Return the ids of the messages that are stored under a subject; None: there are too many."""
        start = {"start_time": rfc3339(int((since - BEFORE_S) * 1e9))}
        found: set[bytes] = set()
        reader = SubjectReader(self._inbox, STREAM, PREFIX + subject, start)
        try:
            for _ in range(PAGES_MAX):
                for message in await reader.page(PAGE_MESSAGES, PAGE_BYTES):
                    found.add(header(message.headers, b"Nmqtt-Id:"))
                    found.add(header(message.headers, b"Nats-Msg-Id:"))
                if not reader.more:
                    found.discard(b"")
                    return found
        finally:
            await reader.close()
        return None

    def _keep(self, one: Copy) -> None:
        lines = [line for line in one.headers.split(b"\r\n")[1:] if line and _stays(line)]
        headers = b"\r\n".join([b"NATS/1.0", *lines, b"Nats-Msg-Id:" + one.known_by, b"", b""])
        try:
            self._store.put(one.target, headers, one.payload, CopyOp(self, one))
        except TooLarge as error:
            self._pass_over(one.subject, error)
        else:
            self._link.kick()

    def count_copy(self, one: Copy, ack: bytes, error: ApiError | None) -> None:
        """Count a stored copy, unless another gateway has stored it first; a refused copy is dropped."""
        if error is not None:
            self._pass_over(one.subject, error)
        elif b'"duplicate":' not in ack:
            self.stored += 1


class CopyOp(PendingStore):
    """The store of a copy."""

    __slots__ = ("_copies", "_copy")

    def __init__(self, copies: Copies, copy: Copy) -> None:
        self._copies = copies
        self._copy = copy

    def stored(self, ack: bytes) -> None:
        """Report the PubAck: the copy is in the stream, stored now or before."""
        self._copies.count_copy(self._copy, ack, None)

    def failed(self, error: ApiError) -> None:
        """Report that JetStream has refused the copy."""
        self._copies.count_copy(self._copy, b"", error)


def _known_by(message_id: bytes, headers: bytes, subject: str) -> bytes:
    """Return the id of a copy: a hash of message id and subject, else of its place in another stream and subject."""
    origin = message_id or b"%b %b" % (header(headers, b"Nats-Stream:"), header(headers, b"Nats-Sequence:"))
    return COPIED + blake2b(b"%b %b" % (origin, subject.encode()), digest_size=16).hexdigest().encode()


def _stays(line: bytes) -> bool:
    """Whether a header line of a copy is stored with it: none of the bare copy, none that NATS has added or obeys."""
    name = line.partition(b":")[0].strip().lower()
    return (name != b"nmqtt-subject" and not name.startswith(b"nats-")) or name.startswith(b"nats-service-error")
