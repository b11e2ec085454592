# SPDX-License-Identifier: Apache-2.0
"""Common parts of the answers to questions: selection of clients, and walking in slices."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from mqtt_nats.base.networks import parse_host, parse_network
from mqtt_nats.control.filter_selection import pattern_test

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.control.server import Control

T = TypeVar("T")

ITEMS_PER_TURN: Final = 200
"""Clients or other items after which `sliced` gives way to the other tasks of the gateway."""


CONNECTED: Final = "the client is connected"
"""Reason why a session is not ended: its client is connected to this gateway."""
RECONNECTED: Final = "the client has connected meanwhile"
"""Reason why a session is not ended: its record was written since it was read."""


class Refusal(Exception):
    """A question cannot be answered; the text is one line with the reason."""


class Total(NamedTuple):
    """Number of items that an answer will have; yielded before the items."""

    items: int


async def sliced(things: Iterable[T]) -> AsyncIterator[T]:
    """Yield all items, and give way to other tasks after each slice. A collection that may change has to be copied."""
    for number, one in enumerate(things, 1):
        yield one
        if not number % ITEMS_PER_TURN:
            await asyncio.sleep(0)


def chosen(control: Control, question: dict[str, Any]) -> Callable[[Client], bool]:
    """Return a function that tells whether a client meets all criteria of a question.

    Raises:
        Refusal: the address in the question is no network.
    """
    tests: list[Callable[[Client], bool]] = []
    if names := frozenset(question.get("clients") or ()):
        tests.append(lambda client: client.client_id in names)
    if match := question.get("match"):
        fits = pattern_test(match)
        tests.append(lambda client: fits(client.client_id))
    if user := question.get("user"):
        tests.append(lambda client: client.user == user)
    if address := question.get("address"):
        try:
            network = parse_network(address)
        except ValueError as error:
            raise Refusal(str(error)) from None

        def near(client: Client) -> bool:
            host = parse_host(client.connection.host)
            return host is not None and host.version == network.version and host in network

        tests.append(near)
    if listener := question.get("listener"):
        # `tcp://` may be omitted; the rest has the form of the list of clients.
        tests.append(lambda client: control.listener_of(client.access) == listener.removeprefix("tcp://"))
    if question.get("slow"):
        tests.append(is_slow)
    return lambda client: client.alive and bool(client.client_id) and all(test(client) for test in tests)


def load(client: Client) -> tuple[int, int, int]:
    """Return the numbers of messages in flight, of messages that wait for a place in the window, and of its places."""
    side, regular = client.durable_side, client.regular_side
    if side is not None:
        machine = side.machine
        places = sum(one.consumer.max_ack_pending for one in side.bindings.values())
        window = min(machine.limit, places) if places else machine.limit
        return len(machine.inflight) + machine.released, len(machine.queued), window
    if regular is not None:
        return len(regular.inflight), regular.waiting, regular.limit
    return 0, 0, 0


def is_slow(client: Client) -> bool:
    """Whether messages wait for a client because it does not read or does not acknowledge."""
    side = client.durable_side
    if client.write_buffer.clogged or (side is not None and side.stalled):
        return True
    inflight, queued, window = load(client)
    if queued > 0 or (window > 0 and inflight >= window):
        return True
    if side is None or not inflight:
        return False
    # The window of one subscription may be full while the windows of other subscriptions have places.
    taken = Counter(delivery.source for delivery in side.machine.inflight.values())
    return any(taken[one.source] >= one.consumer.max_ack_pending for one in side.bindings.values())
