# SPDX-License-Identifier: Apache-2.0
"""A session on its way from its own consumers to the shared reader."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.batch import AT_ONCE, parts
from mqtt_nats.protocol.ack_tokens import TAKEN
from mqtt_nats.sessions.record import save_record
from mqtt_nats.sessions.stream_head import beyond
from mqtt_streams.consumers import consumer_info, parse_ack
from mqtt_streams.messages import STREAM as MESSAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mqtt_nats.backbone.link import Handler
    from mqtt_nats.client.client import Client
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.gateway.broker import Broker
    from mqtt_nats.messages.message import Stored
    from mqtt_nats.protocol.durable_sender import DurableSender
    from mqtt_nats.protocol.position import SessionPosition
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding

KEPT_BACK: Final = 10_000
"""Messages that are kept back for a session meanwhile, at most."""

JOINING_MOST: Final = 1024
"""Subscriptions of sessions that become live at the same time: nats-server drops all requests when 10,000 wait."""

BEHIND: Final = 1000
"""With more left to bring a session becomes live where its consumers are, and reads that by itself."""

RETRY_FIRST: Final = 2.0
RETRY_MOST: Final = 60.0
"""Seconds until a session that has fallen behind may be live again, doubled each time."""


class Promotion:
    """A session of which some subscriptions are about to be live."""

    __slots__ = (
        "attachments",
        "behind",
        "dropped",
        "gave_way",
        "handlers",
        "kept",
        "passed",
        "rests",
        "since",
        "wrong",
    )

    def __init__(self, attachments: list[ConsumerBinding], since: int, behind: bool = False) -> None:
        self.attachments = attachments
        self.since = since
        self.behind = behind
        """There is much after that which the shared reader does not bring."""
        self.kept: list[tuple[int, Stored]] = []
        self.passed: set[ConsumerBinding] = set()
        self.handlers: dict[ConsumerBinding, Handler] = {}
        """What has handled what a consumer brings."""
        self.rests: dict[ConsumerBinding, Handler] = {}
        """What handles it until the reader's messages count."""
        self.dropped = False
        self.gave_way = False
        """Something else was to be done for the client; the next attempt may follow at once."""
        self.wrong = False

    def keep_back(self, sequence: int, message: Stored) -> None:
        """The reader has brought a message that is this session's once it is live."""
        if sequence > self.since:
            self.kept.append((sequence, message))
            if len(self.kept) > KEPT_BACK:
                self.wrong = True
                self.kept.clear()


class Member:
    """A session in the index of the shared reader."""

    __slots__ = ("_wait", "client", "filters", "joining", "renewal", "retry", "side")

    def __init__(self, client: Client, side: DurableDelivery) -> None:
        self.client = client
        self.side = side
        self.filters: list[str] = []
        self.joining: Promotion | None = None
        self.retry = 0.0
        """Loop time before which it does not become live."""
        self.renewal = math.inf
        """Loop time at which its dormant consumers are to be used again, so that they are not taken for forgotten."""
        self._wait = RETRY_FIRST

    def put_off(self, now: float) -> None:
        """Leave it to its consumers for a while, each time for longer."""
        self.retry = now + self._wait
        self._wait = min(self._wait * 2, RETRY_MOST)

    def kept_up(self) -> None:
        """It is live: the next time it falls behind is the first one."""
        self._wait = RETRY_FIRST


class PromotionLimit:
    """Which sessions become live at the same time, and which are next."""

    def __init__(self, begin: Callable[[Client], None]) -> None:
        self._begin = begin
        self._at_it: dict[Client, int] = {}
        """With how many of their subscriptions something is asked about at a time."""
        self._asked = 0
        self._waiting: dict[Client, None] = {}

    def __contains__(self, client: Client) -> bool:
        return client in self._at_it

    def take(self, client: Client, subscriptions: int) -> bool:
        """Whether a session may begin now; if not, ``begin`` is called when it is its turn."""
        if self._asked >= JOINING_MOST:
            self._waiting[client] = None
            return False
        self._at_it[client] = several = min(subscriptions, AT_ONCE)
        self._asked += several
        return True

    def end(self, client: Client) -> None:
        """A session is live, or does not become it: the next one."""
        self._waiting.pop(client, None)
        self._asked -= self._at_it.pop(client, 0)
        while self._waiting and self._asked < JOINING_MOST:
            following = next(iter(self._waiting))
            del self._waiting[following]
            self._begin(following)


