# SPDX-License-Identifier: Apache-2.0
"""``ctl retained``: list, show and remove retained messages; ``ctl publish``."""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final, Literal, NamedTuple

from pydantic import ConfigDict, Field, field_validator

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.logs import plain
from mqtt_nats.control.list_page import ListPage
from mqtt_nats.ctl.commands.topics import checked, checked_topic
from mqtt_nats.ctl.gateway_requests import ask_one, progress
from mqtt_nats.ctl.tables import ago, cell, quantity, rest, sheet, table
from mqtt_nats.ctl.verb import TEXT_LENGTH, Arguments, Paged, Refused, Verb
from mqtt_streams.retained import RetainedStore
from mqtt_streams.subjects import filter_to_subjects, subject_to_topic, topic_to_subject

TOPICS_PER_REQUEST: Final = 100
"""Number of topics in one request to a gateway."""


class Listing(Paged):
    """Selection of retained messages."""

    filter: str = Field(default="#", description="A topic filter.")
    sort: Literal["topic", "bytes", "stored", "qos"] = Field(default="topic", description="Order of the list.")


class Which(Arguments):
    """Topic of a retained message."""

    topic: str


class Deleted(Arguments):
    """Selection of retained messages to remove."""

    topic: str = Field(description="A topic, or a topic filter.")
    dry_run: bool = Field(default=False, description="Only show which.")


class Message(Arguments):
    """A message to publish."""

    model_config = ConfigDict(str_max_length=None)  # only NATS bounds the size of a payload

    topic: str = Field(json_schema_extra={"maxLength": TEXT_LENGTH})  # `checked_topic` gives a better error text
    payload: str = Field(default="", description="What it says.")
    base64: bool = Field(default=False, description="PAYLOAD is Base64.")
    qos: int = Field(default=0, ge=0, le=2, description="0, 1 or 2.", json_schema_extra={"metavar": "QOS"})
    retain: bool = Field(default=False, description="Retain it; an empty one removes what is retained.")

    @field_validator("payload")
    @classmethod
    def _is_text(cls, payload: str) -> str:
        payload.encode()  # raises for surrogates, which cannot be sent
        return payload


class Brief(NamedTuple):
    """Entry of a retained message in a list; without the payload, since a list may have a million messages."""

    topic: str
    qos: int
    bytes: int
    stored: float


def order(sort: str) -> Callable[[Brief], Any]:
    """Return the key of an entry, by the name of one of its fields, then by topic."""
    return lambda one: (getattr(one, sort), one.topic)


async def collect(inbox: RequestInbox, topic_filter: str, page: ListPage[Brief]) -> None:
    """Add the retained messages of all topics that match. One that changes meanwhile may be added twice."""
    for subject in filter_to_subjects(checked(topic_filter)):
        async with aclosing(RetainedStore(inbox).matching(subject)) as pages:
            async for messages in pages:
                for one in messages:
                    topic = subject_to_topic(one.subject)
                    page.add(Brief(topic, one.qos, len(one.payload), one.time_ns / 1e9))
                progress(page.total)


async def listed(inbox: RequestInbox, asked: Listing) -> dict[str, Any]:
    """Return retained messages in an order, and their total number."""
    page = ListPage(asked.offset, asked.limit, order(asked.sort), reverse=asked.reverse)
    await collect(inbox, asked.filter, page)
    found = {one.topic: one._asdict() for one in page.entries()}
    return {"retained": list(found.values()), "total": page.total}


