# SPDX-License-Identifier: Apache-2.0
"""Answers of verbs about what gateways count and note, as types: counters, the last hour, actions of administrators.

See :mod:`mqtt_nats.admin.results`, whose part this is.
"""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict


class Histogram(TypedDict):
    """Observations in classes: how many were up to each bound, and not up to the one before; the last is without.

    ``last``: the last observation.
    """

    bounds: list[float]
    counts: list[int]
    sum: float
    last: NotRequired[float]


class NatsLink(TypedDict):
    """A connection of a gateway to NATS."""

    link: str
    online: bool
    writable: bool


class Counters(TypedDict):
    """Counters of a gateway since its start, and present numbers; lists have a number for each QoS.

    ``refused_tenants``: why tenants are not served, by name.
    ``build``: ``compiled``, or ``pure Python`` and the reason.
    """

    gateway: str
    id: str
    name: str
    time: float
    since: float
    received: list[int]
    received_bytes: list[int]
    sent: list[int]
    sent_bytes: list[int]
    connections: int
    clients: int
    connects: int
    refused: dict[str, int]
    disconnects: dict[str, int]
    dropped: dict[str, int]
    limited: dict[str, int]
    filters_refused: dict[str, int]
    failures: dict[str, int]
    log_records_left_out: int
    filters: int
    copies_stored: int
    pending_stores: int
    pending_store_bytes: int
    resent_stores: int
    refused_stores: NotRequired[dict[str, int]]
    unread_bytes: int
    nats: list[NatsLink]
    reconnects: int
    stored: Histogram
    lag: Histogram
    cpu: float
    memory: int
    tasks: int
    draining: bool
    obstacle: str
    refused_tenants: NotRequired[dict[str, str]]
    build: NotRequired[str]
    durable: int
    regular: int
    inflight: int
    queued: int
    unacknowledged: int
    subscriptions: int
    slow: int
    stalled: int
    oldest_unacknowledged: NotRequired[float]


class HistoryPoint(TypedDict):
    """Ten seconds of a gateway: growth per second (``dropped``: by reason), mean times, and present numbers.

    ``cpu``: share of a core. ``stored``: time until JetStream has acknowledged a store. ``lag``: how late the event
    loop was. ``storage``: bytes of JetStream's file storage that the account uses. Null: not known.
    """

    time: float
    connects: float
    received: float
    sent: float
    received_bytes: float
    sent_bytes: float
    cpu: float
    dropped: dict[str, float]
    stored: float | None
    lag: float | None
    clients: int
    memory: float | None
    storage: int | None


class GatewayHistory(TypedDict):
    """Points of one gateway, the oldest first."""

    gateway: str
    points: list[HistoryPoint]


class History(TypedDict):
    """Points of the gateways; ``step`` seconds are between two of them."""

    step: int
    gateways: list[GatewayHistory]
    silent: list[str]


class AdministratorAction(TypedDict):
    """An action of an administrator over HTTP; ``outcome``: empty until the action ends, then ``done`` or an error."""

    gateway: str
    time: float
    who: str
    role: str
    address: str
    operation: str
    arguments: str
    outcome: str


class Audit(TypedDict):
    """A part of the audit trail, the newest first; ``total``: how many are known in all."""

    actions: list[AdministratorAction]
    silent: list[str]
    total: int


class StoredCounts(TypedDict):
    """Numbers of messages, retained messages and sessions in JetStream; null: the number is not known."""

    messages: int | None
    retained: int | None
    sessions: int | None


class Storage(TypedDict):
    """Bytes of JetStream's file storage; null: not known, or (``allowed``) the account has no limit of its own."""

    used: int | None
    allowed: int | None


class Status(TypedDict):
    """Present work of the gateways; ``silent`` are the gateways that have not answered."""

    gateways: list[Counters]
    stored: StoredCounts
    storage: Storage
    silent: list[str]
