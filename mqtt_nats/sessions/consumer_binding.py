# SPDX-License-Identifier: Apache-2.0
"""Subscriptions of a durable session, each with the consumer that shows it in JetStream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from mqtt_nats.codec import matches
from mqtt_nats.messages.headers import identity
from mqtt_nats.messages.message import encoded_id
from mqtt_nats.protocol.durable_sender import DurableSender
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.overlap import Overlap
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.subjects import subject_to_topic

if TYPE_CHECKING:
    from mqtt_nats.messages.message import Stored
    from mqtt_nats.protocol.inflight import Delivery
    from mqtt_nats.pubsub.backlog import Gate
    from mqtt_nats.sessions.session import Session


Came = Callable[["Stored", int], bool]
"""``came(message, sequence)``: whether core NATS has already brought a stored message to the client."""


class ConsumerBinding:
    """A subscription of a durable session at QoS 1 or 2, and its dormant consumer."""

    __slots__ = (
        "behind",
        "came",
        "consumer",
        "drained",
        "gates",
        "key",
        "removed",
        "resent",
        "since",
        "source",
    )

    def __init__(
        self,
        key: str,
        consumer: ConsumerRef,
        source: SubscriptionState,
        came: Came | None = None,
    ) -> None:
        self.key = key
        """Key of the subscription in the session record; empty for one that has ended or was lowered."""
        self.consumer = consumer
        self.source = source
        self.drained = True
        """Whether readers have brought all messages; False for a subscription lowered to QoS 0 that has some left."""
        self.behind: list[SubscriptionState] = []
        """Subscriptions whose new messages wait until this one, which was lowered, is drained."""
        self.came = came
        """Whether core NATS has brought a message, for a subscription raised from QoS 0; None = it was not raised."""
        self.gates: list[Gate] = []
        """Gates of a subscription lowered to QoS 0: messages of core NATS wait there until the stored ones are sent."""
        self.removed = False
        """Whether the consumer was removed, or is being removed, since the session's position replaces it."""
        self.since = 0
        """Stream sequence after which readers bring the messages."""
        self.resent = 0
        """Stream sequence up to which messages are given although `since` passes them: they may have been sent."""

    def reconfigure(self, consumer: ConsumerRef) -> None:
        """Take the consumer as it is configured now."""
        self.consumer = consumer

    # -- the shared reader ----------------------------------------------------------------------

    def begin_after(self, since: int, *, removed: bool) -> None:
        """Take the messages after stream sequence ``since`` from readers, once they are let go.

        Args:
            removed: there is no consumer.
        """
        self.since, self.resent = since, 0
        self.source.hold(SubscriptionState.RETURNING)
        self.source.begin_after(since)
        self.removed = removed

    def catch_up_to(self, since: int) -> None:
        """Take the messages after stream sequence ``since`` from the shared reader: those before have come."""
        self.since = max(self.since, since)
        if since >= self.resent:
            self.resent = 0

    def pass_over(self, sent: int, until: int) -> None:
        """Take no message up to stream sequence ``until`` from readers; those up to ``sent`` may have been sent."""
        self.resent, self.since = sent, max(self.since, until)

    def remove(self) -> None:
        """Note that the consumer is being removed: the session's position replaces it."""
        self.removed = True

    def lie_dormant(self) -> None:
        """Note that the consumer was created again: the session's position replaces it."""
        self.removed = False

    # -- the end of the subscription ------------------------------------------------------------

    def end_subscription(self) -> None:
        """End the subscription: the record does not name it any more."""
        self.key = ""

    def take_behind(self) -> list[SubscriptionState]:
        """Return the subscriptions that have waited for this one; they wait no more."""
        behind, self.behind = self.behind, []
        return behind

    def exhaust(self) -> None:
        """Note that readers have brought all messages."""
        self.drained = True

    def lowered(self, gates: list[Gate]) -> None:
        """Mark the subscription as lowered to QoS 0; messages of core NATS wait in ``gates``."""
        self.key = ""
        self.drained = False
        self.gates = gates
        for gate in gates:
            gate.hold()

    def brings(self, message: Stored) -> None:
        """Discard the copy of a message that waits in a gate: a reader has brought the message."""
        known = identity(message.headers)
        for gate in self.gates:
            gate.discard(known)

    def release(self) -> list[Gate]:
        """Return the gates, which do not wait for this subscription any more."""
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
        pending = delivery.source is self.past
        identifiers, kept = self.overlap.extras(message.subject, delivery.sequence, own, pending=pending)
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

    # -- the shared reader ----------------------------------------------------------------------

    def resume_from(self, reached: int) -> None:
        """Note up to which stream sequence an earlier connection took all messages from the shared reader."""
        self.resumed_from = reached
        self.machine.read_to(reached)

    def add_past(self) -> None:
        """Add the source of the messages that an earlier connection took."""
        self.past = SubscriptionState(0, 0)
        self.machine.sources.append(self.past)
