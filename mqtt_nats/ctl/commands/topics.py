# SPDX-License-Identifier: Apache-2.0
"""``ctl subscriptions``, ``groups`` and ``topics``: list subscriptions of clients, their groups, and known topics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal, TypeVar

from pydantic import Field

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.logs import plain
from mqtt_nats.codec import MqttError, matches, validate_topic_filter
from mqtt_nats.control.filter_selection import SHARE, filter_test, pattern_test
from mqtt_nats.control.list_page import ListPage, subscription_order
from mqtt_nats.control.selection import sliced
from mqtt_nats.ctl.commands.clients import Selection as ClientSelection
from mqtt_nats.ctl.gateway_requests import ask, missing
from mqtt_nats.ctl.records import records
from mqtt_nats.ctl.tables import cell, rest, table
from mqtt_nats.ctl.verb import Paged, Pattern, Refused, Verb
from mqtt_streams.api import ApiError, call
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.messages import PREFIX as MESSAGE_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.retained import PREFIX as RETAINED_PREFIX
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.subjects import filter_to_subjects, subject_to_filter, subject_to_topic

Found = TypeVar("Found", bound=Collection[str])


TOPICS_MOST: Final = 200_000
"""Most topics that are compared with each other to count them; a longer filter selects fewer."""


class Subscriptions(ClientSelection, Paged):
    """Selection of subscriptions."""

    topic: str = Field(
        default="",
        description="Only those that bring messages of this topic.",
        json_schema_extra={"metavar": "TOPIC"},
    )
    filter: Pattern = Field(
        default="",
        description="Only those with a filter like this: * stands for any characters, ? for one.",
        json_schema_extra={"metavar": "PATTERN"},
    )
    shared: bool = Field(default=False, description="Only shared subscriptions.")
    stored: bool = Field(default=False, description="Also those of sessions whose clients are not connected.")
    sort: Literal["filter", "client", "qos"] = Field(default="filter", description="Order of the list.")


class Groups(Paged):
    """Selection of groups of shared subscriptions."""

    filter: Pattern = Field(
        default="",
        description="Only those with a filter like this: * stands for any characters, ? for one.",
        json_schema_extra={"metavar": "PATTERN"},
    )
    sort: Literal["filter", "members"] = Field(default="filter", description="Order of the list.")


class Topics(Paged):
    """Selection of topics."""

    filter: str = Field(default="#", description="A topic filter.")
    sort: Literal["topic", "stored"] = Field(default="topic", description="Order of the list.")


def checked(topic_filter: str) -> str:
    """Return a checked topic filter. Raises Refused: the text is no topic filter."""
    try:
        validate_topic_filter(topic_filter)
        filter_to_subjects(topic_filter)
    except (MqttError, ValueError) as error:
        raise Refused(f"{plain(topic_filter)!r} is no topic filter: {error}") from None
    return topic_filter


def checked_topic(topic: str) -> str:
    """Return a checked topic name. Raises Refused: the text is no topic name."""
    if not topic or "+" in topic or "#" in topic or "\0" in topic:
        raise Refused(f"{plain(topic)!r} is no topic name: it is empty, or has a wildcard")
    return topic


async def subscriptions(inbox: RequestInbox, asked: Subscriptions) -> dict[str, Any]:
    """Return subscriptions in an order, their total number, and the gateways that have not answered."""
    if asked.topic:
        checked_topic(asked.topic)
    question = asked.model_dump(exclude={"gateway", "limit", "offset", "stored"})
    question["most"] = asked.offset + asked.limit if asked.limit else 0
    answers = await ask(inbox, "subscriptions", question, gateway=asked.gateway)
    page = ListPage(asked.offset, asked.limit, subscription_order(asked.sort), reverse=asked.reverse)
    for one in answers.items:
        page.add(one)
    unseen = answers.total - page.total
    if asked.stored and not (asked.user or asked.address or asked.listener or asked.gateway or asked.slow):
        everybody = await ask(inbox, "connected")
        await _add_stored(inbox, asked, {one["value"] for one in everybody.items}, page)
    return {"subscriptions": page.entries(), "silent": answers.silent, "total": page.total + unseen}


async def _add_stored(
    inbox: RequestInbox, asked: Subscriptions, connected: set[str], page: ListPage[dict[str, Any]]
) -> None:
    """Add the stored subscriptions of disconnected clients."""
    wanted = filter_test(asked.model_dump(include={"topic", "filter", "shared"}))
    fits = pattern_test(asked.match)
    async for one in records(inbox):
        record = one.record
        if record is None or record.clean or one.client_id in connected or not fits(one.client_id):
            continue
        options = record.v5.options if record.v5 is not None else {}
        filters = {
            (options[subject].filter if subject in options else _text(subject)): (qos, options.get(subject))
            for subject, qos in record.subs.items()
        }
        shared = record.v5.shared if record.v5 is not None else {}
        about = {"gateway": "", "client": one.client_id}
        for text, (qos, option) in filters.items():
            if wanted(text):
                own = {
                    "filter": text,
                    "qos": qos,
                    "no_local": option is not None and option.nl,
                    "retain_as_published": option is not None and option.rap,
                    "identifier": None if option is None else option.id,
                }
                page.add(about | own)
        for text, share in shared.items():
            if wanted(text):
                own = {"no_local": False, "retain_as_published": share.rap, "identifier": share.id}
                page.add(about | {"filter": text, "qos": share.qos} | own)


def _text(subject: str) -> str:
    try:
        return subject_to_filter(subject)
    except ValueError:
        return subject


def shown_subscriptions(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    rows = [
        [
            cell(one["filter"]),
            cell(one["client"]),
            one["gateway"] or "not connected",
            str(one["qos"]),
            "yes" if one["no_local"] else "",
            "yes" if one["retain_as_published"] else "",
            str(one["identifier"] or ""),
        ]
        for one in found["subscriptions"]
    ]
    heading = ["filter", "client", "gateway", "QoS", "no local", "retain as published", "identifier"]
    below = missing(found["silent"], "its subscriptions")
    return "\n".join(
        [
            *table(heading, rows, "identifier, retain as published, no local, gateway"),
            *below,
            *rest(len(found["subscriptions"]), found["total"]),
        ]
    )


async def groups(inbox: RequestInbox, asked: Groups) -> dict[str, Any]:
    """Return the groups that have connected members, their total number, and the gateways that have not answered."""
    answers = await ask(inbox, "groups")
    wanted = filter_test(asked.model_dump(include={"filter"}))
    found: dict[str, dict[str, Any]] = {}
    for one in answers.items:
        if wanted(text := one["filter"]):
            name, topic_filter = text.removeprefix(SHARE).split("/", 1)
            group = found.setdefault(text, {"group": name, "filter": topic_filter, "members": 0, "gateways": []})
            group["members"] += one["members"]
            group["gateways"].append(one["gateway"])
    page = ListPage[dict[str, Any]](asked.offset, asked.limit, _group_order(asked.sort), reverse=asked.reverse)
    for group in found.values():
        page.add(group)
    return {"groups": page.entries(), "silent": answers.silent, "total": page.total}


def _group_order(sort: str) -> Callable[[dict[str, Any]], Any]:
    return lambda one: (one[sort], one["filter"], one["group"])


def shown_groups(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    rows = [
        [cell(one["group"]), cell(one["filter"]), f"{one['members']:,}", ", ".join(one["gateways"])]
        for one in found["groups"]
    ]
    lines = table(["group", "filter", "connected members", "gateways"], rows, "gateways")
    return "\n".join([*lines, *missing(found["silent"], "its members"), *rest(len(found["groups"]), found["total"])])


async def topics(inbox: RequestInbox, asked: Topics) -> dict[str, Any]:
    """Return topics that have stored messages or a retained message, or were used lately at a gateway.

    Raises:
        Refused: more than `TOPICS_MOST` topics match the filter.
    """
    wanted = checked(asked.filter)
    stored = await _counts(inbox, MESSAGES, MESSAGE_PREFIX, wanted)
    retained = await _counts(inbox, RETAINED, RETAINED_PREFIX, wanted)
    answers = await ask(inbox, "topics", {"filter": wanted})
    gateways: dict[str, list[str]] = {}
    for one in answers.items:
        gateways.setdefault(one["value"], []).append(one["gateway"])
    page = ListPage[str](asked.offset, asked.limit, _topic_order(asked.sort, stored), reverse=asked.reverse)
    async for topic in sliced(_few({*stored, *retained, *gateways})):
        page.add(topic)
    found = [
        {
            "topic": topic,
            "stored": stored.get(topic, 0),
            "retained": topic in retained,
            "gateways": gateways.get(topic, []),
        }
        for topic in page.entries()
    ]
    return {"topics": found, "silent": answers.silent, "total": page.total}


def _topic_order(sort: str, stored: Mapping[str, int]) -> Callable[[str], Any]:
    return (lambda topic: (stored.get(topic, 0), topic)) if sort == "stored" else lambda topic: topic


def _few(found: Found) -> Found:
    """Return topics as they are. Raises Refused: there are too many."""
    if len(found) > TOPICS_MOST:
        raise Refused(f"more than {TOPICS_MOST:,} topics match: give a filter that matches fewer")
    return found


async def _counts(inbox: RequestInbox, stream: str, prefix: str, wanted: str) -> dict[str, int]:
    """Return the number of messages in a stream by topic."""
    found: dict[str, int] = {}
    for subject in filter_to_subjects(wanted):
        offset = 0
        while True:
            try:
                body = {"subjects_filter": prefix + subject, "offset": offset}
                answer = await call(inbox, f"STREAM.INFO.{stream}", body)
            except ApiError as error:
                if error.err_code == STREAM_NOT_FOUND:
                    break
                raise
            page = answer["state"].get("subjects") or {}
            async for one, count in sliced(page.items()):
                topic = subject_to_topic(one.removeprefix(prefix))
                if topic and matches(wanted, topic):
                    found[topic] = count
            _few(found)
            offset += len(page)
            if not page or offset >= answer.get("total", 0):
                break
    return found


def shown_topics(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    rows = [
        [
            cell(one["topic"]),
            f"{one['stored']:,}",
            "yes" if one["retained"] else "",
            ", ".join(one["gateways"]),
        ]
        for one in found["topics"]
    ]
    heading = ["topic", "stored messages", "retained", "used lately at"]
    return "\n".join(
        [
            *table(heading, rows, "used lately at"),
            *missing(found["silent"], "its topics"),
            *rest(len(found["topics"]), found["total"]),
        ]
    )


VERBS: Final = (
    Verb(
        "subscriptions",
        "GET",
        "/subscriptions",
        Subscriptions,
        subscriptions,
        "Show who has subscribed what.",
        shown_subscriptions,
    ),
    Verb(
        "groups",
        "GET",
        "/groups",
        Groups,
        groups,
        "Show the groups of shared subscriptions that have connected members.",
        shown_groups,
    ),
    Verb(
        "topics",
        "GET",
        "/topics",
        Topics,
        topics,
        "Show the topics that match a FILTER: those with stored or retained messages, and those used lately.",
        shown_topics,
        ("filter",),
    ),
)
