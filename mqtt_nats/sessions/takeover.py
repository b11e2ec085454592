# SPDX-License-Identifier: Apache-2.0
"""Takeover: the signals by which a gateway learns of claims, and whether a session still belongs to a connection.

A signal is the acknowledgement of a write to a session record. A gateway hears the signals of the buckets of its
sessions, or all while nats-server's own listener serves clients, whose signals do not name the bucket. See
docs/internals/sessions.md#takeover-signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import orjson

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.backbone.retry import TimedPermit
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.base.logs import once
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.hashing import SECOND_KEY_LENGTH, registered_as
from mqtt_streams.sessions import (
    SECOND_BUCKET,
    STREAM,
    PoisonedRecord,
    claim_bucket,
    claim_subject,
    claiming_gateway,
    claims_of,
)

if TYPE_CHECKING:
    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.base.tasks import Tasks
    from mqtt_nats.sessions.services import Services
    from mqtt_nats.sessions.session import Session
    from mqtt_streams.sessions import SessionRecord, SessionStore

log = logging.getLogger("mqtt_nats.broker")

SIGNALS: Final = b"$MQTT.JSA.*.SP.*.*"
"""Subjects on which all writes to session records are acknowledged, as :func:`claim_subject` returns them."""

RECORDS_READABLE_RETRY_S: Final = 0.25
"""Seconds between two questions whether records can be read again."""

EARLIER_PACKETS_MOST_S: Final = 5.0
"""Most seconds for which a connection waits until the packets of an earlier connection are handled."""

LAST_BYTES_RESOLUTION_S: Final = 0.01
"""Resolution, in seconds, of the time at which the last bytes of a client came."""

RECORDS_READ_AT_ONCE: Final = 64
"""Sessions whose records are read at the same time."""

NO_KEY: Final = "-"
"""A key that no session has."""

IDLE_BUCKETS_MOST: Final = 256
"""Most buckets without sessions of this gateway whose claims are still heard, of 62 × 62 buckets."""


class Claims:
    """The connections of this gateway that have claimed a session, or are about to."""

    def __init__(self, nats: NatsLinks, sessions: SessionStore, domain: str, identity: str) -> None:
        self._nats, self._sessions, self._domain = nats, sessions, domain
        self._clients: dict[str, tuple[Session, ...]] = {}
        """Connections by the hash of the client id, oldest first; several while a session is taken over."""
        self._served: dict[str, asyncio.Event] = {}
        """Events by the hash of the client id, set when an earlier connection has no packets left to handle."""
        self._own: set[bytes] = set()
        """The ids that this gateway has had."""
        self.second_keys = True
        """Whether sessions may have second keys; False = it is known that no session has one."""
        self._second_writes = 0
        """Number of signals for sessions under second keys."""
        self._buckets = {SECOND_BUCKET: 1}
        """Number of those that hear the claims of a bucket, by bucket."""
        self._sids: dict[str, bytes] = {}
        """Subscriptions by bucket; none while all claims are heard."""
        self._idle: dict[str, None] = {}
        """Buckets that are still subscribed although nobody hears their claims, oldest first: clients connect again."""
        self._all = nats.link.subscribe_raw(SIGNALS, self._heard)
        """Subscription of all claims; empty = those of :attr:`_buckets` are heard."""
        self.named(identity)
        nats.reconnect.register(Phase.CLAIMS, self._renew)
        nats.reconnect.register(Phase.CLAIMS, self.doubt_second_keys)

    def named(self, identity: str) -> None:
        """Add an id of the gateway."""
        self._own.add(identity.encode())

    @property
    def hears_all(self) -> bool:
        """Whether the claims of all sessions are heard, whatever their subjects name."""
        return bool(self._all)

    def hear_all(self) -> bool:
        """Hear the claims of all sessions; return whether that is new: others' may have been missed until now."""
        if self._all:
            return False
        self._all = self._nats.link.subscribe_raw(SIGNALS, self._heard)
        for sid in self._sids.values():
            self._nats.link.unsubscribe_raw(sid)
        self._sids.clear()
        self._idle.clear()
        return True

    def hear_concerned(self) -> None:
        """Hear only the claims of buckets of this gateway's sessions: the subjects of all claims name the bucket."""
        for bucket in self._buckets:
            self._subscribe(bucket)
        self._nats.link.unsubscribe_raw(self._all)
        self._all = b""

    def _subscribe(self, bucket: str) -> None:
        self._sids[bucket] = self._nats.link.subscribe_raw(claims_of(bucket).encode(), self._heard)

    def _renew(self) -> None:
        """Hear all claims after a reconnect: nats-server's listener may serve clients since then."""
        if not self.hear_all():
            self._nats.link.renew(self._all, SIGNALS)

    @contextlib.contextmanager
    def hearing(self, key: str) -> Iterator[None]:
        """Hear the claims of a session within the block, as the acknowledgement of a claim of this gateway."""
        self._hear(key)
        try:
            yield
        finally:
            self._ignore(key)

    def _hear(self, key: str) -> None:
        bucket = claim_bucket(key)
        count = self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        if count > 1 or self._all:
            return
        if bucket in self._idle:
            del self._idle[bucket]
        else:
            self._subscribe(bucket)

    def _ignore(self, key: str) -> None:
        bucket = claim_bucket(key)
        count = self._buckets[bucket] = self._buckets[bucket] - 1
        if count:
            return
        del self._buckets[bucket]
        if self._all:
            return
        self._idle[bucket] = None
        if len(self._idle) > IDLE_BUCKETS_MOST:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            self._nats.link.unsubscribe_raw(self._sids.pop(oldest))

    def doubt_second_keys(self) -> None:
        """Note that sessions may have second keys: signals of writes were missed."""
        self.second_keys = True

    async def look_for_second_keys(self) -> bool:
        """Whether any session has a second key. Raises ApiError, NoResponders, RequestTimeout."""
        if self.second_keys:
            writes = self._second_writes
            found = await self._sessions.any_second()
            self.second_keys = found or writes != self._second_writes
        return self.second_keys

    def listen(self, client: Session) -> bool:
        """Add a connection that is about to claim its session; return whether earlier ones are here: see `turn`."""
        self._hear(client.hash)
        earlier = self._clients.get(client.hash, ())
        self._clients[client.hash] = (*earlier, client)
        return bool(earlier)

    async def turn(self, client: Session) -> None:
        """Wait until the packets of a client's earlier connections are handled: a takeover would drop them."""
        if not self._unserved(client):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EARLIER_PACKETS_MOST_S):
                while self._unserved(client):
                    event = self._served.setdefault(client.hash, asyncio.Event())
                    await event.wait()

    def _unserved(self, client: Session) -> bool:
        clients = self._clients.get(client.hash, ())
        earlier = clients[: clients.index(client)] if client in clients else ()
        return any(one.unserved and one.user == client.user and one.ended_by_client for one in earlier)

    def check(self, client: Session, known: SessionRecord | None) -> None:
        """Check, before a connection claims its session, that it may still have the session.

        Args:
            known: the record that the claim replaces; None = no record.

        Raises:
            MqttError: the connection has ended, or a later one has the session.
        """
        if self.is_claimed_later(client):
            raise MqttError("another connection has claimed the session", ReasonCode.SESSION_TAKEN_OVER)
        if client.ending or (known is not None and self.is_elsewhere(client, known)):
            raise MqttError("the client has closed its connection", ReasonCode.UNSPECIFIED_ERROR)

    def is_claimed_later(self, client: Session) -> bool:
        """Whether a connection here whose claim was announced later has the session.

        [MQTT-3.1.4-2] (3.1.1), [MQTT-3.1.4-3] (5.0)
        """
        clients = self._clients.get(client.hash, ())
        return client in clients and any(one.epoch for one in clients[clients.index(client) + 1 :])

    def is_elsewhere(self, client: Session, known: SessionRecord) -> bool:
        """Whether a client has closed its connection, and a later one of the client may have written the record."""
        connection = client.connection
        if not connection.hung_up:
            return False
        if known.v5 is None or known.v5.owner != client.services.identity.id:
            return known.time_ns / 1e9 > natstime.now() - connection.silence - LAST_BYTES_RESOLUTION_S
        # An authenticator may have decided about a later connection sooner.
        clients = self._clients.get(client.hash, ())
        return any(one.epoch and one.connection.number > connection.number for one in clients)

    def take_over(self, client: Session) -> None:
        """End this gateway's connection that had the session [MQTT-3.1.4-2] (3.1.1), [MQTT-3.1.4-3] (5.0).

        Raises:
            MqttError: another connection has claimed the session after this one.
        """
        clients, name = client.services.registry.clients, registered_as(client.client_id, client.hash)
        former = clients.get(name)
        if client.foreign > client.epoch or (former not in (None, client) and former.epoch > client.epoch):
            raise MqttError("another connection has claimed the session", ReasonCode.SESSION_TAKEN_OVER)
        clients[name] = client
        if former is not None and former is not client:
            former.taken_over()

    def announce(self, client: Session, nonce: str) -> None:
        """Tell other gateways of a claim whose record is not stored, as the acknowledgement of a write would."""
        ack = {"stream": STREAM, "seq": client.epoch + 1} | ({"domain": self._domain} if self._domain else {})
        payload = orjson.dumps(ack)
        subject = claim_subject(client.hash, client.services.identity.id, nonce).encode()
        self._nats.link.out.append(b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload))
        self._nats.link.kick()

    def served(self, client_hash: str) -> None:
        """Wake waiting connections: the packets of an earlier connection are handled, or never will be."""
        event = self._served.pop(client_hash, None)
        if event is not None:
            event.set()

    def leave(self, client: Session) -> bool:
        """Remove a connection that has ended; return whether others are here that have its session or claim it."""
        if self._served:
            self.served(client.hash)
        clients = self._clients.get(client.hash, ())
        if client not in clients:
            return bool(clients)
        self._ignore(client.hash)
        left = tuple(one for one in clients if one is not client)
        if left:
            self._clients[client.hash] = left
        else:
            del self._clients[client.hash]
        return bool(left)

    def _heard(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        tokens = subject.split(b".")
        if len(tokens[4]) == SECOND_KEY_LENGTH:
            self.second_keys = True
            self._second_writes += 1
        if claiming_gateway(tokens) in self._own:
            self._nats.inbox.literal(subject, headers, payload)
            return
        clients = self._clients.get(tokens[4].decode("utf-8", "replace"))
        if clients is None or headers:  # an acknowledgement has none, what somebody has fetched has some
            return
        try:
            ack = orjson.loads(payload)
            if "error" in ack or ack["stream"] != STREAM or ack.get("domain", "") != self._domain:
                return
            sequence = int(ack["seq"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        for client in clients:
            client.hear_claim(sequence)
            if client.epoch and sequence > client.epoch:
                log.info("%s: the session was taken over", client)
                client.taken_over()  # [MQTT-3.1.4-2] (3.1.1), [MQTT-3.1.4-3] (5.0)


class RecordReads:
    """Reads of the records of connected sessions, `RECORDS_READ_AT_ONCE` at a time.

    While no leader of their stream answers, one question is repeated for all sessions that wait, however many they are
    and however long that lasts. See docs/internals/sessions.md#no-majority.
    """

    def __init__(self, nats: NatsLinks, sessions: SessionStore, tasks: Tasks) -> None:
        self._nats, self._sessions, self._tasks = nats, sessions, tasks
        self._places = asyncio.Semaphore(RECORDS_READ_AT_ONCE)
        self._answered = asyncio.Event()
        self._answered.set()
        self.obstacle = ""
        """Why records cannot be read at present; empty = they can, as far as is known."""

    @property
    def silent(self) -> bool:
        """Whether the last read was not answered: no other one need be made before the question is."""
        return not self._answered.is_set()

    async def load(self, key: str, client_id: str) -> tuple[SessionRecord, int] | None:
        """Return a record and its sequence, None without a record.

        Raises:
            PoisonedRecord, ApiError, NoResponders, RequestTimeout: as :meth:`SessionStore.load`.
        """
        async with self._places:
            return await self._sessions.load(key, client_id)

    def note_silence(self, error: Exception) -> None:
        """Note that a read was not answered, for the reason ``error``."""
        if not self.silent:
            self._answered.clear()
            self.obstacle = str(error)
            self._tasks.spawn(self._ask(), "reads of records")

    async def answered(self) -> None:
        """Wait until records can be read, or the connection to NATS is lost."""
        await self._answered.wait()

    async def _ask(self) -> None:
        link = self._nats.link
        wire = link.wire
        try:
            while link.online and link.wire is wire:
                await asyncio.sleep(RECORDS_READABLE_RETRY_S)
                try:
                    await self._sessions.load(NO_KEY)
                    break
                except (ApiError, NoResponders, RequestTimeout) as error:
                    self.obstacle = str(error)
        finally:
            self.obstacle = ""
            self._answered.set()


async def still_owner(client: Session) -> bool:
    """Whether the session is this connection's; if not, or if its record cannot be read, the connection is ended.

    While JetStream does not answer this waits, and the connection goes on: nobody can claim the session meanwhile. The
    result is False when the connection ends, and when that to NATS is lost: the record is read again after a reconnect.
    """
    services = client.services
    reads, link = services.records, services.nats.link
    wire = link.wire
    while True:
        if reads.silent:
            await client.idle(reads.answered())
        if not link.online or link.wire is not wire or not client.alive:
            return False
        try:
            found = await reads.load(client.hash, client.client_id)
            break
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("%s: its session cannot be read: %s", client, error)
            reads.note_silence(error)
        except PoisonedRecord as error:
            log.warning("%s: its session cannot be read: %s", client, error)
            client.end_connection(MqttError("the record of the session cannot be read", ReasonCode.UNSPECIFIED_ERROR))
            return False
    if found is None and client in services.unrecorded:
        return True
    if found is None or found[1] != client.epoch:
        if found is None:
            log.warning(
                "%s: its session is gone: it has ended elsewhere, or was lost", client, extra=once("session gone")
            )
        else:
            log.info("%s: another connection has claimed the session", client)
        client.taken_over()
        return False
    return True


def check_owners(services: Services) -> None:
    """Begin to end the connections whose session was claimed elsewhere: claims may have been missed."""
    limit = asyncio.Semaphore(RECORDS_READ_AT_ONCE)

    async def check(client: Session) -> None:
        async with TimedPermit(limit):
            await still_owner(client)

    for client in list(services.registry.clients.values()):
        if client.alive:
            client.do(check(client))
