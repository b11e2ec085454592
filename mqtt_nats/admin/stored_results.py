# SPDX-License-Identifier: Apache-2.0
"""Answers of verbs about stored records, as types: sessions, topics, retained messages, streams, bans.

See :mod:`mqtt_nats.admin.results`, whose part this is.
"""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict


class Session(TypedDict):
    """A session; ``expiry`` null: it does not end by itself, ``queued`` null: that is not known.

    ``position``: ``consumers``; ``records``: it has no consumers.
    """

    client: str
    user: str | None
    connected: bool
    gateway: str
    owner: str
    durable: bool
    position: str
    expiry: int | None
    ends: float | None
    subscriptions: int
    queued: int | None
    inflight: int | None
    written: float
    problem: str


class Sessions(TypedDict):
    """A part of the list of sessions; ``total``: how many there are in all."""

    sessions: list[Session]
    silent: list[str]
    total: int


class SessionSubscription(TypedDict):
    """A subscription of a session, and what waits for it."""

    filter: str
    qos: int
    queued: int | None
    inflight: int | None
    in_gateway: bool
    consumers: int
    missing: int


class SessionDetails(Session):
    """A session with its subscriptions."""

    subscribed: list[SessionSubscription]
    silent: list[str]


class KeptSession(TypedDict):
    """A session that was not ended, and why."""

    client: str
    why: str


class CleanResult(TypedDict):
    """The sessions that were ended, and the consumers that were removed."""

    dry_run: bool
    sessions: list[str]
    kept: list[KeptSession]
    consumers: list[str]


class Topic(TypedDict):
    """A topic: how many messages are stored, whether one is retained, and at which gateways it was used lately."""

    topic: str
    stored: int
    retained: bool
    gateways: list[str]


class Topics(TypedDict):
    """A part of the list of topics; ``total``: how many there are in all."""

    topics: list[Topic]
    silent: list[str]
    total: int


class RetainedBrief(TypedDict):
    """A retained message without its payload."""

    topic: str
    qos: int
    bytes: int
    stored: float


class RetainedList(TypedDict):
    """A part of the list of retained messages; ``total``: how many there are in all."""

    retained: list[RetainedBrief]
    total: int


class RetainedMessage(RetainedBrief):
    """A retained message; ``payload`` is Base64, ``text`` null where the payload is no UTF-8."""

    payload: str
    text: str | None


class RetainedRemoved(TypedDict):
    """The topics whose retained messages were removed."""

    topics: list[str]
    dry_run: bool


class Follower(TypedDict):
    """A replica of a stream besides its leader's; ``lag`` is a number of operations."""

    name: str
    current: bool
    lag: int
    offline: NotRequired[bool]


class Stream(TypedDict):
    """A stream; ``max_age`` 0: messages are kept for good."""

    name: str
    obstacle: str
    replicas: int
    leader: str
    followers: list[Follower]
    storage: str
    retention: str
    max_age: float
    messages: int
    bytes: int
    consumers: int


class Monitored(TypedDict):
    """Settings with which a nats-server writes to the disk."""

    url: str
    name: str
    sync_interval: float
    sync_always: bool


class Streams(TypedDict):
    """The streams, the number of nats-servers, and what does not match what is promised."""

    streams: list[Stream]
    servers: int
    monitoring: list[Monitored]
    warnings: list[str]


class ChangedStream(TypedDict):
    """A stream as it is now."""

    name: str
    replicas: int
    max_age: float
    changed: bool


class UnchangedStream(TypedDict):
    """A stream that the servers do not change, and why."""

    name: str
    why: str


class StreamChanges(TypedDict):
    """Results of changes of streams."""

    streams: list[ChangedStream]
    refused: list[UnchangedStream]


class BannedWho(TypedDict):
    """Subject of a ban: a client id, a user name or a network."""

    kind: str
    value: str


class Ban(BannedWho):
    """A ban; ``until`` 0: for good."""

    until: float
    reason: str
    by: str
