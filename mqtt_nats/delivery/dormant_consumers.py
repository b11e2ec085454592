# SPDX-License-Identifier: Apache-2.0
"""Dormant consumers: they show each durable subscription, and the backlog of an absent client, to NATS tools.

No gateway delivers through them; nats-server's listener does, if the client connects there. While the client is
connected here they deliver to nobody. When the connection ends they are set to the session's position
(`position_handover`). One that is missing or wrong loses or doubles no message for a gateway: the position decides.
See docs/internals/delivery.md#consumers.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.batch import all_done, in_turn, parts
from mqtt_nats.sessions.paused_consumers import resume
from mqtt_nats.sessions.pubrel_consumer import create_again
from mqtt_nats.sessions.record import claimed
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.consumers import (
    NOT_CHANGED,
    ConsumerExists,
    ConsumerNotFound,
    ConsumerRef,
    backstop,
    create_consumer,
    delete_consumer,
    describe,
    existing_consumer,
    update_consumer,
)
from mqtt_streams.fields import is_literal
from mqtt_streams.messages import DELIVER_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.protocol.position import SessionPosition
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding
    from mqtt_streams.api import JetStream

log = logging.getLogger("mqtt_nats.broker")

RENEWED_NS: Final = 1_000_000_000
"""Nanoseconds by which a renewal changes the inactive threshold of a dormant consumer."""


def first_incomplete(position: SessionPosition) -> int:
    """Return the first stream sequence of a message that the client has not completed, as far as it is stored."""
    return min([*position.pending, position.reached + 1])


async def set_consumers(js: JetStream, consumers: Iterable[tuple[str, int]], first: int) -> None:
    """Set dormant consumers to a stream sequence, so that they show the messages that are left for the client.

    One that is gone, or cannot be set, stays as it is.

    Args:
        consumers: names, each with the first stream sequence of its subscription.

    Raises:
        NoResponders: JetStream does not answer.
    """
    await all_done(_set(js, name, max(first, start)) for name, start in consumers)


async def _set(js: JetStream, name: str, sequence: int) -> None:
    try:
        await call(js, f"CONSUMER.RESET.{MESSAGES}.{name}", {"seq": sequence})
    except (ApiError, RequestTimeout) as error:  # nats-server does not answer where the consumer is gone
        log.debug("consumer %s is not set: %s", name, error)


async def follow_position(client: Receiver, side: DurableDelivery, first: int) -> None:
    """Set the dormant consumers of a connected client, which nats-server's listener might take over.

    Args:
        first: stream sequence to which they are set.
    """
    kept = [(one.consumer.durable_name, one.source.start) for one in side.bindings.values() if not one.removed]
    for some in parts(kept):
        if not client.alive or client.taken:  # else the consumers are the next owner's
            return
        try:
            await set_consumers(client.services.nats.inbox, some, first)
        except NoResponders as error:
            log.debug("%s: its consumers keep their positions: %s", client, error)


async def remove_dormant(client: Receiver, side: DurableDelivery) -> None:
    """Delete the dormant consumers of a session; the stored position replaces them.

    Nobody takes their deletion for a loss, since the registry of attached consumers does not have them any more.
    """
    position_writer = side.position_writer
    services = client.services
    for some in parts([one for one in side.bindings.values() if not one.removed]):
        if position_writer is None or not client.alive:
            return
        for one in some:
            one.remove()
            services.registry.attached.pop(one.consumer.durable_name, None)
        names = [one.consumer.durable_name for one in some]
        try:
            await all_done(delete_consumer(services.nats.inbox, MESSAGES, name) for name in names)
            position_writer.miss_consumers(names)
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("%s: dormant consumers may stay: %s", client, error)


async def renew_dormant(client: Receiver, side: DurableDelivery) -> None:
    """Change dormant consumers a little: nats-server removes consumers that are not used for long."""
    _, v5 = claimed(client.record)
    threshold = backstop(v5.expiry)
    for one in list(side.bindings.values()):
        if threshold and not one.removed:
            other = threshold if one.consumer.inactive_threshold != threshold else threshold + RENEWED_NS
            one.reconfigure(replace(one.consumer, inactive_threshold=other))
            try:
                await update_consumer(client.services.nats.inbox, MESSAGES, one.consumer)
            except NOT_CHANGED as error:
                log.debug("consumer %s: %s", one.consumer.durable_name, error)  # created again when it is needed


async def check_dormant(client: Receiver, side: DurableDelivery) -> None:
    """Give the dormant consumers of a resumed session its present expiry; create those again that are gone."""
    _, v5 = claimed(client.record)
    threshold = backstop(v5.expiry)
    kept = [one for one in side.bindings.values() if not one.removed]
    await in_turn([partial(_check, client, side, one, threshold) for one in kept])


async def create_dormant(client: Receiver, side: DurableDelivery) -> bool:
    """Create the consumers of a session that needs none, to lie dormant; False: the session has moved.

    The position names them before: this gateway may die before the record says that they exist.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not do it.
    """
    position_writer, services = side.position_writer, client.services
    _, v5 = claimed(client.record)
    # Some may exist: an earlier gateway may have died after it had created them, or before.
    bindings = list(side.bindings.values())
    assert position_writer is not None
    position_writer.expect_consumers(one.consumer.durable_name for one in bindings)
    if not await position_writer.flush():
        position_writer.end_if_moved()
        return False
    await in_turn([partial(_check, client, side, one, backstop(v5.expiry)) for one in bindings])
    if not client.alive:  # the position names those that were created
        return False
    for one in bindings:
        one.lie_dormant()
        services.registry.attached[one.consumer.durable_name] = client
    v5.move_to_consumers()
    side.change_record()
    return True


async def _check(client: Receiver, side: DurableDelivery, one: ConsumerBinding, threshold: int) -> None:
    """Put a consumer right, or create it; one for which JetStream does not do it stays until the next resume."""
    try:
        await _put_right(client, side, one, threshold)
    except NOT_CHANGED as error:
        log.debug("consumer %s: %s", one.consumer.durable_name, error)


async def _put_right(client: Receiver, side: DurableDelivery, one: ConsumerBinding, threshold: int) -> None:
    inbox, name = client.services.nats.inbox, one.consumer.durable_name
    if not client.alive or side.bindings.get(name) is not one:
        return  # the subscription has ended meanwhile
    found = await existing_consumer(inbox, MESSAGES, name, client.client_id)
    if found is None and client.services.stream.crowded:
        return  # readers need its place
    if found is None:
        wanted = replace(one.consumer, start_seq=_oldest_pending(side, one), inactive_threshold=threshold)
        with suppress(ConsumerExists):
            await create_consumer(inbox, MESSAGES, wanted)
    elif _has_to_be_made_again(side, one, found):
        wanted = await _make_settable(client, side, replace(one.consumer, inactive_threshold=threshold))
    else:
        if found.paused:
            await resume(inbox, MESSAGES, name)
        kept = threshold if found.inactive_threshold != threshold + RENEWED_NS else found.inactive_threshold
        # What somebody has edited does not count, except the deliver subject, which the record then names.
        wanted = replace(
            one.consumer,
            deliver_subject=found.deliver_subject,
            start_seq=found.start_seq,
            inactive_threshold=kept,
            num_replicas=found.num_replicas,
            client_id=client.client_id,
        )
        described = describe(client.client_id, wanted.filter_subject)
        if replace(wanted, max_ack_pending=found.max_ack_pending, extra={}) != found or found.description != described:
            with suppress(ConsumerNotFound):
                await update_consumer(inbox, MESSAGES, wanted)
        if wanted == one.consumer:
            return
    side.reconfigure(one, wanted)


def _has_to_be_made_again(side: DurableDelivery, one: ConsumerBinding, found: ConsumerRef) -> bool:
    """Whether a consumer cannot be set to the session's position, or delivers to a subject that is not of a client.

    It is a pull consumer, begins later, or begins with new messages: as those of nats-server's listener do.
    """
    settable = found.start_seq is not None and found.start_seq <= _oldest_pending(side, one)
    return not settable or not found.deliver_subject.startswith(DELIVER_PREFIX) or not is_literal(found.deliver_subject)


def _oldest_pending(side: DurableDelivery, binding: ConsumerBinding) -> int:
    """Return the first stream sequence that a dormant consumer has to bring, should it have to deliver."""
    side.settle()
    pending = side.position_writer.ledger.pending if side.position_writer is not None else {}
    first: int = min([*pending, binding.source.last + 1])
    return max(first, binding.source.start, 1)


async def _make_settable(client: Receiver, side: DurableDelivery, consumer: ConsumerRef) -> ConsumerRef:
    """Make a dormant consumer again that cannot be set, such as those of nats-server's listener."""
    attached = client.services.registry.attached
    made = replace(consumer, start_seq=_oldest_pending(side, side.bindings[consumer.durable_name]))
    attached.pop(consumer.durable_name, None)  # its deletion is no loss
    try:
        await delete_consumer(client.services.nats.inbox, MESSAGES, consumer.durable_name)
        await create_again(client.services.nats.inbox, MESSAGES, made)
    finally:
        attached[consumer.durable_name] = client
    return made
