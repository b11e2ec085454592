# SPDX-License-Identifier: Apache-2.0
"""A durable session's consumers, attached to the connection of its client.

Attaching a consumer means to give it a deliver subject that was never used before: nats-server then sends the pending
messages again, before new ones. See docs/internals/delivery.md#resume.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.link import Handler
from mqtt_nats.backbone.pending_stores import IgnoredStore
from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.base.logs import log_failure
from mqtt_nats.delivery.backlog_limit import pass_over
from mqtt_nats.delivery.deferred_removals import DeferredRemovals
from mqtt_nats.delivery.draining import (
    finish,
    handle_delivery,
    inherited,
    may_have,
    release_waiting_for,
    unmatch,
    was_sent,
)
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
from mqtt_nats.sessions.consumer_attach import attach_moved
from mqtt_nats.sessions.consumer_binding import Came, ConsumerBinding
from mqtt_nats.sessions.record import claimed
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import ConsumerRef, backstop, consumer_info, delete_for_good, parse_ack
from mqtt_streams.headers import get_int
from mqtt_streams.messages import DELIVER_PREFIX
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import CONSUMER_PREFIX
from mqtt_streams.stored import is_answer
from mqtt_streams.subjects import starts_with_wildcard, visible_to_wildcard

if TYPE_CHECKING:
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.sessions.session import Session

log = logging.getLogger("mqtt_nats.broker")

MARKED: Final = (*MARKS, *KEPT)
"""First bytes of tokens that stand in place of an acknowledgement subject."""

CONSUMER_STATE_RETRY_S: Final = 0.25
"""Seconds until a consumer that may have messages left is asked again, while messages of others wait for that."""

# Seconds that `collect` waits for the next redelivery; after that, missing messages may have been removed.
COLLECT_PATIENCE: Final = 1.0


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
        self._progress = asyncio.Event()

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

    def request_state(self, source: SubscriptionState, sequence: int) -> None:
        """Ask JetStream how far a consumer has delivered, and how many messages it has left."""
        self.client.do(self._look(source, sequence))

    async def _look(self, source: SubscriptionState, sequence: int) -> None:
        inbox = self.client.services.nats.inbox
        name = next((name for name, binding in self.bindings.items() if binding.source is source), "")
        ask = partial(consumer_info, inbox, MESSAGES, name)
        try:  # retried: messages may wait for this answer alone
            info = await retry_until_answered(self.client, ask) if name else None
        except (ApiError, NoResponders, RequestTimeout):
            done = False
        else:
            state = (info.delivered_seq, info.num_pending, info.num_ack_pending) if info is not None else (0, 0, 0)
            done = self.machine.looked(source, sequence, *state)
        if not done:  # acknowledgements may be on their way, and no message makes the sender ask again
            asyncio.get_running_loop().call_later(CONSUMER_STATE_RETRY_S, self._look_again, source)

    def _look_again(self, source: SubscriptionState) -> None:
        if self.client.alive:
            self.machine.look_again(source)

    def report_waiting(self) -> None:
        """Note that messages of this session wait, so that the periodic check looks at it."""
        self.client.delivery.waiting.add(self)

    def report_sent(self, source: SubscriptionState) -> None:
        """Let new messages go that had to wait for a message of `source` that is now sent."""
        if source.whole or source is self.past:
            release_waiting_for(self, source)

    def seek(self) -> None:
        """Start to look for records of owed PUBRELs that JetStream does not deliver."""
        client = self.client
        if self._seeking is None or self._seeking.done():
            owed = partial(client.services.streams.pubrels.owed, client.hash)
            work = seek(self.machine, owed, lambda: client.alive)
            self._seeking = client.services.tasks.spawn(work, f"records of {client.client_id}")

    # -- messages -------------------------------------------------------------------------------

    def arrival(self, binding: ConsumerBinding) -> Handler:
        """Return the handler of a consumer's deliver subject."""
        client = self.client
        recent = client.path.recent
        machine = self.machine
        source = binding.source
        shared = recent.messages
        wild = starts_with_wildcard(binding.consumer.filter_subject.removeprefix(STORED_PREFIX))
        looks = wild or client.bridge or client.checks_each or binding.came is not None
        bindings = self.bindings
        overlap = self.overlap

        def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
            tokens = reply.split(b".")
            if len(tokens) != 9 or tokens[4] != b"1" or looks or client.options:
                self._consider(binding, wild, subject, reply, headers, payload)
                return
            sequence = int(tokens[5])
            message = shared.get(sequence)
            if message is None or message.stamp != tokens[7]:
                message = recent.message(sequence, tokens[7], subject, headers, payload)
            granted = source.qos
            if len(bindings) != 1:
                owner, granted = overlap.owner(message.subject, sequence)
                if owner is not binding:
                    granted = 0
            qos = granted if granted < message.qos else message.qos
            place = int(tokens[6])
            if (
                place != source.place
                or not qos
                or message.timed
                or not machine.sent_at_once(source, sequence, qos, reply, place + 1)
            ):
                self._consider(binding, wild, subject, reply, headers, payload)
            else:
                self.send_shared(message, qos)

        return arrived

    def _consider(
        self, binding: ConsumerBinding, wild: bool, subject: bytes, reply: bytes, headers: bytes, payload: bytes
    ) -> None:
        """Handle a delivery that `arrived` cannot send at once: a redelivery, a gap, an unwanted message."""
        ack = parse_ack(reply)
        if ack is None:
            return
        client = self.client
        source = binding.source
        if not source.follows(ack.consumer_seq):
            # Later messages must not overtake the lost one: the consumer is attached anew, and sends all again.
            binding.miss()
            client.path.link.unsubscribe_raw(binding.sid)
            client.delivery.reconciling.due(client, binding.consumer.durable_name)
            return
        source.await_delivery(ack.consumer_seq + 1)
        if self.live:
            self.settle()
        message = client.path.recent.message(ack.stream_seq, b"%d" % ack.timestamp_ns, subject, headers, payload)
        sequence = ack.stream_seq
        if source.ended and not source.whole:
            granted = (inherited if ack.delivered == 1 else was_sent)(self, binding, message, sequence)
        else:
            granted = source.granted(sequence)
        own = bool(client.bridge or client.options) and message.sender == client.client_id
        unwanted = (
            not message.qos
            or (source.ended and (sequence > source.end or not granted))
            or (wild and not visible_to_wildcard(message.subject))
            or (own and (client.bridge or (source.no_local and len(self.bindings) == 1)))
            or (
                binding.came is not None  # also for redeliveries: the first delivery may have been lost on its way
                and binding.came(message, sequence)
                and not self.machine.begun_with(sequence)
            )
        )
        if not unwanted and len(self.bindings) > 1 and (source.whole or not source.ended):
            owner, granted = self.overlap.owner(message.subject, sequence, own)
            unwanted = owner is not binding
        if ack.delivered == 1:
            source.began(ack.consumer_seq, unwanted)
        if unwanted:
            self.machine.passed_over(source, sequence, ack.delivered, reply)
        else:
            self.machine.arrived(source, sequence, ack.delivered, reply, message, min(message.qos, granted))
        if not self.machine.open or ack.delivered > 1:
            self._progress.set()
        if source.ended:
            handle_delivery(self, binding, message, sequence, ack.pending, unwanted=unwanted)

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

    # -- attaching ------------------------------------------------------------------------------

    def window(self, present: int = 0) -> int:
        """Return how many messages a consumer may have pending: at most receive maximum, so that all can be sent.

        Args:
            present: the consumer's present limit; 0 = it is a new consumer.
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

    def point_anew(self) -> None:
        """Put new deliver subjects of consumers that do not lie dormant into the record.

        The caller writes the record before it changes the consumers. nats-server's listener subscribes to what the
        record says: there a dormant consumer keeps the subject that it has.
        """
        self.adapt_consumers()
        record, _ = claimed(self.client.record)
        dormant = {one.consumer.durable_name for one in self.dormant}
        if self.position_writer is not None and not self.bindings:  # the session is being resumed
            dormant = self.position_writer.live
        for key, consumer in record.cons.items():
            if consumer.durable_name not in dormant:
                deliver = DELIVER_PREFIX + self.client.services.identity.new_nuid()
                record.cons[key] = replace(consumer, deliver_subject=deliver)

    def add(
        self, key: str, consumer: ConsumerRef, source: SubscriptionState, came: Came | None = None
    ) -> ConsumerBinding:
        """Subscribe a consumer's deliver subject before the consumer is created or updated; ``came``: see `Came`."""
        link = self.client.path.link
        binding = self.bindings.get(consumer.durable_name)
        if binding is not None:
            link.unsubscribe_raw(binding.sid)
            binding.rebind(consumer)
        else:
            binding = self._bind(ConsumerBinding(key, consumer, source, came))
        self.client.services.registry.attached[consumer.durable_name] = self.client
        sid = link.subscribe_raw(consumer.deliver_subject.encode(), self.arrival(binding))
        binding.listen(sid, link.wire)
        return binding

    def _bind(self, binding: ConsumerBinding) -> ConsumerBinding:
        consumer, source = binding.consumer, binding.source
        self.bindings[consumer.durable_name] = binding
        self.machine.sources.append(source)
        if source.whole or not source.ended:
            self.overlap.add(consumer.filter_subject.removeprefix(STORED_PREFIX), binding, source)
        return binding

    def add_removed(
        self,
        key: str,
        consumer: ConsumerRef,
        source: SubscriptionState,
        *,
        removed: bool = True,
        came: Came | None = None,
    ) -> ConsumerBinding:
        """Add a subscription for readers after its start and a restored position.

        Args:
            removed: it has no consumer.
            came: see `Came`.
        """
        binding = self._bind(ConsumerBinding(key, consumer, source, came))
        binding.go_on(max(self.resumed_from, source.start - 1), removed=removed)
        if not removed:
            self.client.services.registry.attached[consumer.durable_name] = self.client
        return binding

    async def attach(self, binding: ConsumerBinding) -> None:
        """Attach an existing consumer to this connection.

        Raises:
            MqttError: the consumer was deleted meanwhile, or its stream was replaced.
        """
        source = binding.source
        binding.attach()
        await pass_over(self, binding)
        info, late = await attach_moved(self, binding)
        if not self.machine.open:  # else messages that were lost on their way are still to come, and may be older
            source.receive_up_to(info.delivered_seq)
        source.attached(info.num_ack_pending, info.delivered_consumer_seq, late)
        binding.attached(info.ack_floor_seq, info.delivered_seq, info.num_pending)

    async def collect(self) -> None:
        """Wait until every consumer has delivered its pending messages again, or none comes for `COLLECT_PATIENCE`."""
        machine = self.machine
        while not machine.collected:
            self._progress.clear()
            try:
                async with asyncio.timeout(COLLECT_PATIENCE):
                    await self._progress.wait()
            except TimeoutError:
                break

    def detach(self) -> None:
        """Unsubscribe every deliver subject, so that the next owner can attach the consumers at once."""
        link, attached = self.client.path.link, self.client.services.registry.attached
        if self.lingering is not None:
            self.lingering.connection_ended()
        sids = {name: binding.sid for name, binding in self.bindings.items()}
        sids[CONSUMER_PREFIX + self.client.hash] = self.pubrel_sid
        for name, sid in sids.items():
            link.unsubscribe_raw(sid)
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
                services.nats.link.unsubscribe_raw(binding.sid)
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
        """Set `last` of live subscriptions to the stream sequence that the shared reader has reached."""
        if self.live:
            reached = self.client.delivery.feed.reached(self)
            self.machine.read_to(reached)
            for binding in self.bindings.values():
                if binding.source.live:
                    binding.source.deliver_to(reached)

    def store_position_with(self, position_writer: PositionWriter) -> None:
        """Have the session's position written by ``position_writer``."""
        self.position_writer = position_writer

    def begin_stall(self, stall: SlowClient) -> None:
        """Send no more messages: the client does not read."""
        self.change(DeliveryEvent.NOT_READING)
        self.stall = stall
        self.report_waiting()

    def end_stall(self) -> None:
        """Send messages again: the client reads."""
        self.change(DeliveryEvent.GOES_ON)
        self.stall = None
