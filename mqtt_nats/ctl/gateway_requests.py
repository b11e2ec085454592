# SPDX-License-Identifier: Apache-2.0
"""Requests to gateways: to all gateways with a lease or to one; each answers in one or more messages."""

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

SILENCE_TIMEOUT: Final = 10.0
"""Seconds without any answer after which waiting for the remaining gateways ends."""

UNKNOWN_NUMBER_SILENCE_S: Final = 1.0
"""Seconds as of `SILENCE_TIMEOUT`, where the number of gateways is not known, because JetStream does not answer."""

PRESENT: Final = 3.0
"""Seconds as of `SILENCE_TIMEOUT`, for the question which gateways run."""

WORKING: Final = 25.0
"""Seconds as of `SILENCE_TIMEOUT`, for reloading files or loading a plugin."""

LISTS: Final = "`mqtt-nats ctl cluster status` lists them"

Progress = Callable[[int, int | None], None]
"""Callback for the progress: number done, and the total number where it is known."""

PROGRESS: Final[ContextVar[Progress | None]] = ContextVar("mqtt_nats_progress", default=None)


def progress(done: int, total: int | None = None) -> None:
    """Report the progress to the callback of the context, if any."""
    told = PROGRESS.get()
    if told is not None:
        told(done, total)


@dataclass(slots=True)
class Answers:
    """Answers of gateways. Every item names its ``gateway``."""

    items: list[dict[str, Any]] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    """Gateways that have a lease and have not answered completely."""
    heard: set[str] = field(default_factory=set)
    """Gateways that have answered completely."""
    total: int = 0
    """Number of items that there are, also where gateways have answered with the first ones only."""


class Known(NamedTuple):
    """Gateways that have a lease, and gateways whose lease has lapsed but that may run nevertheless."""

    live: set[str]
    lapsed: set[str]


async def known(inbox: RequestInbox) -> Known | None:
    """Return the registered gateways; None: JetStream does not answer, or no gateway has ever run."""
    try:
        entries = [one for one in await GatewayStore(inbox).entries() if not one.reaper]
    except (ApiError, NoResponders, RequestTimeout):
        return None
    return Known(*({one.identity for one in entries if one.lapsed is lapsed} for lapsed in (False, True)))


async def identified(inbox: RequestInbox, gateway: str) -> str:
    """Return the id of the gateway with a name; an id, and a name that no gateway has, unchanged.

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
    """Run a verb; its argument ``gateway`` may be a gateway's name. Raises the errors of ``verb.run``."""
    if gateway := getattr(arguments, "gateway", ""):
        arguments = arguments.model_copy(update={"gateway": await identified(inbox, gateway)})
    return await verb.run(inbox, arguments)


