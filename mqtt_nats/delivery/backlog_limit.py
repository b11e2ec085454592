# SPDX-License-Identifier: Apache-2.0
"""Limit of the messages that wait for an absent client: of more than ``max_backlog``, the oldest are not sent.

See docs/internals/delivery.md#too-much-for-an-absent-client.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.batch import in_turn
from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.stored import count_from

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding

log = logging.getLogger("mqtt_nats.broker")

SENT_MOST: Final = 10_000
"""Most messages that a dead gateway may have sent and that are sent again instead of being passed over."""

WARNING: Final = "%s: one subscription exceeds max_backlog: its oldest %d messages are not sent"


async def limit_backlog(client: Receiver, side: DurableDelivery) -> None:
    """Have readers pass over the oldest messages of each subscription with more than `max_backlog`; before they begin.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not say how many messages wait.
    """
    most, position_writer = client.services.settings.max_backlog, side.position_writer
    if most is not None and position_writer is not None:
        limit = partial(_limit, client, side, position_writer.ledger.reached, most)
        concerned = [one for one in side.bindings.values() if not one.source.ended]
        await in_turn([partial(retry_until_answered, client, partial(limit, one)) for one in concerned])


async def _limit(client: Receiver, side: DurableDelivery, reached: int, most: int, binding: ConsumerBinding) -> None:
    inbox, subject = client.services.nats.inbox, binding.consumer.filter_subject
    reached = max(reached, binding.since)
    waiting = await count_from(inbox, MESSAGES, subject, reached + 1)
    if waiting <= most:
        return
    last = int((await client.services.head.state())["last_seq"])

    async def leaving(number: int) -> int:
        """Return the least sequence after which no more than so many messages wait."""
        low, high = reached, last
        while high - low > 1:
            middle = (low + high) // 2
            if await count_from(inbox, MESSAGES, subject, middle + 1) > number:
                low = middle
            else:
                high = middle
        return high

    until = await leaving(most)
    sent, kept = min(side.machine.perhaps_sent, until), 0  # a dead gateway may have sent the oldest
    if sent > reached:
        kept = min(SENT_MOST, waiting - await count_from(inbox, MESSAGES, subject, sent + 1))
        sent = await leaving(waiting - kept)
    left = max(waiting - most - kept, 0)
    log.warning(WARNING, client, left)
    client.services.counters.pass_over(left)
    binding.pass_over(sent, until)
