# SPDX-License-Identifier: Apache-2.0
"""End of subscriptions of a regular session that overlap other subscriptions of the same client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from functools import partial
from typing import TYPE_CHECKING

from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.protocol.overlap import patterns_meet
from mqtt_nats.pubsub.filter_handover import Parting

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.pubsub.routing_table import Filter


async def part(client: Client, filters: Set[str], end: Callable[[Client, Set[str]], Awaitable[None]]) -> None:
    """End subscriptions by ``end``; overlapping ones then serve the client, and no message is lost or doubled.

    Raises:
        Conflict, ApiError: as ``end`` does.
    """
    ending = {found for found in client.filters if found.text in filters}
    if client.durable or not _overlapped(client, ending):
        await end(client, filters)
        return
    parting = Parting(client.broker.table, client, ending)
    try:
        await retry_until_answered(client, partial(_passed, client))
        parting.keep()
        await retry_until_answered(client, partial(_passed, client))
        await end(client, filters)
        parting.end()
        await retry_until_answered(client, partial(_passed, client))
    finally:
        parting.finish()


async def _passed(client: Client) -> None:
    """Wait for the messages on their way through NATS to the client, and for those that a lost connection has missed.

    Raises:
        TimeoutError: some of these messages have not come yet.
    """
    await client.broker.nodes.fence_filters(client.filters)
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
