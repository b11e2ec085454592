# SPDX-License-Identifier: Apache-2.0
"""What answers to questions have in common: which clients are meant, and turns for others in between."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from fnmatch import translate
from re import compile as compile_pattern
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from mqtt_nats.base.networks import parse_host, parse_network

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.control.server import Control

T = TypeVar("T")

SLICE: Final = 200
"""Clients, or whatever is walked through, before everything else of the gateway has a turn."""


class Refusal(Exception):
    """A question cannot be answered; one line that says why."""


class Total(NamedTuple):
    """How many items an answer is going to have; given before them."""

    items: int


async def sliced(things: Iterable[T]) -> AsyncIterator[T]:
    """All of them, with turns for others in between. What may change meanwhile has to be a copy."""
    for number, one in enumerate(things, 1):
        yield one
        if not number % SLICE:
            await asyncio.sleep(0)


def chosen(control: Control, question: dict[str, Any]) -> Callable[[Client], bool]:
    """Whether a client is one of those that a question is about: all of what it says must be so.

    Raises:
        Refusal: it names a network that is none.
    """
    tests: list[Callable[[Client], bool]] = []
    if names := frozenset(question.get("clients") or ()):
        tests.append(lambda client: client.client_id in names)
    if match := question.get("match"):
        fits = compile_pattern(translate(match)).fullmatch
        tests.append(lambda client: fits(client.client_id) is not None)
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
        # `tcp://` may be left out, and the rest is as the list of clients has it.
        tests.append(lambda client: control.listener_of(client.access) == listener.removeprefix("tcp://"))
    if question.get("slow"):
        tests.append(is_slow)
    return lambda client: client.alive and bool(client.client_id) and all(test(client) for test in tests)


def load(client: Client) -> tuple[int, int, int]:
    """Messages in flight to a client, those that wait for a place there, and how many places there are."""
    side, regular = client.durable_side, client.regular_side
    if side is not None:
        machine = side.machine
        places = sum(one.consumer.max_ack_pending for one in side.attachments.values())
        window = min(machine.limit, places) if places else machine.limit
        return len(machine.inflight) + machine.released, len(machine.queued), window
    if regular is not None:
        return len(regular.inflight), regular.waiting, regular.limit
    return 0, 0, 0


def is_slow(client: Client) -> bool:
    """Whether a client does not take what is there for it: it does not read, or does not acknowledge."""
    side = client.durable_side
    if client.outlet.clogged or (side is not None and side.stall is not None):
        return True
    inflight, queued, window = load(client)
    if queued > 0 or (window > 0 and inflight >= window):
        return True
    if side is None or not inflight:
        return False
    # All places of one subscription may be taken, and those of others free.
    taken = Counter(delivery.source for delivery in side.machine.inflight.values())
    return any(taken[one.source] >= one.consumer.max_ack_pending for one in side.attachments.values())
