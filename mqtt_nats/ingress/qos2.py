# SPDX-License-Identifier: Apache-2.0
"""QoS 2 publishes of one client: held until PUBREL, then released once.

The order on release is store, confirmation, deletion of the held record, PUBCOMP. A crash between any
two of these steps leaves the held record; its release carries the id ``q2-<held sequence>``, by which
the store recognises a repetition.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending import IgnoredStore, PendingStore
from mqtt_nats.backbone.retry import PAUSE, retry_until_answered
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.codec import MqttError, QuotaExceeded, ReasonCode
from mqtt_nats.ingress.interceptors import Taken, Taker
from mqtt_nats.ingress.publish import RETAIN_LINE, aged, bare, bound, message, restored, route_for
from mqtt_nats.ingress.receipts import Acknowledgement, DeleteHeld, PublishHeld, StoreHeld
from mqtt_nats.ingress.retained_ops import RetainedOp
from mqtt_nats.ingress.retained_store import is_retained, store_retained
from mqtt_nats.ingress.scheduled import release_of
from mqtt_nats.protocol.batch_removal import Clearance
from mqtt_nats.protocol.qos2_receiver import Action, InboundQos2
from mqtt_nats.pubsub.fanout import SEEN_FOR
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.hashing import registered_as
from mqtt_streams.headers import get
from mqtt_streams.qos2 import STREAM, Held, held_block, held_subject, held_up_to, release_id, release_stored
from mqtt_streams.stored import purge
from mqtt_streams.subjects import topic_to_subject, wire_topic

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.gateway.broker import Broker
    from mqtt_nats.ingress.publish import Extras
    from mqtt_nats.pubsub.routing_table import Route
    from mqtt_streams.sessions import SessionRecord

log = logging.getLogger("mqtt_nats.broker")

# Held messages kept in memory per client; what is beyond is read back when it is released.
KEEP_BYTES: Final = 1024 * 1024

TOGETHER: Final = 3
"""Records from which on it costs less to remove what is held up to a sequence than each of them."""

RECENT = SEEN_FOR / 2 - 5.0
"""Seconds for which gateways are sure to remember the id of what was released, however long the stream does."""

LATE: Final = 5.0
"""Seconds after which nothing more comes from a gateway that had the session before."""


class HeldPublish:
    """A QoS 2 publish between PUBLISH and PUBCOMP."""

    __slots__ = ("id", "key", "message_id", "more", "payload", "retain", "sequence", "since")

    def __init__(
        self,
        identifier: int,
        key: bytes,
        payload: bytes | None,
        retain: bool,
        message_id: bytes,
        more: Extras | None = None,
    ) -> None:
        self.id = identifier
        self.more = more
        """Its properties."""
        self.key = key
        self.payload = payload
        """None when it has to be read back from the stream."""
        self.retain = retain
        self.message_id = message_id
        self.sequence = 0
        """Of the record in the stream; 0 = there is none."""
        self.since = 0.0
        """Unix time of the store by another connection; 0 = held by this one."""


class Removals:
    """The removal of held records: what is released while one is under way waits for the next."""

    __slots__ = ("_done", "_requests", "clearance")

    def __init__(self) -> None:
        self._done: list[tuple[HeldPublish, Acknowledgement]] = []
        """Released, and the record is still there."""
        self._requests = 0
        """To be answered, or the one that is to be made at the end of the turn."""
        self.clearance = Clearance()

    def add(self, client: Client, held: HeldPublish, receipt: Acknowledgement) -> None:
        """A record may go."""
        self.clearance.done(held.id)
        self._done.append((held, receipt))
        if not self._requests:
            self._requests = 1
            asyncio.get_running_loop().call_soon(self.answered, client)

    def answered(self, client: Client) -> None:
        """A request is answered: when all are, make the next."""
        self._requests -= 1
        if self._requests or not self._done:
            return
        done, self._done = self._done, []
        broker = client.broker
        store = broker.store
        bound = 0
        if len(done) >= TOGETHER and client not in broker.unchecked:
            bound = self.clearance.bound(store.attempt)
        together = [one for one in done if one[0].sequence <= bound]
        if len(together) >= TOGETHER:
            self._requests = 1
            store.call(broker.purge_held, held_up_to(client.token, bound), DeleteHeld(client, self, together))
            done = [one for one in done if one[0].sequence > bound]
        for one in done:
            self._requests += 1
            body = b'{"seq":%d,"no_erase":true}' % one[0].sequence
            store.call(broker.delete_held, body, DeleteHeld(client, self, [one]))
        broker.link.kick()


class Inbound:
    """The receiver's side of a client's QoS 2 publishes."""

    __slots__ = ("_kept", "_publishes", "_reloading", "_removals", "machine", "newest")

    def __init__(self) -> None:
        # The client holds this and is not held by it: together they would wait for the collector.
        self._kept = 0
        self._publishes: dict[int, HeldPublish] = {}
        self._reloading = 0
        """Releases that wait for what has to be read back, and those behind them."""
        self._removals: Removals | None = None
        self.machine = InboundQos2()
        self.newest = 0
        """Highest sequence of what this connection has held."""

    @property
    def removals(self) -> Removals:
        """Made with the first publish: most connections have none at QoS 2."""
        removals = self._removals
        if removals is None:
            removals = self._removals = Removals()
        return removals

    async def take_over(self, client: Client, former: int, session: SessionRecord) -> None:
        """Take over what an earlier connection of the session has held, while it was its owner.

        What came too late, and later than the connection before this one has looked for, is removed; so is what an
        earlier session of the client has left.

        Args:
            former: sequence of the record that the connection before this one had replaced.
            session: the last record of that connection.
        """
        broker = client.broker
        records = []
        first = session.v5.first if session.v5 is not None else 0
        for record in await broker.held.held(client.token):
            if record.late(former, session.time_ns) or 0 < record.epoch < first:
                log.info("%s: removing a publish that came too late (sequence %d)", client, record.seq)
                await broker.held.delete(record.seq)
            else:
                records.append(record)
        self._restore(client, records)

    def _restore(self, client: Client, records: list[Held]) -> None:
        for record in records:
            topic = wire_topic((record.mapped or record.subject).encode())
            if topic is None:
                log.error("held publish %d of %r names no topic", record.seq, client.client_id)
                continue
            encoded = topic.encode()
            key = len(encoded).to_bytes(2, "big") + encoded
            held = HeldPublish(record.packet_id, key, None, record.retain, record.message_id.encode())
            held.sequence = record.seq
            held.since = record.time_ns / 1e9
            self._publishes[held.id] = held
            self.removals.clearance.restore(held.id, held.sequence)
            self.machine.stored(held.id)
        known = {record.seq for record in records}
        arguments = client.broker, registered_as(client.client_id, client.hash), known, client.epoch
        asyncio.get_running_loop().call_later(LATE, self._expect_late, *arguments)

    def _expect_late(self, broker: Broker, name: str, known: Set[int], epoch: int) -> None:
        client = broker.clients.get(name)
        if client is not None and client.inbound is self and client.alive:
            client.do(self.remove_late(client, known, epoch))

    async def remove_late(self, client: Client, known: Set[int], epoch: int) -> None:
        """Remove what the former gateway has held after the session had gone.

        It may read a publish, and store it, before it hears of the claim. The client has sent it again here, so the
        record would be taken for another message's by the next connection.

        Args:
            known: sequences of what was held when the session was taken over.
            epoch: of the claim; what this connection holds has it, or a later one.
        """
        broker = client.broker
        for record in await retry_until_answered(client, lambda: broker.held.held(client.token)):
            if record.epoch < epoch and record.seq not in known:
                log.info("%s: removing a publish that came too late (sequence %d)", client, record.seq)
                await retry_until_answered(client, partial(broker.held.delete, record.seq))

    def publish(
        self,
        client: Client,
        key: bytes,
        route: Route,
        identifier: int,
        payload: bytes,
        retain: bool,
        more: Extras | None = None,
    ) -> None:
        """A PUBLISH at QoS 2."""
        most = client.broker.settings.max_held
        if len(self.machine.states) >= most and identifier not in self.machine.states:
            raise QuotaExceeded(f"more than {most} publishes at QoS 2 wait for PUBREL")
        match self.machine.publish(identifier):
            case Action.HOLD:
                path = client.path
                path.received[2] += 1
                path.received_bytes[2] += len(payload)
                keep = self._kept + len(payload) <= KEEP_BYTES
                held = HeldPublish(identifier, key, payload, retain, path.ids.next(), more)
                self._publishes[identifier] = held
                operation = StoreHeld(client, held)
                client.receipts.append(operation)
                self.hold(client, operation, route, payload)
                self.removals.clearance.send(identifier, path.store.attempt)
                if keep:
                    self._kept += len(payload)
                else:
                    held.payload = None
            case Action.REPEAT:
                receipt = Acknowledgement(client, 5, identifier, 0)
                client.receipts.append(receipt)
                if client.receipts[0] is receipt:
                    client.settle()
            case _:
                pass

    def passed(self, identifier: int, key: bytes) -> HeldPublish:
        """A PUBLISH at QoS 2 that goes to its receiver at once: nothing is stored until its PUBREL."""
        held = self._publishes[identifier] = HeldPublish(identifier, key, b"", False, b"")
        return held

    def hold(self, client: Client, operation: StoreHeld, route: Route, payload: bytes) -> None:
        """Store the publish until its PUBREL."""
        held = operation.held
        lines = client.sender_header + (held.more.recorded if held.more is not None else b"")
        if route.origin != route.subject:
            lines = b"Nmqtt-Mapped:%b\r\n%b" % (route.origin.encode(), lines)
        headers = held_block(route.subject.encode(), 5 if held.retain else 4, client.epoch, held.message_id, lines)
        target = b"HPUB %b " % held_subject(client.token, held.id).encode()
        client.broker.store.put(target, headers, payload, operation)

    def held(self, client: Client, held: HeldPublish, sequence: int) -> None:
        """The publish is stored."""
        if not client.alive and not client.durable:  # the session ended before its publish was held
            client.broker.store.call(
                client.broker.delete_held, b'{"seq":%d,"no_erase":true}' % sequence, IgnoredStore()
            )
            client.broker.link.kick()
            return
        held.sequence = sequence
        self.removals.clearance.held(held.id, sequence)
        self.newest = max(self.newest, sequence)
        self.machine.stored(held.id)

    def stray(self, client: Client, operation: StoreHeld) -> None:
        """Something that is not this session's is held under the identifier: remove it and store again."""
        if not client.alive:
            if not client.durable:
                client.broker.spawn(self._forget(client, operation.held), f"a held publish of {client.client_id}")
            return
        self.removals.clearance.astray()

        async def replace() -> None:
            broker = client.broker
            held = operation.held
            found = await retry_until_answered(client, lambda: broker.held.find(client.token, held.id))
            if found is not None and found.message_id.encode() == held.message_id:
                # Our own store, sent twice over a reconnect: its first PubAck was lost.
                self.held(client, held, found.seq)
                Acknowledgement.stored(operation, b"")
                return
            if found is not None:
                log.info("removing a stray held publish of %r (sequence %d)", client.client_id, found.seq)
                stray = found.seq
                await retry_until_answered(client, lambda: broker.held.delete(stray))
            else:
                await retry_until_answered(
                    client, lambda: purge(broker.inbox, STREAM, held_subject(client.token, held.id))
                )
            if held.payload is None:
                client.end(MqttError("a held publish has to be sent again", ReasonCode.UNSPECIFIED_ERROR))
                return
            self.hold(client, operation, route_for(client, held.key), held.payload)
            broker.link.kick()

        client.do(replace())

    async def _forget(self, client: Client, held: HeldPublish) -> None:
        """The session has ended: remove what may have been stored by a store whose PubAck was lost."""
        broker = client.broker
        while True:
            try:
                found = await broker.held.find(client.token, held.id)
                if found is not None and found.message_id.encode() == held.message_id:
                    await broker.held.delete(found.seq)
                return
            except (ApiError, NoResponders, RequestTimeout):
                await asyncio.sleep(PAUSE)
                await broker.online.wait()

    # -- release --------------------------------------------------------------------------------

    def pubrel(self, client: Client, identifier: int) -> None:
        """A PUBREL."""
        match self.machine.pubrel(identifier):
            case Action.FINISHED:
                receipt = Acknowledgement(client, 7, identifier, 0)
                if client.version == 5:
                    receipt.reason = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND
                client.receipts.append(receipt)
                if client.receipts[0] is receipt:
                    client.settle()
            case Action.RELEASE:
                held = self._publishes[identifier]
                receipt = Acknowledgement(client, 7, identifier, 1)
                client.receipts.append(receipt)
                if held.payload is not None and not held.since and not self._reloading:
                    self._release(client, held, receipt)
                else:  # releases keep the order of the PUBREL packets
                    self._reloading += 1
                    client.do(self._release_later(client, held, receipt))
            case _:
                pass
        bound(client)

    def _release(self, client: Client, held: HeldPublish, receipt: Acknowledgement) -> None:
        broker = client.broker
        if not held.sequence:  # an answer to a NATS client, which has gone to it
            broker.replying.released(client, held.id)
            self.deleted(held)
            receipt.stored(b"")
            return
        payload = held.payload
        assert payload is not None
        route = route_for(client, held.key)
        release = release_id(held.sequence).encode()
        more = held.more
        taker = broker.takers.of_key(held.key) if broker.takers else None
        if taker is not None:
            self._give(client, taker, held, receipt)
            return
        if more is not None and more.expiry >= 0:
            more = aged(more, natstime.now())
            if more is None:  # [MQTT-3.3.2-5] [MQTT-4.3.3-13] (5.0)
                self.stored(client, held, receipt)
                return
        operation = PublishHeld(client, held, receipt, 2 if held.retain else 1)
        lines = client.sender_header + (more.lines if more is not None else b"")
        if held.retain:
            self._retain(client, held, operation, more)
            lines += RETAIN_LINE
        first = b"NATS/1.0\r\nNmqtt-Pub:2\r\nNats-Msg-Id:%b\r\nNmqtt-Id:%b\r\n%b" % (release, held.message_id, lines)
        bare(client, route, first + b"\r\n", payload, more)
        ttl = more.stay if more is not None else b""
        broker.store.put(route.msgs, b"%b%b\r\n" % (first, ttl), payload, operation)
        broker.fanout.released(route, message(client, route, payload, 2, held.retain, more), release)

    def _give(self, client: Client, taker: Taker, held: HeldPublish, receipt: Acknowledgement) -> None:
        """Release a publish to whoever takes it."""
        broker = client.broker
        topic = held.key[2:].decode()
        target = taker.target(topic).encode()
        route = broker.table.route(len(target).to_bytes(2) + target)
        operation = PublishHeld(client, held, receipt, 0)
        payload = held.payload or b""
        sender = client.sender_header
        taker.take(Taken(topic, route, payload, 2, held.retain, sender, held.more, held.message_id), operation)

    async def _release_later(self, client: Client, held: HeldPublish, receipt: Acknowledgement) -> None:
        """Release a publish behind others that had to be read back."""
        if held.payload is None or held.since:
            await self._reload(client, held, receipt)
        else:
            self._release(client, held, receipt)
        self._reloading -= 1
        client.proceed()
        client.broker.link.kick()
        client.broker.round.start()

    async def _reload(self, client: Client, held: HeldPublish, receipt: Acknowledgement) -> None:
        """Release what this connection does not have in memory, unless it has been released before."""
        broker = client.broker
        loaded = await retry_until_answered(client, lambda: broker.held.load(held.sequence))
        if loaded is None:
            self.deleted(held)
            receipt.stored(b"")
            return
        record, held.payload = loaded
        if not held.message_id:
            held.message_id = (get(record.headers, "Nmqtt-Id") or "").encode() or broker.ids.next()
        doubtful = held.since and natstime.now() - held.since > min(broker.store.trusted, RECENT)
        taker = broker.takers.of_key(held.key) if broker.takers else None
        if taker is not None:
            subject = topic_to_subject(taker.target(held.key[2:].decode()))
            release = release_of(held.message_id.decode())
            gone = partial(release_stored, broker.inbox, subject, release.decode(), record.time_ns)
        else:
            gone = partial(broker.held.was_released, record)
        if doubtful and await retry_until_answered(client, gone):
            if held.retain and taker is None:
                await self._retain_again(client, held, record, PublishHeld(client, held, receipt, 1))
            else:
                self.stored(client, held, receipt)
            return
        held.more = restored(record.headers, record.time_ns / 1e9)
        if held.more is not None:
            held.more = broker.replying.addressed(held.more, record.headers)
        self._release(client, held, receipt)

    async def _retain_again(self, client: Client, held: HeldPublish, record: Held, operation: PendingStore) -> None:
        """Retain what was released, unless that, or something newer, is retained.

        The gateway that has released it may have withheld that; see docs/internals/rules.md#withheld-messages.
        """
        broker = client.broker
        subject = route_for(client, held.key).subject
        payload = held.payload or b""
        done = await retry_until_answered(client, lambda: is_retained(broker, subject, payload, record.time_ns))
        more = restored(record.headers, record.time_ns / 1e9)
        expired = False
        if more is not None and more.expiry >= 0:
            more = aged(more, natstime.now())
            expired = more is None
        if done or expired:
            operation.stored(b"")
        else:
            self._retain(client, held, operation, more)

    def _retain(self, client: Client, held: HeldPublish, operation: PendingStore, more: Extras | None) -> None:
        payload = held.payload
        assert payload is not None
        route = route_for(client, held.key)
        retained = RetainedOp(client.broker, operation, not payload, client)
        store_retained(client, route, payload, 2, retained, release_id(held.sequence).encode(), more)

    def stored(self, client: Client, held: HeldPublish, receipt: Acknowledgement) -> None:
        """The release is stored: remove the held record."""
        self.removals.add(client, held, receipt)

    def deleted(self, held: HeldPublish) -> None:
        """The held record is gone: the identifier is free."""
        if self._publishes.get(held.id) is held:
            del self._publishes[held.id]
            self.removals.clearance.gone(held.id)
            self.machine.released(held.id)
            if held.payload is not None and not held.since:
                self._kept -= len(held.payload)
