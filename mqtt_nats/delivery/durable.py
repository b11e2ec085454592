# SPDX-License-Identifier: Apache-2.0
"""Durable delivery to one client: the ports of its sender, and the subscriptions of its session.

See docs/internals/delivery.md.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import IgnoredStore
from mqtt_nats.base.logs import log_failure
from mqtt_nats.delivery.deferred_removals import DeferredRemovals
from mqtt_nats.delivery.draining import finish, may_have, release_waiting_for, unmatch
from mqtt_nats.delivery.position_recovery import CLIENT_INFLIGHT_MOST
from mqtt_nats.delivery.position_writer import PositionWriter, begin_position
from mqtt_nats.delivery.pubrels import ConfirmOp, seek, store_first, store_record
from mqtt_nats.delivery.slow_clients import SlowClient
from mqtt_nats.delivery.states import DeliveryEvent, StatefulDelivery
from mqtt_nats.messages.message import Stored
from mqtt_nats.messages.publish_encoder import encode_publish
from mqtt_nats.protocol.ack_tokens import KEPT, MARKS, RECORD, TAKEN
from mqtt_nats.protocol.durable_sender import DurableSender
from mqtt_nats.protocol.inflight import Delivery, SubscriptionState
from mqtt_nats.protocol.release_order import ReleaseOrder
from mqtt_nats.sessions.consumer_binding import Came, ConsumerBinding
from mqtt_nats.sessions.record import claimed
from mqtt_streams.consumers import ConsumerRef, backstop, delete_for_good
from mqtt_streams.headers import get_int
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import CONSUMER_PREFIX
from mqtt_streams.stored import is_answer

if TYPE_CHECKING:
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.sessions.session import Session

log = logging.getLogger("mqtt_nats.broker")

MARKED: Final = (*MARKS, *KEPT)
"""First bytes of tokens that stand in place of an acknowledgement subject."""


class DurableDelivery(StatefulDelivery):
    """The sender of one durable session: the ports of its state machine, and its consumers.

    Args:
        former: sequence of the session record that the previous connection had replaced.
    """

    def __init__(self, client: Receiver, former: int = 0) -> None:
        self.client = client
        window = min(CLIENT_INFLIGHT_MOST, client.terms.receive_maximum)
        super().__init__(DurableSender(window, self, client.version, self._on_drained_message), former)
        self.stall: SlowClient | None = None
        """Messages that wait for a client that does not read; None = the client reads. See :attr:`stalled`."""
        self.lingering: DeferredRemovals | None = None
        """Records of complete QoS 2 messages that are to be removed; None = none yet."""
        self.position_writer: PositionWriter | None = None
        """Writer of the session's position; None = the session has no position."""
        self._seeking: asyncio.Task[None] | None = None
        """Task that looks for records of owed PUBRELs that are not delivered."""
        self._order = ReleaseOrder()
        self._sent, self._sent_bytes = client.path.fanout.sent, client.path.fanout.sent_bytes

    @property
    def session(self) -> Session:
        """The session of the consumers."""
        return self.client

    # -- ports of the state machine -------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send bytes to the client."""
        self.client.write_buffer.write(data)

    def publish(self, delivery: Delivery, dup: bool) -> bool:
        """Send the PUBLISH packet of a delivery; False when the client must not get the message (any more)."""
        message: Stored = delivery.body
        client = self.client
        qos = delivery.qos
        if message.withheld_from(client.client_id):
            return False
        if client.guarded is not None and not may_have(self, delivery, message, dup):
            return False
        own = message.timed or message.identifier != delivery.id
        if dup or own or client.checks_each or client.options or client.bridge:
            ids, kept = self.subscriber_properties(message, delivery)
            data = encode_publish(client, message, qos, delivery.id, ids=ids, retain=message.retain or kept, dup=dup)
            if not data:
                return False
            client.services.counters.send(qos, len(message.payload))
            client.write_buffer.write(data)
        else:
            self.send_shared(message, qos)
        return True

    def send_shared(self, message: Stored, qos: int) -> None:
        """Send a stored message as the PUBLISH packet that is the same for all subscribers of a protocol version."""
        client = self.client
        self._sent[qos] += 1
        self._sent_bytes[qos] += len(message.payload)
        if client.version == 5:
            data = message.packets5[qos] or message.packet5(qos)
        else:
            data = message.packets[qos] or message.packet(qos)
        write_buffer = client.write_buffer
        write_buffer.chunks.append(data)  # as `write` does, without a call
        if write_buffer.clogged:
            write_buffer.hold(len(data))
        elif not write_buffer.dirty:
            write_buffer.schedule()

    def ack(self, reply: bytes, identifier: int = 0) -> None:
        """Acknowledge a message to JetStream, or remove the record for which the token ``reply`` stands.

        Args:
            identifier: packet identifier; `DurableSender.confirmed` is called with it when JetStream has confirmed the
                acknowledgement or the removal. 0 = no call.
        """
        if not reply.startswith(MARKED):
            path = self.client.path
            if identifier:
                path.store.call(reply, b"", ConfirmOp(self.client, identifier))
            else:
                path.out.append(b"PUB %b 0\r\n\r\n" % reply)
            path.link.kick()
        elif reply.startswith(MARKS):
            if self.lingering is None:
                self.lingering = DeferredRemovals(self.client.services)
            self.lingering.add(reply, ConfirmOp(self.client, identifier) if identifier else IgnoredStore())
        elif self.position_writer is not None and not self.position_writer.ledger.complete(reply, identifier):
            self.machine.confirmed(identifier)

    def store_pubrel(self, identifier: int, sequence: int) -> None:
        """Store an owed PUBREL."""
        self._order.received(identifier)
        if self.position_writer is not None and self.machine.inflight[identifier].reply.startswith(TAKEN):
            self.position_writer.ledger.receive(identifier, sequence)
            self.position_writer.hurry()
            return
        if self.has_pubrels:
            store_record(self.client, identifier, sequence)
        else:
            self.client.do(store_first(self.client, self, identifier, sequence))

    def allocate(self, sequence: int, identifier: int) -> None:
        """Store that a message has another packet identifier than its own, in the session's position."""
        if self.position_writer is None:
            self.client.do(begin_position(self.client, self))
        else:
            self.position_writer.ledger.allocate(sequence, identifier)
            self.position_writer.hurry()

    def end_allocation(self, sequence: int, identifier: int) -> None:
        """Remove a message's allocated packet identifier from the position."""
        if self.position_writer is None:  # it is not stored yet
            self.machine.allocation_removed(identifier)
        else:
            self.position_writer.ledger.end_allocation(sequence, identifier)

    def report_no_identifier(self) -> None:
        """Count and log that a message waits for its packet identifier."""
        text = "%s: messages wait, since their packet identifiers are in use: the client keeps too many messages"
        log_failure(log, logging.WARNING, "identifiers", text, self.client)

    def pubrel_stored(self, identifier: int, mark: bytes = b"") -> None:
        """Send PUBREL once it is stored for every identifier whose PUBREC came before [MQTT-4.6.0-4].

        Args:
            mark: token of the position that has PUBREL as owed; empty: a PUBREL record has.
        """
        for one, kept in self._order.stored(identifier, mark):
            self.machine.pubrel_stored(one)
            if kept:
                self.machine.keep_identifier(one, kept)

    def report_waiting(self) -> None:
        """Note that messages of this session wait, so that the periodic check looks at it."""
        self.client.delivery.waiting.add(self)

    def report_sent(self, source: SubscriptionState) -> None:
        """Let new messages go that had to wait for a message of `source` that is now sent."""
        if source.whole or source is self.past:  # else it costs a look at each subscription for each message
            release_waiting_for(self, source)

    def seek(self) -> None:
        """Start to look for records of owed PUBRELs that JetStream does not deliver."""
        client = self.client
        if self._seeking is None or self._seeking.done():
            owed = partial(client.services.streams.pubrels.owed, client.hash)
            work = seek(self.machine, owed, lambda: client.alive)
            self._seeking = client.services.tasks.spawn(work, f"records of {client.client_id}")

    # -- messages -------------------------------------------------------------------------------

    def pubrel_arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Handle a delivery of the consumer of PUBREL records."""
        self.pubrels_come += 1
        identifier = get_int(headers, "Nmqtt-PubRel")
        if identifier is None or is_answer(headers, payload):
            self.ack(reply)
            return
        self.machine.pubrel_delivered(identifier, get_int(headers, "Nmqtt-Seq") or 0, RECORD + reply)

    def _on_drained_message(self, delivery: Delivery) -> None:
        for binding in self.bindings.values():
            if binding.source is delivery.source:
                finish(self, binding)
                return
        if self.client.ended_shares is not None:
            self.client.ended_shares.acknowledged(delivery.source)

    # -- subscriptions --------------------------------------------------------------------------

    def window(self, present: int = 0) -> int:
        """Return how many messages a subscription may have in flight: at most receive maximum.

        Args:
            present: the present limit of its consumer; 0 = it is a new consumer.
        """
        client = self.client
        return min(client.terms.receive_maximum, max(present, client.connection.settings.max_inflight))

    def adapt_consumers(self) -> None:
        """Adapt the consumers in the record to the present expiry and window of the session."""
        record, v5 = claimed(self.client.record)
        threshold = backstop(v5.expiry)
        for key, consumer in record.cons.items():
            window = self.window(consumer.max_ack_pending)
            record.cons[key] = replace(consumer, inactive_threshold=threshold, max_ack_pending=window)

    def may_exist(self, name: str) -> bool:
        """Return whether the consumer of a subscription may exist."""
        _, v5 = claimed(self.client.record)
        return not v5.consumerless or (self.position_writer is not None and name in self.position_writer.present)

    def add(
        self,
        key: str,
        consumer: ConsumerRef,
        source: SubscriptionState,
        *,
        removed: bool,
        came: Came | None = None,
    ) -> ConsumerBinding:
        """Add a subscription, which readers serve after its start and the session's position.

        Args:
            removed: its consumer does not exist.
            came: see `Came`.
        """
        binding = ConsumerBinding(key, consumer, source, came)
        self.bindings[consumer.durable_name] = binding
        self.machine.sources.append(source)
        self.overlap.add(consumer.filter_subject.removeprefix(STORED_PREFIX), binding, source)
        binding.begin_after(max(self.resumed_from, source.start - 1), removed=removed)
        if not removed:
            self.client.services.registry.attached[consumer.durable_name] = self.client
        return binding

    def detach(self) -> None:
        """Unsubscribe the deliver subject of PUBREL records: the next owner can attach their consumer at once."""
        link, attached = self.client.path.link, self.client.services.registry.attached
        if self.lingering is not None:
            self.lingering.connection_ended()
        link.unsubscribe_raw(self.pubrel_sid)
        for name in (*self.bindings, CONSUMER_PREFIX + self.client.hash):
            if attached.get(name) is self.client:
                del attached[name]
        link.kick()

    def close(self) -> bool:
        """Cut the sender off from the client; False while records of answered PUBRELs have yet to be acknowledged."""
        machine = self.machine
        if any(release.comp for release in machine.releases.values()):
            return False
        machine.disconnect()
        return True

    # -- ended subscriptions --------------------------------------------------------------------

    async def remove(self, names: list[str]) -> None:
        """Delete consumers of ended subscriptions that are complete, and take them out of the record (not written)."""
        services = self.client.services
        for name in names:
            binding = self.bindings.pop(name, None)
            if binding is not None:
                services.registry.attached.pop(name, None)
                self.machine.forget(binding.source)
                unmatch(self, binding)
                services.stream.count_consumers(-(not binding.removed))
        # Before the next message comes: the shared reader now gives the remaining subscription all of the messages.
        self.client.delivery.feed.refresh(self.client)
        await asyncio.gather(*(delete_for_good(services.nats.inbox, MESSAGES, name) for name in names))
        _, v5 = claimed(self.client.record)
        v5.forget_draining(names)
        if self.position_writer is not None:
            self.position_writer.forget_consumers(names)
        self.machine.pump()

    # -- the shared reader ----------------------------------------------------------------------

    def settle(self) -> None:
        """Set `last` of the subscriptions to the stream sequence that the shared reader has reached."""
        if self.live:
            reached = self.client.delivery.feed.reached(self)
            self.machine.read_to(reached)
            for binding in self.bindings.values():
                binding.source.deliver_to(reached)

    def store_position_with(self, position_writer: PositionWriter) -> None:
        """Have the session's position written by ``position_writer``."""
        self.position_writer = position_writer

    def begin_stall(self, stall: SlowClient) -> None:
        """Send no more messages: the client does not read."""
        self.change(DeliveryEvent.STOPS_READING)
        self.stall = stall
        self.report_waiting()

    def end_stall(self) -> None:
        """Send messages again: the client reads."""
        self.change(DeliveryEvent.READS_AGAIN)
        self.stall = None
