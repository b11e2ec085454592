# SPDX-License-Identifier: Apache-2.0
"""QoS 2 publishes of one client: held until PUBREL, then released once.

The order of a release is: store of the message, PubAck, deletion of the held record, PUBCOMP. After a crash between two
of these steps the held record still exists. Its release has the id ``q2-<held sequence>``, by which the stream
recognises a repetition.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import CountedStore, IgnoredStore, PendingStore, sequence
from mqtt_nats.backbone.retry import RETRY_PAUSE_S, retry_until_answered
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.codec import MqttError, QuotaExceeded, ReasonCode
from mqtt_nats.codec.wire import PUBCOMP, PUBREC
from mqtt_nats.ingress.interceptors import Taken, Taker
from mqtt_nats.ingress.publish import RETAIN_LINE, Acknowledgement, bare, bound, message, route_for
from mqtt_nats.ingress.publish_properties import aged, restored
from mqtt_nats.ingress.retained.ops import RetainedOp
from mqtt_nats.ingress.retained.store import is_retained, store_retained, tombstone_subject
from mqtt_nats.ingress.scheduled import release_of
from mqtt_nats.protocol.qos2_receiver import Action, InboundQos2
from mqtt_nats.pubsub.fanout import SEEN_FOR
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.error_codes import MAXIMUM_PER_SUBJECT_TEXT, MESSAGE_GONE
from mqtt_streams.headers import get
from mqtt_streams.qos2 import STREAM, Held, held_block, held_subject, held_up_to, release_id, release_stored
from mqtt_streams.stored import purge
from mqtt_streams.subjects import topic_to_subject, wire_topic

if TYPE_CHECKING:
    from mqtt_nats.ingress.publish import Publisher
    from mqtt_nats.ingress.publish_properties import Extras
    from mqtt_nats.pubsub.routing_table import Route

log = logging.getLogger("mqtt_nats.broker")

# Bytes of held payloads that are kept in memory per client; other payloads are read back at their release.
KEEP_BYTES: Final = 1024 * 1024

REMOVED_TOGETHER_LEAST: Final = 3
"""Number of records from which on one removal up to a sequence costs less than a removal of each record."""

RELEASED_REMEMBERED_S = SEEN_FOR / 2 - 5.0
"""Seconds for which every gateway certainly remembers the id of a released publish, whatever the stream does."""


class HeldPublish:
    """A QoS 2 publish between PUBLISH and PUBCOMP."""

    __slots__ = ("id", "key", "message_id", "more", "payload", "retain", "sequence", "since")

    def __init__(
        self, identifier: int, key: bytes, payload: bytes | None, retain: bool, message_id: bytes, more: Extras | None
    ) -> None:
        self.id = identifier
        self.more = more
        """Properties of the message."""
        self.key = key
        self.payload = payload
        """None = the payload has to be read back from the stream."""
        self.retain = retain
        self.message_id = message_id
        self.sequence = 0
        """Stream sequence of the held record; 0 = there is no record."""
        self.since = 0.0
        """Unix time at which an earlier connection stored the record; 0 = this connection holds the publish."""

    def record(self, sequence: int, since: float = 0.0) -> None:
        """Note the sequence of the held record, and the Unix time at which an earlier connection stored it."""
        self.sequence, self.since = sequence, since

    def load(self, payload: bytes, message_id: bytes) -> None:
        """Take the payload and the message id that were read back from the record."""
        self.payload, self.message_id = payload, message_id

    def describe(self, more: Extras | None) -> None:
        """Take the properties that were read back from the record."""
        self.more = more


class UnheldPubrec(Acknowledgement):
    """The PUBREC of a QoS 2 publish that is not held."""

    __slots__ = ("_held",)

    def __init__(self, client: Publisher, held: HeldPublish) -> None:
        super().__init__(client, 5, held.id, 0)
        self._held = held

    def refuse(self, reason: int, text: str) -> None:
        """Free the packet identifier: PUBREC has a reason code, and no PUBREL follows (5.0)."""
        self.client.inbound.deleted(self._held)
        super().refuse(reason, text)

    def stored(self, ack: bytes) -> None:
        """Count a finished store; after the last one PUBREC is due and the client may send PUBREL."""
        if self.remaining == 1 and not self.reason:
            self.client.inbound.machine.stored(self.id)
        super().stored(ack)


class StoreHeld(Acknowledgement):
    """The store of a held publish; the acknowledgement is its PUBREC."""

    __slots__ = ("held",)

    def __init__(self, client: Publisher, held: HeldPublish) -> None:
        super().__init__(client, 5, held.id, 1)
        self.held = held

    def stored(self, ack: bytes) -> None:
        """Note the sequence of the held publish; PUBREC is due."""
        self.client.inbound.held(self.client, self.held, sequence(ack))
        super().stored(ack)

    def failed(self, error: ApiError) -> None:
        """Replace an unknown record under this packet identifier, or report JetStream's refusal."""
        if error.description == MAXIMUM_PER_SUBJECT_TEXT:  # the code stands for every other limit, too
            self.client.inbound.stray(self.client, self)
        else:
            self.client.inbound.deleted(self.held)
            super().failed(error)