def settled(client: Client) -> bool:
    """Whether a session is open, and nothing about it is under way."""
    return client.greeted and client.alive and not client.sent_disconnect and client._task is None


async def name_position(client: Client) -> None:
    """Name the session's position in its record, where the session has begun while there could be none.

    Raises:
        ApiError: the record cannot be stored.
        Conflict: the session belongs to somebody else.
    """
    record = client.record
    assert record is not None
    assert record.v5 is not None
    if not record.v5.pos:
        record.v5.pos = client.broker.new_nuid()
        try:
            await save_record(client, client.epoch)
        except BaseException:
            record.v5.pos = ""
            raise


def consumer_of(reply: bytes) -> str:
    """The consumer that an acknowledgement subject is of."""
    ack = parse_ack(reply)
    return "" if ack is None else ack.consumer


def take_over(joining: Promotion, machine: DurableSender, ledger: SessionPosition) -> None:
    """What consumers have brought, and is on its way, is pending in the session's position from now on."""
    names = {one.consumer.durable_name for one in joining.attachments}
    sources = {one.source for one in joining.attachments}
    for delivery in machine.on_their_way():
        if delivery.source in sources and delivery.sequence > 0 and not delivery.reply.startswith(TAKEN):
            ledger.take(delivery.sequence, delivery.qos)
            others = [one for one in delivery.others or () if consumer_of(one) not in names]
            delivery.reply = TAKEN + b"%d" % delivery.sequence
            delivery.others = others or None


async def left(broker: Broker, joining: Promotion, attachments: Sequence[ConsumerBinding]) -> list[ConsumerBinding]:
    """Those consumers that have yet to bring something of what is before the one that takes over."""
    found: list[ConsumerBinding] = []
    for some in parts(attachments):
        passed = await asyncio.gather(*(_passed(broker, joining, one) for one in some))
        found += [one for one, done in zip(some, passed, strict=True) if not done]
    return found


async def much_left(broker: Broker, attachments: Sequence[ConsumerBinding]) -> bool | None:
    """Whether a consumer has much left to bring; None: one of them is gone."""
    much = False
    for some in parts(attachments):
        infos = await asyncio.gather(
            *(consumer_info(broker.inbox, MESSAGES, one.consumer.durable_name) for one in some)
        )
        if None in infos:
            return None
        much |= any(info is not None and info.num_pending > BEHIND for info in infos)
    return much


async def far_apart(broker: Broker, attachments: Sequence[ConsumerBinding]) -> bool:
    """Whether one of several consumers would take long to bring what the others have passed."""
    if len(attachments) == 1:
        return False
    since = max(one.source.last for one in attachments)
    return any(since - one.source.last > BEHIND for one in await left(broker, Promotion([], since), attachments))


async def _passed(broker: Broker, joining: Promotion, attachment: ConsumerBinding) -> bool:
    source = attachment.source
    if attachment in joining.passed or source.last >= joining.since:
        return True
    # The consumer may be on a server that has not all of it yet, and would say that it has nothing left.
    start = max(source.last, source.start - 1) + 1
    return await beyond(broker, attachment.consumer.filter_subject, start, joining.since)


def rest(joining: Promotion, attachment: ConsumerBinding, handler: Handler) -> Handler:
    """A handler that takes what a consumer brings up to where the reader begins."""

    def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        ack = parse_ack(reply)
        if ack is None or (ack.stream_seq <= joining.since or ack.delivered > 1):
            handler(subject, reply, headers, payload)
            return
        source = attachment.source
        joining.dropped = True
        if attachment in joining.passed:
            return
        if source.follows(ack.consumer_seq) if source.place else ack.consumer_seq == 1:
            joining.passed.add(attachment)
        else:
            joining.wrong = True
        if source.place <= 0:  # if the session does not become live, what comes next shows that this one is missing
            source.place = ack.consumer_seq

    return arrived