def shown(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    now = time.time()
    rows = [
        [cell(one["topic"]), str(one["qos"]), quantity(one["bytes"]), ago(one["stored"], now)]
        for one in found["retained"]
    ]
    return "\n".join([*table(["topic", "QoS", "size", "stored"], rows), *rest(len(found["retained"]), found["total"])])


async def get(inbox: RequestInbox, asked: Which) -> dict[str, Any]:
    """Return one retained message; ``text`` is None for a payload that is no UTF-8.

    Raises:
        Refused: the topic has no retained message.
    """
    topic = checked_topic(asked.topic)
    try:
        found = await RetainedStore(inbox).get(topic_to_subject(topic))
    except ValueError as error:
        raise Refused(f"{plain(topic)}: {error}") from None
    if found is None:
        raise Refused(f"nothing is retained on {plain(topic)}: `mqtt-nats ctl retained list` shows what is", 404)
    try:
        text: str | None = found.payload.decode()
    except UnicodeDecodeError:
        text = None
    return {
        "topic": topic,
        "qos": found.qos,
        "bytes": len(found.payload),
        "stored": found.time_ns / 1e9,
        "payload": b64encode(found.payload).decode(),
        "text": text,
    }


def shown_one(one: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    text = one["text"]
    payload = f"{one['payload']} (Base64)" if text is None else "\n".join(map(plain, text.split("\n")))
    stored = ago(one["stored"], time.time())
    about = (("topic", plain(one["topic"])), ("QoS", str(one["qos"])), ("size", quantity(one["bytes"])))
    return "\n".join([*sheet(*about, ("stored", stored)), "", payload])


async def delete(inbox: RequestInbox, asked: Deleted) -> dict[str, Any]:
    """Remove retained messages as a client does: by an empty retained message, which subscribers get.

    Raises:
        Refused: there is no such message, or no gateway answers.
    """
    page = ListPage(0, 0, order("topic"))
    await collect(inbox, asked.topic, page)
    topics = list(dict.fromkeys(one.topic for one in page.entries()))
    if not topics:
        raise Refused(f"nothing is retained on {plain(asked.topic)}: `mqtt-nats ctl retained list` shows what is", 404)
    if not asked.dry_run:
        for start in range(0, len(topics), TOPICS_PER_REQUEST):
            some = topics[start : start + TOPICS_PER_REQUEST]
            await ask_one(inbox, "unretain", {"topics": some})
            progress(start + len(some), len(topics))
    return {"topics": topics, "dry_run": asked.dry_run}


def shown_deleted(found: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    topics = found["topics"]
    count = f"{len(topics):,} retained message{'' if len(topics) == 1 else 's'}"
    if not found["dry_run"]:
        return f"{count} removed"
    return "\n".join([f"{count} would be removed", *(f"  {plain(one)}" for one in topics)])


async def publish(inbox: RequestInbox, asked: Message) -> dict[str, Any]:
    """Publish a message by one of the gateways; return when it is stored, at QoS 0 without retain at once.

    Raises:
        Refused: the topic is not for clients, the message is too large, or no gateway answers.
    """
    try:
        payload = b64decode(asked.payload, validate=True) if asked.base64 else asked.payload.encode()
    except ValueError:
        raise Refused("payload: it is not Base64") from None
    body = {"topic": checked_topic(asked.topic), "payload": b64encode(payload).decode()}
    (done,) = await ask_one(inbox, "publish", {**body, "qos": asked.qos, "retain": asked.retain})
    return {**done, "qos": asked.qos, "retain": asked.retain}


def shown_published(one: dict[str, Any]) -> str:
    """Return the result as text for a terminal."""
    retained = ", retained" if one["retain"] else ""
    return f"{quantity(one['bytes'])} published on {plain(one['topic'])} at QoS {one['qos']}{retained}"


VERBS: Final = (
    Verb(
        "retained.list",
        "GET",
        "/retained",
        Listing,
        listed,
        "Show the retained messages whose topics match a FILTER.",
        shown,
        ("filter",),
    ),
    Verb(
        "retained.get",
        "GET",
        "/retained/{topic}",
        Which,
        get,
        "Show the retained message of a TOPIC.",
        shown_one,
        confidential=True,
    ),
    Verb(
        "retained.delete",
        "DELETE",
        "/retained/{topic}",
        Deleted,
        delete,
        "Remove the retained message of a TOPIC, or those that match a topic filter.",
        shown_deleted,
    ),
    Verb(
        "publish",
        "POST",
        "/publish",
        Message,
        publish,
        "Publish PAYLOAD on TOPIC; `-` reads it from standard input. No rule of the ACL looks at it.",
        shown_published,
        ("topic", "payload"),
    ),
)
