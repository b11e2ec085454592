# SPDX-License-Identifier: Apache-2.0
"""Consumers of a durable session, each bound to the client's connection."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from mqtt_nats.codec import matches
from mqtt_nats.messages.headers import identity
from mqtt_nats.messages.message import encoded_id
from mqtt_nats.protocol.durable_sender import SEQUENCE_EVER, DurableSender
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.overlap import Overlap
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.subjects import subject_to_topic

if TYPE_CHECKING:
    from mqtt_nats.backbone.link import Handler
    from mqtt_nats.backbone.transport import NatsTransport
    from mqtt_nats.messages.message import Stored
    from mqtt_nats.protocol.inflight import Delivery
    from mqtt_nats.pubsub.backlog import Gate
    from mqtt_nats.sessions.session import Session


Came = Callable[["Stored", int], bool]
"""``came(message, sequence)``: whether core NATS has already brought a stored message to the client."""


class ConsumerBinding:
    """A consumer of a durable session, attached to the client's connection or about to be."""

    __slots__ = (
        "_idle",
        "behind",
        "came",
        "consumer",
        "drained",
        "gates",
        "gone",
        "handover_limits",
        "key",
        "missed",
        "passing",
        "redelivering",
        "removed",
        "resent",
        "sid",
        "since",
        "source",
        "through",
        "wire",
    )

    def __init__(
        self,
        key: str,
        consumer: ConsumerRef,
        source: SubscriptionState,
        came: Came | None = None,
    ) -> None:
        self.key = key
        """Key of the consumer in the session record; empty for one that is draining."""
        self.consumer = consumer
        self.source = source
        self.sid = b""
        self.wire: NatsTransport | None = None
        """Connection to NATS on which the deliver subject was subscribed; None = not subscribed yet."""
        self.handover_limits: dict[SubscriptionState, int] = {}
        """Stream sequences up to which overlapping subscriptions left messages to this one, which has ended."""
        self.drained = True
        """Drained: no undelivered message of this consumer matches a remaining filter."""
        self.through = False
        """Drained, except for redeliveries of messages that were pending when the subscription ended."""
        self.redelivering = False
        """Whether pending messages may have to come again since the last attachment: see `draining.returned`."""
        self.behind: list[SubscriptionState] = []
        """Subscriptions whose new messages wait until this one, which has ended, is drained."""
        self.came = came
        """Whether core NATS has brought a message, for a subscription raised from QoS 0; None = it was not raised."""
        self.gates: list[Gate] = []
        """Gates of a subscription lowered to QoS 0: messages of core NATS wait there until the consumer's are sent."""
        self._idle: asyncio.Event | None = None
        self.missed = False
        """Whether a delivery was lost on its way: later deliveries are not taken until it has come again."""
        self.passing = False
        """Whether the oldest messages are being passed over (`max_backlog`)."""
        self.removed = False
        """Whether the consumer was removed, or is being removed, since the session's position replaces it."""
        self.since = 0
        """Stream sequence after which the shared reader brings the messages of a live subscription; 0 = not live."""
        self.resent = 0
        """Stream sequence up to which messages are given although `since` passes them: they may have been sent."""
        self.gone = (1, 0)
        """First and last stream sequence between which messages were pending when the consumer was attached."""

    @property
    def not_come(self) -> tuple[int, int]:
        """First and last sequence of `gone`, without the messages that have come for the first time since then."""
        first, last = self.gone
        return first, min(last, self.source.base - 1) if self.source.base else last

    # -- the consumer, and the subscription of its deliver subject ---------------------------------

    def reconfigure(self, consumer: ConsumerRef) -> None:
        """Take the consumer as it is configured now."""
        self.consumer = consumer

    def rebind(self, consumer: ConsumerRef) -> None:
        """Take the consumer with a new deliver subject, on which it is about to send what is pending."""
        self.consumer = consumer
        self.missed = self.passing = False
        self.source.await_delivery(0)

    def listen(self, sid: bytes, wire: NatsTransport | None) -> None:
        """Note the subscription of the deliver subject, and its connection to NATS."""
        self.sid, self.wire = sid, wire

    def attach(self) -> None:
        """Note that the consumer is being attached: pending messages may have to come again."""
        self.source.attaching()
        self.redelivering = True

    def attached(self, floor: int, delivered: int, pending: int) -> None:
        """Note the consumer's state when it was attached.

        Args:
            floor: stream sequence up to which all deliveries are acknowledged.
            delivered: last stream sequence that it has delivered.
            pending: number of messages that it has not delivered.
        """
        self.gone = (floor + 1, delivered)
        if delivered >= self.source.end or (not pending and not self.source.whole):
            self.through = True

    def end_redelivery(self) -> None:
        """Note that the pending messages have come again, or are gone."""
        self.redelivering = False
        self.drained = self.drained or self.through

    def miss(self) -> None:
        """Note that a delivery was lost on its way: no delivery is taken until it has come again."""
        self.missed = True

    def begin_passing(self) -> None:
        """Note that the oldest messages are being passed over."""
        self.passing = True

    def end_passing(self) -> None:
        """Note that no more messages are passed over."""
        self.passing = False

    # -- the shared reader ----------------------------------------------------------------------

    def become_live(self, since: int) -> None:
        """Take the messages after stream sequence ``since`` from the shared reader; the consumer lies dormant."""
        self.sid = b""
        self.since, self.resent = since, 0
        self.source.become_live(since)

    def catch_up_to(self, since: int) -> None:
        """Take the messages after stream sequence ``since`` from the shared reader: those before have come."""
        self.since = max(self.since, since)

    def pass_over(self, sent: int, until: int) -> None:
        """Take no message up to stream sequence ``until`` from readers; those up to ``sent`` may have been sent."""
        self.resent, self.since = sent, max(self.since, until)

    def remove(self) -> None:
        """Note that the consumer is being removed: the session's position replaces it."""
        self.removed = True

    def lie_dormant(self) -> None:
        """Note that the consumer was created again: the session's position replaces it."""
        self.removed = False

    def go_on(self, since: int, *, removed: bool = True) -> None:
        """Take the messages after stream sequence ``since`` from readers; ``removed``: there is no consumer."""
        self.source.idle(since, since)
        self.become_live(since)
        self.removed = removed

    def become_plain(self, reached: int) -> None:
        """Take the messages after stream sequence ``reached`` from the consumer."""
        self.since = 0
        self.removed = False
        self.source.become_plain(reached)

    # -- the end of the subscription ------------------------------------------------------------

    def end_subscription(self, limits: dict[SubscriptionState, int]) -> None:
        """End the subscription; ``limits``: up to where others left messages to it (see `handover_limits`)."""
        self.key = ""
        self.handover_limits = limits

    def stand_before(self, others: Iterable[SubscriptionState]) -> None:
        """Keep back new messages of ``others``: this ended subscription may still bring older ones that they match."""
        self.drained = self.through = False
        self.behind = list(others)
        for other in self.behind:
            other.hold(SubscriptionState.BEHIND)

    def take_behind(self) -> list[SubscriptionState]:
        """Return the subscriptions that have waited for this one; they wait no more."""
        behind, self.behind = self.behind, []
        return behind

    def exhaust(self) -> None:
        """Note that no message is left but redeliveries."""
        self.through = True
        self.drained = self.drained or not (self.redelivering or self.missed)

    def lowered(self, gates: list[Gate]) -> None:
        """Mark the subscription as lowered to QoS 0; messages of core NATS wait in ``gates``."""
        self.key = ""
        self.gates = gates
        self._idle = asyncio.Event()
        for gate in gates:
            gate.hold()

    def brings(self, message: Stored) -> None:
        """Discard the copy of a message that waits in a gate: the consumer has brought the message."""
        known = identity(message.headers)
        for gate in self.gates:
            gate.discard(known)

    def emptied(self) -> None:
        """Note that the consumer reports no further messages."""
        if self._idle is not None:
            self._idle.set()

    async def rest(self, seconds: float) -> None:
        """Wait until :meth:`emptied` is called, for at most ``seconds``."""
        if self._idle is None:
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        self._idle.clear()

    def release(self) -> list[Gate]:
        """Return the gates, which do not wait for this consumer any more."""
        gates, self.gates = self.gates, []
        return gates


