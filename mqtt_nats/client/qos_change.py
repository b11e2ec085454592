# SPDX-License-Identifier: Apache-2.0
"""QoS 0 takes the place of a durable subscription, or QoS 1 or 2 that of QoS 0: each message comes once, in order."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.delivery.draining import lower, meeting, watch
from mqtt_nats.ingress.retained_replay import close_gate, open_gate
from mqtt_nats.messages.headers import identity
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.overlap import patterns_meet, subject_matches
from mqtt_nats.pubsub.interest_propagation import fence
from mqtt_nats.pubsub.routing_table import PLAIN, Options
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_nats.sessions.record import save_record
from mqtt_nats.sessions.stream_head import Mark, mark
from mqtt_streams.sessions import SubscriptionOptions, second_sid

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.messages.message import Stored
    from mqtt_nats.pubsub.backlog import Gate
    from mqtt_nats.pubsub.routing_table import Filter

PAIRS_MOST: Final = 10_000
"""Pairs of filters that are compared at once."""


class Wish(NamedTuple):
    """One subscription that is asked for and may be had."""

    qos: int
    subjects: tuple[str, ...]
    options: Options
    handling: int
    """Retain handling: 0, 1 or 2."""
    replay: bool
    """Retained messages are wanted [MQTT-3.3.1-9] [MQTT-3.3.1-10] [MQTT-3.3.1-11] (5.0)."""

    def described(self, topic_filter: str) -> SubscriptionOptions:
        """As the session record has it."""
        options = self.options
        return SubscriptionOptions(
            topic_filter, options.no_local, options.retain_as_published, self.handling, options.identifier
        )


def is_lowered(client: Client, wish: Wish) -> bool:
    """Whether QoS 0 is to take the place of a subscription that has consumers."""
    record = client.record
    return not wish.qos and record is not None and wish.subjects[0] in record.cons


class CoreCopies:
    """The messages that core NATS brings a durable session at QoS 0 on some subjects, where they may be stored too."""

    def __init__(self, client: Client, subjects: Collection[str]) -> None:
        self._client = client
        self.filters = meeting(client, subjects)

    def before(self) -> frozenset[bytes]:
        """The ids of those that have come lately through NATS."""
        return frozenset(chain.from_iterable(chain(one.seen, one.seen_before) for one in self.filters))

    def is_local(self, message: Stored) -> bool:
        """Whether this gateway has published a message, and has delivered it without a way through NATS."""
        if not self._client.broker.is_own(message.headers):
            return False
        tokens = message.subject.split(".")
        for found in self.filters:  # the first one serves the client
            if any(subject_matches(one.decode(), tokens) for one in found.subjects):
                return found.local
        return False


class Lowering:
    """QoS 0 takes the place of a durable subscription, of which nothing may be lost [MQTT-3.8.4-4] (5.0).

    What its consumer brings waits until core NATS has brought all that is as old. Then the client joins at QoS 0, and
    what that brings waits too. Then the stream says how far it is: up to there the consumer brings all, and goes on
    first; what has come at QoS 0 as well is discarded there, and the rest of that comes when the consumer is done.
    """

    def __init__(self, client: Client, topic_filter: str, wish: Wish) -> None:
        """What the consumer brings waits from now on."""
        self._client = client
        self.filter = topic_filter
        self._wish = wish
        self._found: Filter = client.broker.table.filters[topic_filter]
        self._gates: list[Gate] = []
        self._attachments: list[ConsumerBinding] = []
        side, record = client.durable_side, client.record
        assert side is not None
        assert record is not None
        self._keys = [key for key in (wish.subjects[0], *map(second_sid, wish.subjects[1:])) if key in record.cons]
        self._sources = [side.attachments[record.cons[key].durable_name].source for key in self._keys]
        for source in self._sources:
            source.held += SubscriptionState.REPLAYING

    def open(self) -> None:
        """The client is about to join: whatever core NATS may bring, by whichever filter, waits."""
        self._gates = [open_gate(self._client, found) for found in meeting(self._client, self._wish.subjects)]

    def let_go(self) -> None:
        """Send what has waited, in its order."""
        side = self._client.durable_side
        for attachment in self._attachments:
            for delivery in attachment.source.backlog:
                attachment.brings(delivery.body)
        sources, self._sources = self._sources, []
        for source in sources:
            if side is not None:
                side.machine.release_held(source)
        gates, self._gates = self._gates, []
        for gate in gates:
            close_gate(self._client, gate)

    def give_up(self) -> None:
        """The subscription stays as it was."""
        record = self._client.record
        if record is not None and self.filter in {found.text for found in self._client.filters}:
            options = (self._client.options or {}).get(self._found, PLAIN)
            self._client.join(self.filter, record.subs[self._wish.subjects[0]], options)
        for gate in self._gates:
            gate.discard_stored()  # the consumer brings all
        self.let_go()

    def apply(self, last: int) -> list[ConsumerBinding]:
        """The stream has got to ``last``; returns the consumers that go on up to there."""
        side, record = self._client.durable_side, self._client.record
        if side is None or record is None or record.v5 is None:
            return []
        keys = [key for key in self._keys if key in record.cons]
        self._attachments = [lower(side, key, last, self._gates, not self._wish.replay) for key in keys]
        record.subs[self._wish.subjects[0]] = 0
        record.v5.options[self._wish.subjects[0]] = self._wish.described(self.filter)
        return self._attachments


def lowerings(client: Client, wanted: dict[str, Wish]) -> list[Lowering]:
    """What of a SUBSCRIBE has QoS 0 take the place of a subscription that has consumers."""
    return [Lowering(client, topic_filter, wish) for topic_filter, wish in wanted.items() if is_lowered(client, wish)]


async def begin_lowering(client: Client, lowering: list[Lowering]) -> None:
    """Before the client joins: core NATS has brought whatever consumers have brought until now.

    Raises:
        ApiError: JetStream does not say how far it is.
    """
    if lowering:
        await retry_until_answered(client, partial(mark(client.broker).position, client.broker))
        await retry_until_answered(client, partial(fence, client))
        for one in lowering:
            one.open()


class Raising:
    """A durable session gets at QoS 1 or 2, out of the stream, what core NATS has brought it at QoS 0 until now.

    What is stored after a first mark is for the new consumers, but for what has come by core NATS: that of this
    gateway's own clients up to a second mark, which is made as the client joins, and else what is known by its id.
    """

    def __init__(self, client: Client, wanted: dict[str, Wish]) -> None:
        self._client = client
        subjects = [subject for wish in wanted.values() if wish.qos for subject in wish.subjects]
        self._copies = CoreCopies(client, subjects)
        self.place = mark(client.broker)
        self._joined: Mark | None = None
        self._until = 0
        self._came: frozenset[bytes] = frozenset()

    async def drain(self) -> None:
        """Wait until core NATS has brought whatever was stored before the first mark."""
        await retry_until_answered(self._client, partial(self.place.position, self._client.broker))
        await retry_until_answered(self._client, partial(fence, self._client))

    def change(self) -> None:
        """The client is about to join."""
        self._joined = mark(self._client.broker)
        self._came = self._copies.before()

    async def look(self) -> None:
        """Learn where the stream was then."""
        assert self._joined is not None
        self._until = await retry_until_answered(self._client, partial(self._joined.position, self._client.broker))

    def has_come(self, message: Stored, sequence: int) -> bool:
        """Whether core NATS has brought a message."""
        if self._copies.is_local(message):
            return sequence <= self._until
        return bool(self._came) and identity(message.headers) in self._came


async def finish_lowering(client: Client, lowering: list[Lowering]) -> None:
    """The server has the subscriptions: let consumers go on up to what is stored now.

    Raises:
        Conflict: the session belongs to somebody else.
        ApiError: JetStream does not store the record.
    """
    side = client.durable_side
    if not lowering or side is None:
        return
    attachments: list[ConsumerBinding] = []
    last = await retry_until_answered(client, partial(mark(client.broker).position, client.broker))
    for one in lowering:
        attachments += one.apply(last)
    await retry_until_answered(client, partial(fence, client))  # what core NATS brings of that has come
    for one in lowering:
        one.let_go()  # before anything that stands behind it
    await save_record(client, client.epoch)
    for attachment in attachments:
        watch(side, attachment)


def raises(client: Client, wanted: dict[str, Wish]) -> bool:
    """Whether a durable session is to get at QoS 1 or 2 what it gets at QoS 0 now, so that something may come twice."""
    if not client.durable:
        return False
    zero = [subject.decode() for found, qos in client.filters.items() if not qos for subject in found.subjects]
    higher = [subject for wish in wanted.values() if wish.qos for subject in wish.subjects]
    if len(zero) * len(higher) > PAIRS_MOST:  # to look at each pair would hold up others
        return True
    return any(patterns_meet(one, other) for one in zero for other in higher)
