# SPDX-License-Identifier: Apache-2.0
"""Promotion of a session: from its own consumers to the shared reader."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.batch import BATCH_REQUESTS_MOST, parts
from mqtt_nats.delivery.resume import rebind_consumers
from mqtt_nats.delivery.states import MAY_JOIN
from mqtt_nats.protocol.ack_tokens import TAKEN
from mqtt_nats.sessions.consumer_attach import ATTACH_POLL_S
from mqtt_nats.sessions.record import claimed, store_position_name
from mqtt_streams.consumers import consumer_info, parse_ack
from mqtt_streams.messages import STREAM as MESSAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mqtt_nats.backbone.inbox import RequestInbox
    from mqtt_nats.backbone.link import Handler
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.messages.message import Stored
    from mqtt_nats.protocol.durable_sender import DurableSender
    from mqtt_nats.protocol.position import SessionPosition
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding
    from mqtt_nats.sessions.message_stream import StreamHead
    from mqtt_nats.shared_reader.sessions import SharedReaderSessions

log = logging.getLogger("mqtt_nats.broker")

KEPT_BACK: Final = 10_000
"""Maximum number of messages that are kept back for a session during its promotion."""

JOINING_MOST: Final = 1024
"""Maximum number of subscriptions in promotion at a time: nats-server drops all requests when 10,000 wait."""

BEHIND_MESSAGES: Final = 1000
"""Number of messages left above which a session becomes live where its consumers are, with a catch-up reader."""

CONSUMER_REST_MOST_S: Final = 5.0
"""Maximum seconds until a consumer has delivered the rest before the shared reader takes over."""

RETRY_FIRST: Final = 2.0
RETRY_MOST: Final = 60.0
"""First and maximum seconds until a session that has fallen behind may become live again; doubled each time."""

DORMANT_RENEWAL_S: Final = 40_000.0
"""Seconds between renewals of a dormant consumer: half of the time by which the consumer outlives its session."""


class Promotion:
    """Promotion of some subscriptions of a session, while it is under way."""

    __slots__ = (
        "behind",
        "bindings",
        "dropped",
        "gave_way",
        "handlers",
        "kept",
        "passed",
        "rests",
        "since",
        "wrong",
    )

    def __init__(self, bindings: list[ConsumerBinding], since: int, behind: bool = False) -> None:
        self.bindings = bindings
        self.since = since
        """Stream sequence after which the shared reader's messages count."""
        self.behind = behind
        """Whether many messages after `since` are stored that the shared reader does not bring."""
        self.kept: list[tuple[int, Stored]] = []
        """Messages of the shared reader after `since`, kept until the promotion is done."""
        self.passed: set[ConsumerBinding] = set()
        """Consumers that have delivered a message after `since`, so that all messages before it have come."""
        self.handlers: dict[ConsumerBinding, Handler] = {}
        """Former handlers of the consumers' deliver subjects."""
        self.rests: dict[ConsumerBinding, Handler] = {}
        """Handlers of the deliver subjects during the promotion."""
        self.dropped = False
        """Whether a message after `since` that a consumer delivered was dropped."""
        self.gave_way = False
        """Whether the promotion stopped for another job of the client; the next attempt may follow at once."""
        self.wrong = False
        """Whether the promotion has to fail: a message was lost, or too many were kept back."""

    def fail(self) -> None:
        """Make the promotion fail: a message was lost, or may be."""
        self.wrong = True

    def give_way(self) -> None:
        """Stop for another job of the client."""
        self.gave_way = True

    def drop(self) -> None:
        """Note that a message after `since` was dropped that a consumer had delivered."""
        self.dropped = True

    def forget_handlers(self) -> None:
        """Forget the handlers, which refer to this promotion: else only Python's collector frees the session."""
        self.handlers.clear()
        self.rests.clear()

    def keep_back(self, sequence: int, message: Stored) -> None:
        """Keep a message of the shared reader until the session is live."""
        if sequence > self.since:
            self.kept.append((sequence, message))
            if len(self.kept) > KEPT_BACK:
                self.wrong = True
                self.kept.clear()