class PublishHeld(CountedStore):
    """The stores of a released QoS 2 publish; then the held record is deleted."""

    __slots__ = ("client", "held", "receipt")

    def __init__(self, client: Publisher, held: HeldPublish, receipt: Acknowledgement, left: int) -> None:
        super().__init__(left)
        self.client = client
        self.held = held
        self.receipt = receipt

    def stored(self, ack: bytes) -> None:
        """Count a finished store; after the last one the held record is removed."""
        self.remaining -= 1
        if not self.remaining:
            self.client.inbound.stored(self.client, self.held, self.receipt)

    def waits(self) -> bool:
        """Return True: PUBCOMP has no reason code for it."""
        return True

    def failed(self, error: ApiError) -> None:
        """End the connection: the record stays, and the client sends PUBREL again after it has reconnected."""
        self.client.refused(error)


class DeleteHeld(PendingStore):
    """The removal of held records, then their PUBCOMP packets."""

    __slots__ = ("client", "done")

    def __init__(self, client: Publisher, done: list[tuple[HeldPublish, Acknowledgement]]) -> None:
        self.client = client
        self.done = done

    def stored(self, ack: bytes) -> None:
        """Free the packet identifiers and send PUBCOMP: the records are removed."""
        inbound = self.client.inbound
        for held, receipt in self.done:
            inbound.deleted(held)
            receipt.stored(ack)
        inbound.remove(self.client)
        self.client.proceed()

    def failed(self, error: ApiError) -> None:
        """Treat records that do not exist as removed; any other error ends the connection."""
        if error.code == 404 or error.err_code in MESSAGE_GONE:
            self.stored(b"")
        else:
            self.client.refused(error)
            self.client.inbound.remove(self.client)