@mypyc_attr(allow_interpreted_subclasses=True)
class SessionConsumers:
    """The consumers of a durable session, and what this connection knows of the session in JetStream; abstract."""

    def __init__(self, machine: DurableSender, former: int) -> None:
        self.machine = machine
        self.bindings: dict[str, ConsumerBinding] = {}
        """Consumers of the session, by consumer name."""
        self.overlap: Overlap[ConsumerBinding] = Overlap()
        self.damaged = False
        """Whether a consumer was deleted and is about to be created again."""
        self.doubtful: set[str] = set()
        """Names of consumers that `Reconciling` will check: deliveries or acknowledgements may have been lost."""
        self.attempts = 0
        """Number of times in a row that `Reconciling` has attached the consumers anew."""
        self.kept = False
        """Whether the record has to be written: a consumer kept its deliver subject, or the record has changed."""
        self.former = former
        """Sequence of the session record that the previous connection had replaced."""
        self.replaced: int | None = None
        """Stream sequence after which a stream that was replaced has other messages; None = it was not replaced."""
        self.noted = 0
        """Sequence of the note of QoS 2 messages that were in flight (`pubrels.note`); 0 = there is none."""
        self.assigned: set[int] | None = None
        """Sequences of assignments of shared subscriptions' messages that this connection knows; None = none."""
        self.past: SubscriptionState | None = None
        """Source of the messages that an earlier connection took from the shared reader; None = there are none."""
        self.resumed_from = 0
        """Stream sequence up to which an earlier connection took all messages from the shared reader; 0 = none."""
        self.pubrel_sid = b""
        self.pubrels_come = 0

    # -- implemented by DurableDelivery ---------------------------------------------------------

    @property
    @abstractmethod
    def session(self) -> Session:
        """The session of the consumers."""

    @abstractmethod
    def arrival(self, binding: ConsumerBinding) -> Handler:
        """Return the handler of a consumer's deliver subject."""

    @abstractmethod
    def pubrel_arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Handle a delivery of the consumer of PUBREL records."""

    @abstractmethod
    def ack(self, reply: bytes, identifier: int = 0) -> None:
        """Acknowledge a message, as :meth:`Ports.ack`."""

    # -- PUBLISH packets ------------------------------------------------------------------------

    def subscriber_properties(self, message: Stored, delivery: Delivery) -> tuple[bytes, bool]:
        """Return subscription identifiers for a stored message, and whether RETAIN stays [MQTT-3.3.4-4] (5.0).

        A 3.1.1 bridge gets the publisher's RETAIN flag.
        """
        client = self.session
        options = client.options
        if client.version != 5:
            return b"", client.bridge and message.kept
        if delivery.sequence < 0:  # a retained message, or one of a group, comes by one subscription only
            return encoded_id(delivery.source.identifier), delivery.source.kept and message.kept
        if not options:
            return b"", False
        own = message.sender == client.client_id
        identifiers, kept = self.overlap.extras(message.subject, delivery.sequence, own)
        topic = subject_to_topic(message.subject)
        for found, wanted in options.items():  # subscriptions at QoS 0 have no consumer, so `overlap` lacks them
            if not client.filters[found] and not (own and wanted.no_local) and matches(found.text, topic):
                kept = kept or wanted.retain_as_published
                if wanted.identifier is not None:
                    identifiers.append(wanted.identifier)
        return b"".join(map(encoded_id, identifiers)), kept and message.kept

    # -- PUBREL records -------------------------------------------------------------------------

    @property
    def has_pubrels(self) -> bool:
        """Whether the consumer of PUBREL records is attached."""
        return bool(self.pubrel_sid)

    def listen_for_pubrels(self, sid: bytes) -> None:
        """Note the subscription of the deliver subject of PUBREL records, of which none has come yet."""
        self.pubrel_sid = sid
        self.pubrels_come = 0

    # -- the record -----------------------------------------------------------------------------

    def reconfigure(self, binding: ConsumerBinding, consumer: ConsumerRef) -> None:
        """Take a consumer as it is configured now, also into the record if the record names it."""
        binding.reconfigure(consumer)
        record = self.session.record
        if record is not None and binding.key in record.cons:
            record.cons[binding.key] = consumer
            self.change_record()

    def change_record(self) -> None:
        """Note that the record has to be written."""
        self.kept = True

    def take_record_change(self) -> bool:
        """Return whether the record has to be written, which the caller does."""
        kept, self.kept = self.kept, False
        return kept

    def replace_stream(self, floor: int) -> None:
        """Note that the stream was replaced: after sequence ``floor`` it has other messages."""
        self.replaced = floor

    def find_note(self, sequence: int) -> None:
        """Note the sequence of the note of QoS 2 messages that were in flight."""
        self.noted = sequence

    def know_assignments(self, sequences: Iterable[int]) -> None:
        """Add the sequences of assignments that this connection knows."""
        self.assigned = set(sequences).union(self.assigned or ()) or None

    # -- repairs --------------------------------------------------------------------------------

    def begin_repair(self) -> bool:
        """Note that a consumer was deleted; return False when a repair waits already."""
        waits, self.damaged = self.damaged, True
        return not waits

    def end_repair(self) -> None:
        """Note that the repair has begun: another deleted consumer needs another one."""
        self.damaged = False

    def take_doubtful(self) -> set[str]:
        """Return the names of the consumers to check; a later loss needs another check."""
        doubtful, self.doubtful = self.doubtful, set()
        return doubtful

    def count_attempt(self) -> int:
        """Return how often in a row the consumers were attached anew, this time included."""
        self.attempts += 1
        return self.attempts

    def clear_attempts(self) -> None:
        """Note that a check has found nothing lost."""
        self.attempts = 0

    # -- the shared reader ----------------------------------------------------------------------

    @property
    def dormant(self) -> list[ConsumerBinding]:
        """Consumers that lie dormant: the shared reader brings their messages, or they have to be set."""
        return [one for one in self.bindings.values() if one.source.live]

    def resume_from(self, reached: int) -> None:
        """Note up to which stream sequence an earlier connection took all messages from the shared reader."""
        self.resumed_from = reached

    def add_past(self, count: int) -> None:
        """Add the source of ``count`` messages that an earlier connection took from the shared reader."""
        self.past = past = SubscriptionState(0, 0, max(count, 1))
        past.stand_for_position(SEQUENCE_EVER)
        self.machine.sources.append(past)
