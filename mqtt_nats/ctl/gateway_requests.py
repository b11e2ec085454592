# SPDX-License-Identifier: Apache-2.0
"""Asking gateways: all that run, by their leases, each answering in as many messages as it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from mqtt_nats.backbone.inbox import NO_RESPONDERS, RequestInbox
from mqtt_nats.ctl.verb import Arguments, Refused, Verb
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.gateway_subjects import ASK, WHO
from mqtt_streams.gateways import GatewayStore

PATIENCE: Final = 10.0
"""Seconds for which nobody says anything before those that have not answered are given up."""

UNKNOWN: Final = 1.0
"""Seconds in which gateways answer whose number is not known, because JetStream does not tell it."""

PRESENT: Final = 3.0
"""Seconds in which gateways say that they are there."""

WORKING: Final = 25.0
"""Seconds that a gateway has for reading its files, or for loading a plugin."""

LISTS: Final = "`mqtt-nats ctl cluster status` lists them"

Progress = Callable[[int, int | None], None]
"""Told how much is done, and of how much, where that is known."""

PROGRESS: Final[ContextVar[Progress | None]] = ContextVar("mqtt_nats_progress", default=None)


def progress(done: int, total: int | None = None) -> None:
    """Tell who looks on how far it is."""
    told = PROGRESS.get()
    if told is not None:
        told(done, total)


@dataclass(slots=True)
class Answers:
    """What gateways have said. Every item names its ``gateway``."""

    items: list[dict[str, Any]] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    """Gateways that hold a lease and have not answered, or not to the end."""
    heard: set[str] = field(default_factory=set)


class Known(NamedTuple):
    """What leases say: the gateways that hold one, and those whose lease has lapsed and that may run all the same."""

    live: set[str]
    lapsed: set[str]


async def known(inbox: RequestInbox) -> Known | None:
    """The gateways that are registered; None: JetStream does not tell, or no gateway has ever run."""
    try:
        entries = [one for one in await GatewayStore(inbox).entries() if not one.reaper]
    except (ApiError, NoResponders, RequestTimeout):
        return None
    return Known(*({one.identity for one in entries if one.lapsed is lapsed} for lapsed in (False, True)))


async def identified(inbox: RequestInbox, gateway: str) -> str:
    """The id of the gateway that has a name; an id, and a name that nobody has, as it is.

    Raises:
        Refused: several gateways have that name.
    """
    try:
        entries = [one for one in await GatewayStore(inbox).entries() if not one.reaper]
    except (ApiError, NoResponders, RequestTimeout):
        return gateway
    if any(one.identity == gateway for one in entries):
        return gateway
    named = [one for one in entries if one.info.get("name") == gateway]
    found = [one.identity for one in named if not one.lapsed] or [one.identity for one in named]
    if len(found) > 1:
        raise Refused(f"gateways {', '.join(sorted(found))} have the name {gateway}: give one of these ids", 409)
    return found[0] if found else gateway


async def run_verb(verb: Verb, inbox: RequestInbox, arguments: Arguments) -> Any:
    """Run a verb; a gateway that it is about may be given by its name. Raises what ``verb.run`` does."""
    if gateway := getattr(arguments, "gateway", ""):
        arguments = arguments.model_copy(update={"gateway": await identified(inbox, gateway)})
    return await verb.run(inbox, arguments)


async def gather(
    inbox: RequestInbox, subject: bytes, body: bytes, wanted: Collection[str] | None, patience: float
) -> dict[str, list[dict[str, Any]]]:
    """The messages of everybody who has answered to the end, by gateway.

    Args:
        wanted: who is waited for; None: nobody knows, and what comes within ``patience`` seconds is taken.
        patience: seconds for which nobody says anything before the rest is given up.

    Raises:
        Refused: the question is larger than what NATS takes, over which it would end the connection.
    """
    link = inbox.link
    if len(body) > link.max_payload:
        raise Refused(f"that is too large: NATS takes {link.max_payload:,} bytes, and this has {len(body):,}", 413)
    pages: dict[str, list[dict[str, Any]]] = {}
    complete: set[str] = set()
    change = asyncio.Event()
    nobody = False
    done = totals = 0

    def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        nonlocal nobody, done, totals
        change.set()
        if headers.startswith(NO_RESPONDERS) or not payload:
            nobody = True
            return
        page = orjson.loads(payload)
        identity = str(page.get("id", ""))
        pages.setdefault(identity, []).append(page)
        if not page.get("more"):
            complete.add(identity)
        of = [each[-1].get("of") for each in pages.values()]
        done = sum(len(one.get("items") or ()) for each in pages.values() for one in each)
        counts = [one for one in of if one is not None]
        totals = sum(counts)
        if counts:
            progress(done, totals)

    reply = inbox.prefix + b"all." + inbox.token()
    sid = link.subscribe_raw(reply, arrived)
    try:
        link.out.append(b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(body), body))
        link.kick()
        while not nobody and (wanted is None or not complete.issuperset(wanted)):
            change.clear()
            try:
                async with asyncio.timeout(patience):
                    await change.wait()
            except TimeoutError:
                break
    finally:
        link.unsubscribe_raw(sid)
    return {identity: each for identity, each in pages.items() if identity in complete}


async def present(inbox: RequestInbox) -> list[dict[str, Any]]:
    """What every gateway that answers says of itself."""
    there = await known(inbox)
    wanted = None if there is None else there.live | there.lapsed
    patience = PRESENT if there is not None and there.live else UNKNOWN
    return [each[-1] for each in (await gather(inbox, WHO, b"", wanted, patience)).values()]


async def ask(inbox: RequestInbox, what: str, arguments: dict[str, Any] | None = None, *, gateway: str = "") -> Answers:
    """Ask one gateway, or all that run (``gateway`` empty).

    Raises:
        Refused: no gateway is there, the one that is named is not, or one of them cannot do it.
    """
    there = await known(inbox)
    if there is not None and gateway and gateway not in there.live | there.lapsed:
        raise Refused(f"gateway {gateway} does not run: {LISTS}", 404)
    # Where nobody holds a lease, somebody may run who does not get it renewed.
    wanted = {gateway} if gateway else there.live if there is not None and there.live else None
    body = orjson.dumps({**(arguments or {}), "ask": what, "gateway": gateway})
    pages = await gather(inbox, ASK, body, wanted, UNKNOWN if wanted is None else PATIENCE)
    if not pages:
        raise Refused(f"{f'gateway {gateway} does not answer' if gateway else 'no gateway answers'}: {LISTS}", 503)
    refused = sorted({page["error"] for each in pages.values() for page in each if page.get("error")})
    if refused:
        raise Refused("; ".join(refused))
    answers = Answers(silent=sorted((wanted or set()) - pages.keys()), heard=set(pages))
    for identity, each in sorted(pages.items()):
        for page in each:
            for item in page["items"]:
                one = item if isinstance(item, dict) else {"value": item}
                answers.items.append({"gateway": identity, **one})
    return answers


def tell(inbox: RequestInbox, what: str, arguments: dict[str, Any]) -> None:
    """Say something to all gateways; nobody waits for an answer."""
    body = orjson.dumps({**arguments, "ask": what, "gateway": ""})
    reply = inbox.prefix + b"all." + inbox.token()
    inbox.link.out.append(b"PUB %b %b %d\r\n%b\r\n" % (ASK, reply, len(body), body))
    inbox.link.kick()


async def chosen(inbox: RequestInbox, gateway: str) -> set[str]:
    """The gateways that are there (``gateway`` empty), or the one that is named.

    Raises:
        Refused: no gateway is there, or not that one.
    """
    there = {str(one["id"]) for one in await present(inbox)}
    wanted = there & {gateway} if gateway else there
    if not wanted:
        raise Refused(f"{f'gateway {gateway} does not answer' if gateway else 'no gateway answers'}: {LISTS}", 404)
    return wanted


async def have_done(
    inbox: RequestInbox, subject: bytes, question: dict[str, Any], wanted: set[str]
) -> list[dict[str, Any]]:
    """Have gateways do something, and what each says of it.

    Raises:
        Refused: not all have answered.
    """
    pages = await gather(inbox, subject, orjson.dumps(question), wanted, WORKING)
    if silent := ", ".join(sorted(wanted - pages.keys())):
        raise Refused(f"no answer from gateway {silent} in {WORKING:g} seconds", 504)
    return [pages[identity][-1] for identity in sorted(pages)]


async def ask_one(inbox: RequestInbox, what: str, arguments: dict[str, Any], gateway: str = "") -> list[dict[str, Any]]:
    """Ask any gateway, or the one that is named.

    Raises:
        Refused: none is there, or it cannot do it.
    """
    if not gateway:
        answering = sorted(str(one["id"]) for one in await present(inbox) if not one.get("draining"))
        if not answering:
            raise Refused(f"no gateway answers: {LISTS}", 503)
        gateway = answering[0]
    return (await ask(inbox, what, arguments, gateway=gateway)).items


def missing(silent: Collection[str], what: str) -> list[str]:
    """What is said below a table where gateways have not answered."""
    return [f"gateway {one} has not answered: {what} are not shown" for one in silent]
