# SPDX-License-Identifier: Apache-2.0
"""New subscriptions of a durable session: readers serve them from the start.

The session gets no message until its position is stored for the new subscriptions, too. So the position, which is one
number for all subscriptions, passes no message of a new one. See docs/internals/shared_reader.md#new-subscriptions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.delivery.position_recovery import limit_in_flight
from mqtt_nats.delivery.resume import keep_taken
from mqtt_nats.protocol.ack_tokens import TAKEN
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.record import save_record
from mqtt_nats.shared_reader.index import shown
from mqtt_nats.shared_reader.reader_session import ReaderHandover, ReaderSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding
    from mqtt_nats.shared_reader.catch_up import CatchUpReader
    from mqtt_nats.shared_reader.sessions import SharedReaderSessions


async def subscribe(
    live: SharedReaderSessions, member: ReaderSession, place: int, put: Callable[[], list[ConsumerBinding]]
) -> list[ConsumerBinding]:
    """Begin new subscriptions of a session, and return them; its position is stored before the record names them.

    Args:
        place: stream sequence after which the session begins, if no subscription of it is served yet.
        put: puts the subscriptions into the session and its record; returns them.

    Raises:
        Conflict: the session belongs to another connection.
        ApiError, QuotaExceeded: JetStream refuses a request, or does not store the record, or the position.
    """
    client, side, position_writer = member.client, member.side, member.side.position_writer
    assert position_writer is not None
    position_writer.ledger.reach(live.reached(side) if side.bindings else place)
    # A session that is stalled by now goes on with readers when its client reads again.
    reader = _keep_place(live, member) if side.live else None
    added = put()
    position_writer.live.update(one.consumer.durable_name for one in added)
    try:
        for one in added:
            await _take_passed(live, member, one, position_writer.ledger.reached)
        await keep_taken(client)
        await save_record(client, client.epoch)
    finally:
        if not position_writer.lost:
            if reader is not None:
                reader.begin()
            if side.live:
                let_go(live, side, added)
    return added


def _keep_place(live: SharedReaderSessions, member: ReaderSession) -> CatchUpReader:
    """Stop at the session's place in the stream; the reader that is returned goes on from there when it begins."""
    client, side, position_writer = member.client, member.side, member.side.position_writer
    assert position_writer is not None
    missed = False
    if (catching := live.catching.get(side)) is not None:
        missed = catching.reads
        live.end_catching(side)
        if member.end_handover() is not None:
            live.remove(client)
    else:
        member.begin_handover(ReaderHandover(position_writer.ledger.reached))
    return live.catch_up(member, position_writer.ledger.reached, missed=missed)


async def _take_passed(live: SharedReaderSessions, member: ReaderSession, added: ConsumerBinding, reached: int) -> None:
    """Give a session the messages of a new subscription that the session's place has passed; there are rarely any."""
    services, client = live.services, member.client
    start = added.source.start
    while start <= reached:
        ask = partial(services.head.following, added.consumer.filter_subject, start)
        found = await retry_until_answered(client, ask)
        if found is None or found.seq > reached:
            return
        start = found.seq + 1
        subject = found.subject.encode("utf-8", "surrogateescape")
        stamp = b"%d" % found.time_ns
        message = services.path.recent.message(found.seq, stamp, subject, found.headers, found.payload)
        if message.qos and shown(message.subject):
            live.put_through(member, found.seq, message, TAKEN + b"%d" % found.seq, {added.source})


def let_go(live: SharedReaderSessions, side: DurableDelivery, begun: list[ConsumerBinding]) -> None:
    """Let the messages of subscriptions go that readers serve from the start."""
    limit_in_flight(side)
    if side.client in live.registry.unchecked:
        return  # NATS was lost meanwhile: new messages wait until the session is known to be this gateway's still
    for one in begun:
        side.machine.drop_hold(one.source, SubscriptionState.RETURNING)