class _Answers:
    """Pages of answers to one question, by gateway."""

    def __init__(self) -> None:
        self.pages: dict[str, list[dict[str, Any]]] = {}
        self.complete: set[str] = set()
        """Gateways that have sent their last page."""
        self.nobody = False
        """Whether no gateway listens."""
        self.change = asyncio.Event()

    def arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Take one page, and show how many items have come of those that are announced."""
        self.change.set()
        if headers.startswith(NO_RESPONDERS) or not payload:
            self.nobody = True
            return
        page = orjson.loads(payload)
        identity = str(page.get("id", ""))
        self.pages.setdefault(identity, []).append(page)
        if not page.get("more"):
            self.complete.add(identity)
        counts = [one for each in self.pages.values() if (one := each[-1].get("of")) is not None]
        if counts:
            progress(sum(len(one.get("items") or ()) for each in self.pages.values() for one in each), sum(counts))


async def gather(
    inbox: RequestInbox, subject: bytes, body: bytes, wanted: Collection[str] | None, patience: float
) -> dict[str, list[dict[str, Any]]]:
    """Send a question and return the messages of the gateways that have answered completely, by gateway.

    Args:
        wanted: gateways that have to answer; None: not known, wait until ``patience`` ends.
        patience: seconds without any answer after which waiting ends.

    Raises:
        Refused: the question is above `max_payload`, for which nats-server would end the connection.
    """
    link = inbox.link
    if len(body) > link.max_payload:
        raise Refused(f"the request is too large: NATS takes {link.max_payload:,} bytes, not {len(body):,}", 413)
    answers = _Answers()
    reply = inbox.prefix + b"all." + inbox.token()
    sid = link.subscribe_raw(reply, answers.arrived)
    try:
        link.out.append(b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(body), body))
        link.kick()
        while not answers.nobody and (wanted is None or not answers.complete.issuperset(wanted)):
            answers.change.clear()
            try:
                async with asyncio.timeout(patience):
                    await answers.change.wait()
            except TimeoutError:
                break
    finally:
        link.unsubscribe_raw(sid)
    return {identity: each for identity, each in answers.pages.items() if identity in answers.complete}


async def present(inbox: RequestInbox) -> list[dict[str, Any]]:
    """Return the descriptions of all gateways that answer."""
    there = await known(inbox)
    wanted = None if there is None else there.live | there.lapsed
    patience = PRESENT if there is not None and there.live else UNKNOWN_NUMBER_SILENCE_S
    return [each[-1] for each in (await gather(inbox, WHO, b"", wanted, patience)).values()]


async def ask(inbox: RequestInbox, what: str, arguments: dict[str, Any] | None = None, *, gateway: str = "") -> Answers:
    """Ask one gateway, or all that run (``gateway`` empty).

    Raises:
        Refused: no gateway answers, the named gateway does not run, or a gateway refuses.
    """
    there = await known(inbox)
    if there is not None and gateway and gateway not in there.live | there.lapsed:
        raise Refused(f"gateway {gateway} does not run: {LISTS}", 404)
    # Without a valid lease, gateways may run that cannot renew their leases.
    wanted = {gateway} if gateway else there.live if there is not None and there.live else None
    body = orjson.dumps({**(arguments or {}), "ask": what, "gateway": gateway})
    pages = await gather(inbox, ASK, body, wanted, UNKNOWN_NUMBER_SILENCE_S if wanted is None else SILENCE_TIMEOUT)
    if not pages:
        raise Refused(f"{f'gateway {gateway} does not answer' if gateway else 'no gateway answers'}: {LISTS}", 503)
    refused = sorted({page["error"] for each in pages.values() for page in each if page.get("error")})
    if refused:
        raise Refused("; ".join(refused))
    answers = Answers(
        silent=sorted((wanted or set()) - pages.keys()), heard=set(pages), total=sum(map(_total, pages.values()))
    )
    for identity, each in sorted(pages.items()):
        for page in each:
            for item in page["items"]:
                one = item if isinstance(item, dict) else {"value": item}
                answers.items.append({"gateway": identity, **one})
    return answers


def _total(pages: list[dict[str, Any]]) -> int:
    """Return the number of items that a gateway has; where it does not say how many, it answers all."""
    counts = [page["of"] for page in pages if page.get("of") is not None]
    return counts[-1] if counts else sum(len(page["items"]) for page in pages)


def tell(inbox: RequestInbox, what: str, arguments: dict[str, Any]) -> None:
    """Send a request to all gateways without waiting for answers."""
    body = orjson.dumps({**arguments, "ask": what, "gateway": ""})
    reply = inbox.prefix + b"all." + inbox.token()
    inbox.link.out.append(b"PUB %b %b %d\r\n%b\r\n" % (ASK, reply, len(body), body))
    inbox.link.kick()


async def chosen(inbox: RequestInbox, gateway: str) -> set[str]:
    """Return the ids of all gateways that answer (``gateway`` empty), or of the named gateway.

    Raises:
        Refused: no gateway answers, or the named gateway does not.
    """
    there = {str(one["id"]) for one in await present(inbox)}
    wanted = there & {gateway} if gateway else there
    if not wanted:
        raise Refused(f"{f'gateway {gateway} does not answer' if gateway else 'no gateway answers'}: {LISTS}", 404)
    return wanted


async def have_done(
    inbox: RequestInbox, subject: bytes, question: dict[str, Any], wanted: set[str]
) -> list[dict[str, Any]]:
    """Send a request to gateways and return the last message of each answer, by order of their ids.

    Raises:
        Refused: a gateway has not answered.
    """
    pages = await gather(inbox, subject, orjson.dumps(question), wanted, WORKING)
    if silent := ", ".join(sorted(wanted - pages.keys())):
        raise Refused(f"no answer from gateway {silent} in {WORKING:g} seconds", 504)
    return [pages[identity][-1] for identity in sorted(pages)]


async def ask_one(inbox: RequestInbox, what: str, arguments: dict[str, Any], gateway: str = "") -> list[dict[str, Any]]:
    """Ask one gateway: any gateway that does not drain, or the named one.

    Raises:
        Refused: no gateway answers, or the gateway refuses.
    """
    if not gateway:
        answering = sorted(str(one["id"]) for one in await present(inbox) if not one.get("draining"))
        if not answering:
            raise Refused(f"no gateway answers: {LISTS}", 503)
        gateway = answering[0]
    return (await ask(inbox, what, arguments, gateway=gateway)).items


def missing(silent: Collection[str], what: str) -> list[str]:
    """Return the lines below a table about gateways that have not answered."""
    return [f"gateway {one} has not answered: {what} are not shown" for one in silent]