class Inbound:
    """The receiver's state of a client's QoS 2 publishes."""

    __slots__ = ("_kept", "_publishes", "_released", "_reloading", "_removals", "machine", "newest")

    def __init__(self) -> None:
        # No reference to the client, which refers to this: a cycle would wait for the garbage collector.
        self._kept = 0
        self._publishes: dict[int, HeldPublish] = {}
        self._reloading = 0
        """Number of releases that wait for a read from the stream, with the releases behind them."""
        self._released: list[tuple[HeldPublish, Acknowledgement]] = []
        """Released publishes whose records are not removed yet, each with its PUBCOMP."""
        self._removals = 0
        """Number of unanswered removals; a removal that is scheduled for the end of the turn counts as one."""
        self.machine = InboundQos2()
        self.newest = 0
        """Highest stream sequence that this connection has held; 0 = none."""

    def restore(self, client_id: str, records: list[Held]) -> None:
        """Hold the publishes of these records, which earlier connections of the session have stored."""
        for record in records:
            topic = wire_topic((record.mapped or record.subject).encode())
            if topic is None:
                log.error("held publish %d of %r names no topic", record.seq, client_id)
                continue
            encoded = topic.encode()
            key = len(encoded).to_bytes(2, "big") + encoded
            held = HeldPublish(record.packet_id, key, None, record.retain, record.message_id.encode(), None)
            held.record(record.seq, record.time_ns / 1e9)
            self._publishes[held.id] = held
            self.machine.restore(held.id, held.sequence)

    def publish(
        self, client: Publisher, route: Route, identifier: int, payload: bytes, retain: bool, more: Extras | None
    ) -> None:
        """Hold a PUBLISH at QoS 2, or answer its repetition."""
        most = client.services.settings.max_held
        if len(self.machine.states) >= most and identifier not in self.machine.states:
            raise QuotaExceeded(f"more than {most} publishes at QoS 2 wait for PUBREL")
        match self.machine.publish(identifier):
            case Action.HOLD:
                path = client.path
                path.received[2] += 1
                path.received_bytes[2] += len(payload)
                keep = self._kept + len(payload) <= KEEP_BYTES
                held = HeldPublish(identifier, route.asked, payload if keep else None, retain, path.ids.next(), more)
                self._publishes[identifier] = held
                operation = StoreHeld(client, held)
                client.receipts.append(operation)
                self.hold(client, operation, route, payload)
                self.machine.sent(identifier, path.store.attempt)
                if keep:
                    self._kept += len(payload)
            case Action.ANSWER_DUPLICATE:
                client.acknowledge(Acknowledgement(client, PUBREC, identifier, 0))
            case _:
                pass

    def pass_on(self, client: Publisher, identifier: int, key: bytes) -> UnheldPubrec | None:
        """Begin a PUBLISH at QoS 2 without a held record; return its PUBREC, or None for a repetition."""
        action = self.machine.publish(identifier)
        if action is Action.HOLD:
            held = self._publishes[identifier] = HeldPublish(identifier, key, b"", False, b"", None)
            return UnheldPubrec(client, held)
        if action is Action.ANSWER_DUPLICATE:
            client.acknowledge(Acknowledgement(client, PUBREC, identifier, 0))
        return None

    def hold(self, client: Publisher, operation: StoreHeld, route: Route, payload: bytes) -> None:
        """Store the held record of a publish, which exists until PUBREL."""
        held = operation.held
        lines = client.sender_header + (held.more.recorded if held.more is not None else b"")
        if route.origin != route.subject:
            lines = b"Nmqtt-Mapped:%b\r\n%b" % (route.origin.encode(), lines)
        headers = held_block(route.subject.encode(), 5 if held.retain else 4, client.epoch, held.message_id, lines)
        target = b"HPUB %b " % held_subject(client.token, held.id).encode()
        client.path.store.put(target, headers, payload, operation)

    def held(self, client: Publisher, held: HeldPublish, sequence: int) -> None:
        """Note that the record of a publish is stored under ``sequence``."""
        if not client.alive and not client.durable:  # the session ended before its publish was held
            client.path.store.call(
                client.services.streams.delete_held, b'{"seq":%d,"no_erase":true}' % sequence, IgnoredStore()
            )
            client.path.link.kick()
            return
        held.record(sequence)
        self.newest = max(self.newest, sequence)
        self.machine.stored(held.id, sequence)

    def stray(self, client: Publisher, operation: StoreHeld) -> None:
        """Replace a record of another session under the packet identifier: remove it and store the publish again."""
        if not client.alive:
            if not client.durable:
                client.services.tasks.spawn(
                    self._forget(client, operation.held), f"a held publish of {client.client_id}"
                )
            return
        self.machine.astray()

        async def replace() -> None:
            services = client.services
            held = operation.held
            found = await retry_until_answered(client, lambda: services.streams.held.find(client.token, held.id))
            if found is not None and found.message_id.encode() == held.message_id:
                # This connection's own record, sent twice over a reconnect: the first PubAck was lost.
                self.held(client, held, found.seq)
                Acknowledgement.stored(operation, b"")
                return
            if found is not None:
                log.info("a held publish of %r without a session is removed (sequence %d)", client.client_id, found.seq)
                stray = found.seq
                await retry_until_answered(client, lambda: services.streams.held.delete(stray))
            else:
                await retry_until_answered(
                    client, lambda: purge(services.nats.inbox, STREAM, held_subject(client.token, held.id))
                )
            if held.payload is None:
                client.end_connection(MqttError("a held publish has to be sent again", ReasonCode.UNSPECIFIED_ERROR))
                return
            self.hold(client, operation, route_for(client, held.key), held.payload)
            client.path.link.kick()

        client.do(replace())

    async def _forget(self, client: Publisher, held: HeldPublish) -> None:
        """Remove the record of an ended session that may have been stored although its PubAck was lost."""
        services = client.services
        while True:
            try:
                found = await services.streams.held.find(client.token, held.id)
                if found is not None and found.message_id.encode() == held.message_id:
                    await services.streams.held.delete(found.seq)
                return
            except (ApiError, NoResponders, RequestTimeout):
                await asyncio.sleep(RETRY_PAUSE_S)
                await services.nats.online.wait()

    # -- release --------------------------------------------------------------------------------

    def pubrel(self, client: Publisher, identifier: int) -> None:
        """Handle PUBREL: release the publish, or answer at once where there is none."""
        match self.machine.pubrel(identifier):
            case Action.FINISHED:
                reason = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND if client.version == 5 else 0
                client.acknowledge(Acknowledgement(client, PUBCOMP, identifier, 0, reason))
            case Action.RELEASE:
                held = self._publishes[identifier]
                receipt = Acknowledgement(client, PUBCOMP, identifier, 1)
                client.receipts.append(receipt)
                if held.payload is not None and not held.since and not self._reloading:
                    self._release(client, held, receipt)
                else:  # releases keep the order of the PUBREL packets
                    self._reloading += 1
                    client.do(self._release_later(client, held, receipt))
            case _:
                pass
        bound(client)

    def _release(self, client: Publisher, held: HeldPublish, receipt: Acknowledgement) -> None:
        """Publish a held message under the id of its record: store it, and serve the subscribers of this gateway."""
        path, takers = client.path, client.ingress.takers
        if not held.sequence:  # no record: an answer that has gone to its NATS client, or a publish handled by hooks
            client.ingress.replying.released(client, held.id)
            self.deleted(held)
            receipt.stored(b"")
            return
        payload = held.payload
        assert payload is not None
        route = route_for(client, held.key)
        release = release_id(held.sequence).encode()
        more = held.more
        taker = takers.of_key(held.key) if takers else None
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
        bare(client, route, b"%b%b\r\n" % (first, route.stated), payload, more)
        ttl = more.stay if more is not None else b""
        path.store.put(route.msgs, b"%b%b\r\n" % (first, ttl), payload, operation)
        path.fanout.released(route, message(client, route, payload, 2, held.retain, more), release)

    def _give(self, client: Publisher, taker: Taker, held: HeldPublish, receipt: Acknowledgement) -> None:
        """Release a publish to the taker of its topic."""
        topic = held.key[2:].decode()
        target = taker.target(topic).encode()
        route = client.path.table.route(len(target).to_bytes(2) + target)
        operation = PublishHeld(client, held, receipt, 0)
        payload = held.payload or b""
        sender = client.sender_header
        taker.take(Taken(topic, route, payload, 2, held.retain, sender, held.more, held.message_id), operation)

    async def _release_later(self, client: Publisher, held: HeldPublish, receipt: Acknowledgement) -> None:
        """Release a publish in a job, behind publishes that have to be read back."""
        if held.payload is None or held.since:
            await self._reload(client, held, receipt)
        else:
            self._release(client, held, receipt)
        self._reloading -= 1
        client.proceed()
        client.path.link.kick()
        client.path.round.start()

    async def _reload(self, client: Publisher, held: HeldPublish, receipt: Acknowledgement) -> None:
        """Release a publish that this connection does not have in memory, unless it has been released before."""
        services = client.services
        loaded = await retry_until_answered(client, lambda: services.streams.held.load(held.sequence))
        if loaded is None:
            self.deleted(held)
            receipt.stored(b"")
            return
        record, payload = loaded
        identity = held.message_id or (get(record.headers, "Nmqtt-Id") or "").encode() or client.path.ids.next()
        held.load(payload, identity)
        if not held.since:
            self._kept += len(payload)  # `deleted` subtracts it
        doubtful = held.since and natstime.now() - held.since > min(client.path.store.trusted, RELEASED_REMEMBERED_S)
        taker = client.ingress.takers.of_key(held.key) if client.ingress.takers else None
        if taker is not None:
            subject = topic_to_subject(taker.target(held.key[2:].decode()))
            release = release_of(held.message_id.decode())
            gone = partial(release_stored, services.nats.inbox, subject, release.decode(), record.time_ns)
        else:
            gone = partial(services.streams.held.was_released, record)
        if doubtful and await retry_until_answered(client, gone):
            if held.retain and taker is None:
                await self._retain_again(client, held, record, PublishHeld(client, held, receipt, 1))
            else:
                self.stored(client, held, receipt)
            return
        more = restored(record.headers, record.time_ns / 1e9)
        if more is not None:
            more = client.ingress.replying.addressed(more, record.headers)
        held.describe(more)
        self._release(client, held, receipt)

    async def _retain_again(self, client: Publisher, held: HeldPublish, record: Held, operation: PendingStore) -> None:
        """Retain a publish that was released before, unless it, or a newer message, is retained.

        The gateway that released the publish may have withheld the retained copy; see
        docs/internals/ingress.md#withheld-messages.
        """
        services = client.services
        subject = route_for(client, held.key).subject
        payload = held.payload or b""
        done = await retry_until_answered(
            client, lambda: is_retained(services.streams, subject, payload, record.time_ns)
        )
        more = restored(record.headers, record.time_ns / 1e9)
        expired = False
        if more is not None and more.expiry >= 0:
            more = aged(more, natstime.now())
            expired = more is None
        if done or expired:
            operation.stored(b"")
        else:
            self._retain(client, held, operation, more)

    def _retain(self, client: Publisher, held: HeldPublish, operation: PendingStore, more: Extras | None) -> None:
        payload = held.payload
        assert payload is not None
        route = route_for(client, held.key)
        retained = RetainedOp(client.ingress.retained, operation, tombstone_subject(route, payload), client)
        known_by = b"Nats-Msg-Id:%b\r\n" % release_id(held.sequence).encode()
        store_retained(client, route, payload, 2, retained, known_by, more)

    def stored(self, client: Publisher, held: HeldPublish, receipt: Acknowledgement) -> None:
        """Have the held record removed: the release is stored. Removals of one turn go together."""
        self.machine.removable(held.id)
        self._released.append((held, receipt))
        if not self._removals:
            self._removals = 1
            asyncio.get_running_loop().call_soon(self.remove, client)

    def remove(self, client: Publisher) -> None:
        """Note that a removal is answered; after the last answer the next removals are sent."""
        self._removals -= 1
        if self._removals or not self._released:
            return
        done, self._released = self._released, []
        services, store = client.services, client.path.store
        bound = 0
        if len(done) >= REMOVED_TOGETHER_LEAST and client not in services.registry.unchecked:
            bound = self.machine.bound(store.attempt)
        together = [one for one in done if one[0].sequence <= bound]
        if len(together) >= REMOVED_TOGETHER_LEAST:
            self._removals = 1
            store.call(services.streams.purge_held, held_up_to(client.token, bound), DeleteHeld(client, together))
            done = [one for one in done if one[0].sequence > bound]
        for one in done:
            self._removals += 1
            body = b'{"seq":%d,"no_erase":true}' % one[0].sequence
            store.call(services.streams.delete_held, body, DeleteHeld(client, [one]))
        client.path.link.kick()

    def deleted(self, held: HeldPublish) -> None:
        """Free the packet identifier: the held record is removed."""
        if self._publishes.get(held.id) is held:
            del self._publishes[held.id]
            self.machine.released(held.id)
            if held.payload is not None and not held.since:
                self._kept -= len(held.payload)
