# SPDX-License-Identifier: Apache-2.0
"""``ctl subscriptions`` and ``ctl topics``: list subscriptions of clients, and known topics."""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.codec import MqttError, matches, validate_topic_filter
from mqtt_nats.ctl.commands.clients import Listing as ClientListing
from mqtt_nats.ctl.gateway_requests import ask, missing
from mqtt_nats.ctl.records import fits, records
from mqtt_nats.ctl.tables import cell, cut, plain, rest, table
from mqtt_nats.ctl.verb import Arguments, Refused, Verb
from mqtt_streams.api import ApiError, call
from mqtt_streams.messages import PREFIX as MESSAGE_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.retained import PREFIX as RETAINED_PREFIX
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.subjects import filter_to_subjects, subject_to_filter, subject_to_topic

STREAM_NOT_FOUND: Final = 10059


class Subscriptions(ClientListing):
    """Selection of subscriptions."""

    topic: str = Field(
        default="",
        description="Only those that bring messages of this topic.",
        json_schema_extra={"metavar": "TOPIC"},
    )
    stored: bool = Field(default=False, description="Also those of sessions whose clients are not connected.")


class Topics(Arguments):
    """Selection of topics."""

    filter: str = Field(default="#", description="A topic filter.")
    limit: int = Field(default=0, ge=0, description="So many at most; 0 for all.", json_schema_extra={"metavar": "N"})


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
    """Return the subscriptions, sorted by filter and client, and the gateways that have not answered."""
    if asked.topic:
        checked_topic(asked.topic)
    question = asked.model_dump(exclude={"gateway", "limit", "stored"})
    answers = await ask(inbox, "subscriptions", question, gateway=asked.gateway)
    found = answers.items
    if asked.stored:
        everybody = await ask(inbox, "connected")
        found += await _stored(inbox, asked, {one["value"] for one in everybody.items})
    found.sort(key=lambda one: (one["filter"], one["client"]))
    return cut({"subscriptions": found, "silent": answers.silent}, "subscriptions", asked.limit)


async def _stored(inbox: RequestInbox, asked: Subscriptions, connected: set[str]) -> list[dict[str, Any]]:
    """Return the stored subscriptions of disconnected clients; none where a criterion needs a connection."""
    found: list[dict[str, Any]] = []
    if asked.user or asked.address or asked.listener or asked.gateway or asked.slow:
        return found
    async for one in records(inbox):
        record = one.record
        if record is None or record.clean or one.client_id in connected or not fits(asked.match, one.client_id):
            continue
        options = record.v5.options if record.v5 is not None else {}
        filters = {
            (options[subject].filter if subject in options else _text(subject)): (qos, options.get(subject))
            for subject, qos in record.subs.items()
        }
        shared = record.v5.shared if record.v5 is not None else {}
        for text, (qos, option) in filters.items():
            if not asked.topic or _reaches(text, asked.topic):
                found.append(
                    {
                        "gateway": "",
                        "client": one.client_id,
                        "filter": text,
                        "qos": qos,
                        "no_local": option is not None and option.nl,
                        "retain_as_published": option is not None and option.rap,
                        "identifier": None if option is None else option.id,
                    }
                )
        for text, share in shared.items():
            if not asked.topic or _reaches(text.split("/", 2)[2], asked.topic):
                about = {"no_local": False, "retain_as_published": share.rap, "identifier": share.id}
                found.append({"gateway": "", "client": one.client_id, "filter": text, "qos": share.qos, **about})
    return found


def _text(subject: str) -> str:
    try:
        return subject_to_filter(subject)
    except ValueError:
        return subject


def _reaches(topic_filter: str, topic: str) -> bool:
    return bool(topic_filter) and matches(topic_filter, topic)


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
            *rest(found, "subscriptions"),
        ]
    )


async def topics(inbox: RequestInbox, asked: Topics) -> dict[str, Any]:
    """Return topics that have stored messages or a retained message, or were used lately at a gateway."""
    wanted = checked(asked.filter)
    stored = await _counts(inbox, MESSAGES, MESSAGE_PREFIX, wanted)
    retained = await _counts(inbox, RETAINED, RETAINED_PREFIX, wanted)
    answers = await ask(inbox, "topics", {"filter": wanted})
    gateways: dict[str, list[str]] = {}
    for one in answers.items:
        gateways.setdefault(one["value"], []).append(one["gateway"])
    found = [
        {
            "topic": topic,
            "stored": stored.get(topic, 0),
            "retained": topic in retained,
            "gateways": gateways.get(topic, []),
        }
        for topic in sorted({*stored, *retained, *gateways})
    ]
    return cut({"topics": found, "silent": answers.silent}, "topics", asked.limit)


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
            for one, count in page.items():
                topic = subject_to_topic(one.removeprefix(prefix))
                if topic and matches(wanted, topic):
                    found[topic] = count
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
        [*table(heading, rows, "used lately at"), *missing(found["silent"], "its topics"), *rest(found, "topics")]
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