class ReaderSession:
    """Session in the index of the shared reader."""

    __slots__ = ("_wait", "client", "filters", "joining", "retry", "side")

    def __init__(self, client: Receiver, side: DurableDelivery) -> None:
        self.client = client
        self.side = side
        self.filters: list[str] = []
        self.joining: Promotion | None = None
        self.retry = 0.0
        """Loop time in seconds before which the session does not become live."""
        self._wait = RETRY_FIRST

    def begin_joining(self, joining: Promotion) -> None:
        """Begin the promotion of some subscriptions."""
        self.joining = joining

    def end_joining(self) -> Promotion | None:
        """End the promotion and return it; None = none was under way."""
        joining, self.joining = self.joining, None
        return joining

    def put_off(self, now: float) -> None:
        """Leave the session to its own consumers for a while; the time doubles with each call."""
        self.retry = now + self._wait
        self._wait = min(self._wait * 2, RETRY_MOST)

    def kept_up(self) -> None:
        """Reset the retry time: the session has become live."""
        self._wait = RETRY_FIRST


class PromotionLimit:
    """Limit on the sessions that are promoted at the same time, with a queue of waiting sessions."""

    def __init__(self, begin: Callable[[Receiver], None]) -> None:
        self._begin = begin
        self._at_it: dict[Receiver, int] = {}
        """Number of concurrent requests for a session's subscriptions, by client in promotion."""
        self._asked = 0
        self._waiting: dict[Receiver, None] = {}

    def __contains__(self, client: Receiver) -> bool:
        return client in self._at_it

    def begin_or_wait(self, client: Receiver, subscriptions: int) -> bool:
        """Return whether a session's promotion may begin now; if not, ``begin`` is called later, in order."""
        if self._asked >= JOINING_MOST:
            self._waiting[client] = None
            return False
        self._at_it[client] = several = min(subscriptions, BATCH_REQUESTS_MOST)
        self._asked += several
        return True

    def end_promotion(self, client: Receiver) -> None:
        """End a session's promotion, successful or not, and begin the next waiting ones."""
        self._waiting.pop(client, None)
        self._asked -= self._at_it.pop(client, 0)
        while self._waiting and self._asked < JOINING_MOST:
            following = next(iter(self._waiting))
            del self._waiting[following]
            try:
                self._begin(following)
            except Exception:  # it concerns neither the session that ends its promotion nor the others that wait
                log.exception("%s: its promotion did not begin", following)


def settled(client: Receiver) -> bool:
    """Return whether a session is open and no job of its client is under way."""
    return client.greeted and client.alive and not client.sent_disconnect and not client.busy


def may_join(client: Receiver, side: DurableDelivery) -> bool:
    """Return whether a session's subscriptions that are not live may become so, as far as the session is concerned."""
    record = client.record
    return (
        client.alive
        and side.state in MAY_JOIN
        and not side.doubtful
        and side.machine.open
        and record is not None
        and record.v5 is not None
        and any(not one.source.live for one in side.bindings.values())
        and not any(
            one.source.ended
            or one.source.held
            or one.missed
            or one.passing
            or not (one.source.live or one.source.collected)
            for one in side.bindings.values()
        )
        and side.machine.crowd == 0
    )


def wholly_live(side: DurableDelivery) -> bool:
    """Return whether the shared reader, or a catch-up reader, serves every subscription of a session."""
    subscriptions = side.bindings.values()
    return not subscriptions or (side.live and all(one.source.live for one in subscriptions))


async def move_to_records(client: Receiver) -> None:
    """Move a session from consumers to records: its consumers are removed once the session is live.

    Raises:
        ApiError: the record cannot be stored.
        Conflict: another connection has claimed the session.
    """
    record, v5 = claimed(client.record)
    if v5.pos and v5.consumerless:
        return
    with_consumers = not v5.consumerless
    v5.move_to_records()
    if with_consumers:
        client.services.stream.count_consumers(-len(record.cons))
    try:
        await store_position_name(client)
    except BaseException:
        if with_consumers:
            v5.move_to_consumers()
        raise


def take_over(joining: Promotion, machine: DurableSender, ledger: SessionPosition) -> None:
    """Move consumers' deliveries that are in flight or waiting into the session's position, as pending."""
    names = {one.consumer.durable_name for one in joining.bindings}
    sources = {one.source for one in joining.bindings}
    for delivery in machine.on_their_way():
        if delivery.source in sources and delivery.sequence > 0 and not delivery.reply.startswith(TAKEN):
            ledger.add_pending(delivery.sequence, delivery.qos)
            others = [
                one for one in delivery.others or () if (ack := parse_ack(one)) is None or ack.consumer not in names
            ]
            delivery.acknowledge_by(TAKEN + b"%d" % delivery.sequence, others or None)


