# SPDX-License-Identifier: Apache-2.0
"""Answers to questions about the clients of a gateway and their subscriptions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.codec import MqttError, ReasonCode, matches
from mqtt_nats.control.filter_selection import filter_test
from mqtt_nats.control.list_page import ListPage, subscription_order
from mqtt_nats.control.selection import ITEMS_PER_TURN, Refusal, Total, chosen, is_slow, load, sliced
from mqtt_nats.delivery.states import DeliveryState
from mqtt_nats.pubsub.routing_table import PLAIN, Filter
from mqtt_nats.transport.connection import Hold
from mqtt_streams.subjects import subject_to_topic

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.control.server import Control

log = logging.getLogger("mqtt_nats.audit")

PROGRESS_REPORT_S: Final = 5.0
"""Seconds after which a gateway reports that a request is still in progress."""

KICK_RENEWAL_TIMEOUT: Final = 20.0
"""Seconds without renewal by the requester after which a gateway stops disconnecting clients."""

VERSIONS: Final = {3: "3.1", 4: "3.1.1", 5: "5.0"}

HOLDS: Final = {
    Hold.HANDSHAKE: "its CONNECT is being answered",
    Hold.WINDOW: "what it published is not stored yet",
    Hold.NATS: "NATS takes nothing",
    Hold.OUTBOUND: "it does not read what it asked for",
    Hold.JOBS: "it asks for more than is being done",
    Hold.TURN: "it has had its turn",
    Hold.LEASE: "its session may be somebody else's",
    Hold.STANDSTILL: "the gateway process did not run",
    Hold.RATE: "it sends more than its rate",
    Hold.HOOKS: "a hook looks at what it published",
}
"""Texts of the reasons why the gateway does not read from a client."""


CLIENT_ORDERS: Final[Mapping[str, Callable[[Client], Any]]] = {
    "slowest": lambda one: (-one.write_buffer.held, -load(one)[1], one.client_id),
    "client": lambda one: one.client_id,
    "user": lambda one: (one.user or "", one.client_id),
    "since": lambda one: (one.connection.opened, one.client_id),
    "unread": lambda one: (one.write_buffer.held, one.client_id),
    "queued": lambda one: (load(one)[1], one.client_id),
    "inflight": lambda one: (load(one)[0], one.client_id),
    "dropped": lambda one: (one.write_buffer.dropped, one.client_id),
}
"""Orders of a list of clients; `client_order` has the same for their entries."""


def brief(control: Control, client: Client) -> dict[str, Any]:
    """Return the entry of a client in a list; times are Unix times in seconds."""
    connection, write_buffer = client.connection, client.write_buffer
    now = time.time()
    back = now - control.account.services.clock.now
    inflight, queued, window = load(client)
    kept = control.account.kept.age(client)
    return {
        "client": client.client_id,
        "user": client.user,
        "address": connection.peer,
        "listener": control.listener_of(client.access),
        "version": VERSIONS.get(client.version, str(client.version)),
        "since": connection.opened + back,
        "heard": connection.alive + back,
        "keepalive": int(connection.keepalive),
        "durable": client.durable,
        "expiry": client.expiry,
        "subscriptions": len(client.filters) + len(client.shares or ()),
        "inflight": inflight,
        "window": window,
        "queued": queued,
        "unacknowledged_since": None if kept is None else now - kept,
        "unread": write_buffer.held,
        "unread_since": now - (time.monotonic() - write_buffer.since) if write_buffer.clogged else None,
        "stalled": client.durable_side is not None and client.durable_side.stalled,
        "slow": is_slow(client),
        "dropped": write_buffer.dropped,
        "unstored": len(client.receipts),
    }


async def _clients(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """Yield the number of clients, and the first ones in an order: ``most`` of them, 0 = all."""
    fits = chosen(control, question)
    order = CLIENT_ORDERS.get(str(question.get("sort")), CLIENT_ORDERS["slowest"])
    page = ListPage(0, int(question.get("most") or 0), order, reverse=bool(question.get("reverse")))
    async for client in sliced(list(control.account.registry.clients.values())):
        if fits(client):
            page.add(client)
    yield Total(page.total)
    async for client in sliced(page.entries()):
        yield brief(control, client)


async def _connected(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    fits = chosen(control, question)
    async for client in sliced(list(control.account.registry.clients.values())):
        if fits(client):
            yield _loaded(client) if question.get("loads") else client.client_id


def _loaded(client: Client) -> dict[str, Any]:
    """Return the numbers of messages in memory for a client, and the sequence that its catch-up has reached, if any."""
    inflight, queued, _ = load(client)
    side = client.durable_side
    taken = None
    if side is not None and side.state is DeliveryState.CATCHING_UP:
        taken = client.delivery.feed.reached(side)
    return {"value": client.client_id, "inflight": inflight, "queued": queued, "taken": taken}


async def _client(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    client = control.account.registry.find(str(question.get("client")))
    if client is None or not client.alive:
        return
    will, guard = client.will, client.guarded
    holds = client.connection.holds
    yield brief(control, client) | {
        "epoch": client.epoch,
        "will": None if will is None else subject_to_topic(will.subject),
        "ruled": guard is not None,
        "not_read_from": [text for bit, text in HOLDS.items() if holds & bit],
    }
    for one in _subscriptions_of(client):
        yield one


def _subscriptions_of(client: Client) -> list[dict[str, Any]]:
    found = []
    for each, qos in client.filters.items():
        options = PLAIN if client.options is None else client.options.get(each, PLAIN)
        found.append(_subscription(client, each.text, qos, *options))
    for text, share in (client.shares or {}).items():
        source = share.source
        found.append(_subscription(client, text, source.qos, False, source.kept, source.identifier))
    return found


def _subscription(client: Client, text: str, qos: int, nl: bool, rap: bool, identifier: int | None) -> dict[str, Any]:
    return {
        "client": client.client_id,
        "filter": text,
        "qos": qos,
        "no_local": nl or client.bridge,
        "retain_as_published": rap or client.bridge,
        "identifier": identifier,
    }


async def _subscriptions(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """Yield the number of subscriptions, and the first ones in an order: ``most`` of them, 0 = all."""
    fits, wanted = chosen(control, question), filter_test(question)
    order = subscription_order(str(question.get("sort") or "filter"))
    page = ListPage(0, int(question.get("most") or 0), order, reverse=bool(question.get("reverse")))
    known: dict[str, bool] = {}
    async for client in sliced(list(control.account.registry.clients.values())):
        if fits(client):
            for one in _subscriptions_of(client):
                text = one["filter"]
                if text not in known:
                    known[text] = wanted(text)
                if known[text]:
                    page.add(one)
    yield Total(page.total)
    for one in page.entries():
        yield one


async def _groups(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """Yield the shared subscriptions, each with the number of its members that are connected here."""
    members: Counter[str] = Counter()
    async for client in sliced(list(control.account.registry.clients.values())):
        if client.alive:
            members.update(list(client.shares or ()))
    for text, count in members.items():
        yield {"filter": text, "members": count}


async def _topics(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    wanted = question.get("filter") or "#"
    async for route in sliced(list(control.account.services.path.table.routes.values())):
        if matches(wanted, route.topic):
            yield route.topic


async def _filters(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """Yield the filters with the number of their clients, and whether NATS denies the subscription to the gateway."""
    filters: list[Filter] = list(control.account.services.path.table.filters.values())
    async for found in sliced(filters):
        yield {"filter": found.text, "clients": len(found.members), "denied": found.denied}


async def _kick(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    names = ("clients", "match", "user", "address", "listener", "slow", "everybody")
    if not any(question.get(name) for name in names):
        raise Refusal("no client is selected")
    fits = chosen(control, question)
    found = [client async for client in sliced(list(control.account.registry.clients.values())) if fits(client)]
    yield Total(len(found))
    if question.get("dry_run"):
        for client in found:
            yield client.client_id
        return
    why = str(question.get("reason") or "disconnected by an administrator")
    error = MqttError(why, ReasonCode.ADMINISTRATIVE_ACTION)
    pause = float(question.get("over") or 0.0) / max(len(found), 1)
    name = str(question.get("kick") or "") if pause else ""
    clock = asyncio.get_running_loop().time
    if found:
        log.warning("%d clients are disconnected: %s", len(found), why)
    if name:
        control.kicks[name] = clock() + KICK_RENEWAL_TIMEOUT
    try:
        for number, client in enumerate(found, 1):
            if client.alive:
                client.end_connection(error)
                yield client.client_id
            due = clock() + pause
            while pause and (left := due - clock()) > 0:
                await asyncio.sleep(min(left, PROGRESS_REPORT_S))
                if name and clock() > control.kicks[name]:
                    text = "the command that disconnects clients has ended: %d clients stay connected"
                    log.warning(text, len(found) - number)
                    return
                if left > PROGRESS_REPORT_S:
                    yield Total(len(found))  # otherwise the requester would consider the gateway gone
            if not pause and not number % ITEMS_PER_TURN:
                await asyncio.sleep(0)
    finally:
        control.kicks.pop(name, None)


async def _kicking(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """Renew or stop a `_kick` that disconnects clients one after the other."""
    name = str(question.get("kick"))
    known = name in control.kicks
    if known:
        control.kicks[name] = 0.0 if question.get("stop") else asyncio.get_running_loop().time() + KICK_RENEWAL_TIMEOUT
    yield {"known": known}


ANSWERS: Final = {
    "clients": _clients,
    "client": _client,
    "connected": _connected,
    "subscriptions": _subscriptions,
    "topics": _topics,
    "filters": _filters,
    "groups": _groups,
    "kick": _kick,
    "kicking": _kicking,
}
