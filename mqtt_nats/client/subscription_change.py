# SPDX-License-Identifier: Apache-2.0
"""Changes of subscriptions without a message that is lost or comes twice: of the QoS, and by an end.

The QoS of a durable session's subscription changes from 1 or 2 to 0, or back. The end of a subscription of a regular
session leaves its messages to overlapping subscriptions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Set
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.delivery.draining import lower, meeting, watch
from mqtt_nats.ingress.retained.replay import close_gate, open_gate
from mqtt_nats.messages.headers import identity
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.overlap import PAIRS_MOST, patterns_meet, subject_matches
from mqtt_nats.pubsub.filter_handover import Parting
from mqtt_nats.pubsub.routing_table import PLAIN, Options
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_nats.sessions.message_stream import Mark, mark
from mqtt_nats.sessions.record import save_record
from mqtt_streams.sessions import SubscriptionOptions, second_sid

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.messages.message import Stored
    from mqtt_nats.pubsub.backlog import Gate
    from mqtt_nats.pubsub.routing_table import Filter


class Wish(NamedTuple):
    """A subscription that SUBSCRIBE asks for and that is permitted."""

    qos: int
    subjects: tuple[str, ...]
    options: Options
    handling: int
    """Retain handling: 0, 1 or 2."""
    replay: bool
    """Retained messages are wanted [MQTT-3.3.1-9] [MQTT-3.3.1-10] [MQTT-3.3.1-11] (5.0)."""

    def described(self, topic_filter: str) -> SubscriptionOptions:
        """Return the subscription options as the session record has them."""
        options = self.options
        return SubscriptionOptions(
            topic_filter, options.no_local, options.retain_as_published, self.handling, options.identifier
        )


def is_lowered(client: Client, wish: Wish) -> bool:
    """Whether a subscription at QoS 1 or 2 is to be changed to QoS 0."""
    record = client.record
    return not wish.qos and record is not None and wish.subjects[0] in record.cons


class CoreCopies:
    """Messages that core NATS brings a durable session at QoS 0 on some subjects; they may be stored too."""

    def __init__(self, client: Client, subjects: Collection[str]) -> None:
        self._client = client
        self.filters = meeting(client, subjects)

    def before(self) -> frozenset[bytes]:
        """Return the ids of the messages that have come lately through core NATS."""
        return frozenset(chain.from_iterable(chain(one.seen, one.seen_before) for one in self.filters))

    def is_local(self, message: Stored) -> bool:
        """Whether this gateway has published a message and has delivered it locally, not through NATS."""
        if not self._client.path.ids.is_own(message.headers):
            return False
        tokens = message.subject.split(".")
        for found in self.filters:  # the first filter that matches serves the client
            if any(subject_matches(one.decode(), tokens) for one in found.subjects):
                return found.local
        return False


class Lowering:
    """Change of a durable subscription to QoS 0 without loss of messages [MQTT-3.8.4-4] (5.0).

    Messages of readers for it wait until core NATS has brought all messages of the same age. Then the client joins at
    QoS 0, and the messages of core NATS wait in gates. Then the last stream sequence is read: readers bring all
    messages up to it, and these go first. The gates discard their copies, and send the rest when these are sent.
    """

    def __init__(self, client: Client, topic_filter: str, wish: Wish) -> None:
        """Keep back the messages of readers from now on."""
        self._client = client
        self.filter = topic_filter
        self._wish = wish
        self._found: Filter = client.path.table.filters[topic_filter]
        self._gates: list[Gate] = []
        self._bindings: list[ConsumerBinding] = []
        self._behind: list[SubscriptionState] = []
        """Overlapping subscriptions whose newer messages wait until the messages that have waited are sent."""
        side, record = client.durable_side, client.record
        assert side is not None
        assert record is not None
        self._keys = [key for key in (wish.subjects[0], *map(second_sid, wish.subjects[1:])) if key in record.cons]
        self._sources = [side.bindings[record.cons[key].durable_name].source for key in self._keys]
        for source in self._sources:
            source.hold(SubscriptionState.REPLAYING)

    def open(self) -> None:
        """Open gates for all filters by which core NATS may bring messages: the client is about to join."""
        self._gates = [open_gate(self._client, found) for found in meeting(self._client, self._wish.subjects)]

    def let_go(self) -> None:
        """Send the messages that have waited, in order."""
        side = self._client.durable_side
        for binding in self._bindings:
            for delivery in binding.source.backlog:
                binding.brings(delivery.body)
        sources, self._sources = self._sources, []
        for source in sources:
            if side is not None:
                side.machine.drop_hold(source)
        behind, self._behind = self._behind, []
        for other in behind:
            if side is not None:
                side.machine.drop_hold(other, SubscriptionState.BEHIND)
        gates, self._gates = self._gates, []
        for gate in gates:
            close_gate(self._client, gate)

    def give_up(self) -> None:
        """Undo the change: the subscription keeps its QoS."""
        record = self._client.record
        if record is not None and self.filter in {found.text for found in self._client.filters}:
            options = (self._client.options or {}).get(self._found, PLAIN)
            self._client.join(self.filter, record.subs[self._wish.subjects[0]], options)
        for gate in self._gates:
            gate.discard_stored()  # readers bring all stored messages
        self.let_go()

    def apply(self, last: int) -> list[ConsumerBinding]:
        """Set QoS 0 in the session record; returns the subscriptions, which go on up to stream sequence ``last``."""
        side, record = self._client.durable_side, self._client.record
        if side is None or record is None or record.v5 is None:
            return []
        keys = [key for key in self._keys if key in record.cons]
        self._bindings = [lower(side, key, last, self._gates, not self._wish.replay) for key in keys]
        self._behind = [other for one in self._bindings for other in side.overlap.after(one)]
        for other in self._behind:
            other.hold(SubscriptionState.BEHIND)
        record.subs[self._wish.subjects[0]] = 0
        record.v5.options[self._wish.subjects[0]] = self._wish.described(self.filter)
        return self._bindings


def lowerings(client: Client, wanted: dict[str, Wish]) -> list[Lowering]:
    """Return the changes of a SUBSCRIBE that set a subscription at QoS 1 or 2 to QoS 0."""
    return [Lowering(client, topic_filter, wish) for topic_filter, wish in wanted.items() if is_lowered(client, wish)]


async def begin_lowering(client: Client, lowering: list[Lowering]) -> None:
    """Wait until core NATS has brought all messages that readers have brought, then open the gates.

    Raises:
        ApiError: JetStream refuses to name the last stream sequence.
    """
    if lowering:
        await retry_until_answered(client, partial(mark(client.services.nats).position, client.services.nats.inbox))
        await retry_until_answered(client, partial(client.services.nodes.fence_filters, client.filters))
        for one in lowering:
            one.open()


class Raising:
    """Change of a durable session's subscriptions from QoS 0 (core NATS) to QoS 1 or 2 (readers of the stream).

    Readers bring the messages after a first mark, except those that core NATS has brought: messages of this
    gateway's own clients up to a second mark, set when the client joins, and others that are known by their ids.
    """

    def __init__(self, client: Client, wanted: dict[str, Wish]) -> None:
        self._client = client
        subjects = [subject for wish in wanted.values() if wish.qos for subject in wish.subjects]
        self._copies = CoreCopies(client, subjects)
        self.place = mark(client.services.nats)
        self._joined: Mark | None = None
        self._until = 0
        self._came: frozenset[bytes] = frozenset()

    async def drain(self) -> None:
        """Wait until core NATS has brought all messages that were stored before the first mark."""
        await retry_until_answered(self._client, partial(self.place.position, self._client.services.nats.inbox))
        await retry_until_answered(
            self._client, partial(self._client.services.nodes.fence_filters, self._client.filters)
        )

    def change(self) -> None:
        """Set the second mark and note the ids that core NATS has brought: the client is about to join."""
        self._joined = mark(self._client.services.nats)
        self._came = self._copies.before()

    async def read_second_mark(self) -> None:
        """Read the stream sequence of the second mark."""
        assert self._joined is not None
        self._until = await retry_until_answered(
            self._client, partial(self._joined.position, self._client.services.nats.inbox)
        )

    def has_come(self, message: Stored, sequence: int) -> bool:
        """Whether core NATS has brought a message with this stream sequence."""
        if self._copies.is_local(message):
            return sequence <= self._until
        return bool(self._came) and identity(message.headers) in self._came


async def finish_lowering(client: Client, lowering: list[Lowering]) -> None:
    """Let the lowered subscriptions go on up to the present last sequence; nats-server has the subscriptions of QoS 0.

    Raises:
        Conflict: the session belongs to another connection.
        ApiError: JetStream does not store the record.
    """
    side = client.durable_side
    if not lowering or side is None:
        return
    bindings: list[ConsumerBinding] = []
    last = await retry_until_answered(client, partial(mark(client.services.nats).position, client.services.nats.inbox))
    for one in lowering:
        bindings += one.apply(last)
    # Then core NATS has brought the messages up to `last`.
    await retry_until_answered(client, partial(client.services.nodes.fence_filters, client.filters))
    for one in lowering:
        one.let_go()  # before the messages that stand behind these
    try:
        await save_record(client, client.epoch)
    finally:  # also where the record is refused: gates and later subscriptions wait for the lowered ones
        for binding in bindings:
            watch(side, binding)


def raises(client: Client, wanted: dict[str, Wish]) -> bool:
    """Whether wanted filters at QoS 1 or 2 meet filters at QoS 0 of a durable session: messages may come twice."""
    if not client.durable:
        return False
    zero = [subject.decode() for found, qos in client.filters.items() if not qos for subject in found.subjects]
    higher = [subject for wish in wanted.values() if wish.qos for subject in wish.subjects]
    if len(zero) * len(higher) > PAIRS_MOST:  # the comparison of all pairs would delay other clients
        return True
    return any(patterns_meet(one, other) for one in zero for other in higher)


# -- the end of overlapping subscriptions of a regular session ----------------------------------------


async def part(client: Client, filters: Set[str], end: Callable[[Client, Set[str]], Awaitable[None]]) -> None:
    """End subscriptions by ``end``; overlapping ones then serve the client, and no message is lost or doubled.

    Raises:
        Conflict, ApiError: as ``end`` does.
    """
    ending = {found for found in client.filters if found.text in filters}
    if client.durable or not _overlapped(client, ending):
        await end(client, filters)
        return
    parting = Parting(client.path.table, client, ending)
    try:
        await retry_until_answered(client, partial(_passed, client))
        parting.keep_filter()
        await retry_until_answered(client, partial(_passed, client))
        await end(client, filters)
        parting.filters_ended()
        await retry_until_answered(client, partial(_passed, client))
    finally:
        parting.finish()


async def _passed(client: Client) -> None:
    """Wait for the messages on their way through NATS to the client, and for those that a lost connection has missed.

    Raises:
        TimeoutError: some of these messages have not come yet.
    """
    await client.services.nodes.fence_filters(client.filters)
    if any(found.backlog is not None for found in client.filters):
        raise TimeoutError("missed messages are still being read")


def _overlapped(client: Client, ending: Set[Filter]) -> bool:
    """Whether an ending filter serves the client where a later filter, which stays, matches too."""
    before: list[Filter] = []
    for found, qos in client.filters.items():
        if found in ending:
            before.append(found)
        elif any((qos or client.filters[one]) and _meet(one, found) for one in before):
            return True
    return False


def _meet(one: Filter, other: Filter) -> bool:
    """Whether some topic matches both of two different filters."""
    if not any(wildcard in one.text + other.text for wildcard in "+#"):
        return False
    return any(patterns_meet(left.decode(), right.decode()) for left in one.subjects for right in other.subjects)