async def consumers_behind(
    head: StreamHead, joining: Promotion, bindings: Sequence[ConsumerBinding]
) -> list[ConsumerBinding]:
    """Return the consumers that have not yet delivered every message up to ``joining.since``."""
    found: list[ConsumerBinding] = []
    for some in parts(bindings):
        passed = await asyncio.gather(*(_passed(head, joining, one) for one in some))
        found += [one for one, done in zip(some, passed, strict=True) if not done]
    return found


async def much_left(inbox: RequestInbox, bindings: Sequence[ConsumerBinding]) -> bool | None:
    """Return whether a consumer has more than `BEHIND_MESSAGES` messages left; None: a consumer does not exist."""
    much = False
    for some in parts(bindings):
        infos = await asyncio.gather(*(consumer_info(inbox, MESSAGES, one.consumer.durable_name) for one in some))
        if None in infos:
            return None
        much |= any(info is not None and info.num_pending > BEHIND_MESSAGES for info in infos)
    return much


async def far_apart(head: StreamHead, bindings: Sequence[ConsumerBinding]) -> bool:
    """Return whether one of several consumers is more than `BEHIND_MESSAGES` sequences behind the furthest one."""
    if len(bindings) == 1:
        return False
    since = max(one.source.last for one in bindings)
    return any(
        since - one.source.last > BEHIND_MESSAGES
        for one in await consumers_behind(head, Promotion([], since), bindings)
    )


async def _passed(head: StreamHead, joining: Promotion, binding: ConsumerBinding) -> bool:
    source = binding.source
    if binding in joining.passed or source.last >= joining.since:
        return True
    # The consumer may be on a replica that lags, and would report nothing left; so the stream's leader is asked.
    start = max(source.last, source.start - 1) + 1
    return await head.beyond(binding.consumer.filter_subject, start, joining.since)


async def bring_rest(live: SharedReaderSessions, member: ReaderSession, joining: Promotion) -> bool:
    """Wait until the consumers have delivered what is left; False: the promotion cannot go on, or gives way."""
    client, side, since, reader = member.client, member.side, joining.since, live.reader
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CONSUMER_REST_MOST_S
    rests = list(joining.bindings)
    # All live subscriptions of the session must have reached `since` first: the position is one number for all.
    while rests or (side.live and reader.position < since):
        if client.crowded:  # a waiting job, such as one more SUBSCRIBE, goes first
            joining.give_way()
        if vain(live, member) or joining.gave_way or loop.time() > deadline:
            return False
        rests = await consumers_behind(live.services.head, joining, rests)
        if rests or (side.live and reader.position < since):
            await asyncio.sleep(ATTACH_POLL_S)
    return not vain(live, member)


def vain(live: SharedReaderSessions, member: ReaderSession) -> bool:
    """Return whether the promotion of a session cannot go on."""
    client, side, joining = member.client, member.side, member.joining
    handlers = live.services.nats.link.handlers
    if joining is not None and any(
        one.missed or handlers.get(one.sid) is not joining.rests.get(one) for one in joining.bindings
    ):
        joining.fail()
    gone = not client.alive or client.durable_side is not side or side.state not in MAY_JOIN
    return gone or (joining is not None and joining.wrong)


def rest(joining: Promotion, binding: ConsumerBinding, handler: Handler) -> Handler:
    """Return a handler that passes on messages up to ``joining.since`` and redeliveries, and drops later messages."""

    def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        ack = parse_ack(reply)
        if ack is None or (ack.stream_seq <= joining.since or ack.delivered > 1):
            handler(subject, reply, headers, payload)
            return
        source = binding.source
        joining.drop()
        if binding in joining.passed:
            return
        if source.follows(ack.consumer_seq) if source.place else ack.consumer_seq == 1:
            joining.passed.add(binding)
        else:
            joining.fail()
        if source.place <= 0:  # if the promotion fails, the next delivery shows that this one is missing
            source.await_delivery(ack.consumer_seq)

    return arrived


def undo(live: SharedReaderSessions, member: ReaderSession, joining: Promotion) -> None:
    """Undo a promotion that has failed: the consumers go on."""
    client, side = member.client, member.side
    if not joining.gave_way:
        live.promote_later(client)
    if not side.live:
        live.remove(client)
    if not client.alive:
        return
    handlers = live.services.nats.link.handlers
    for one in joining.bindings:
        if one.sid in handlers and one in joining.handlers:
            handlers[one.sid] = joining.handlers[one]
    if joining.dropped or joining.wrong:
        client.do(rebind_consumers(client, side))
