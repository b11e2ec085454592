# SPDX-License-Identifier: Apache-2.0
"""Answers of every verb over HTTP, as types: the response schemas of the OpenAPI document are made from them.

Times are Unix times in seconds, lengths of time seconds, sizes bytes, unless something else is said. A gateway of
another version may answer more; what is here stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from mqtt_nats.admin.counted_results import Audit, History, Status
from mqtt_nats.admin.stored_results import (
    Ban,
    BannedWho,
    CleanResult,
    Follower,
    RetainedList,
    RetainedMessage,
    RetainedRemoved,
    SessionDetails,
    Sessions,
    StreamChanges,
    Streams,
    Topics,
)


class Listener(TypedDict):
    """A listener of a gateway, and who gets in."""

    gateway: str
    listen: list[str]
    type: str
    connections: int
    max_connections: int | None
    authenticators: list[str]
    anonymous: bool
    use_identity: str | None


class Listeners(TypedDict):
    """The listeners of the gateways."""

    listeners: list[Listener]
    silent: list[str]


class Hook(TypedDict):
    """A callback at a point, and what it has done."""

    gateway: str
    point: str
    callback: str
    owner: str
    priority: int
    calls: int
    failures: int


class Hooks(TypedDict):
    """The callbacks at every point, in the order in which they are asked."""

    hooks: list[Hook]
    silent: list[str]


class Decision(TypedDict):
    """Decision of a gateway's rules on one kind of access at one QoS, and the rule that decides."""

    gateway: str
    access: str
    qos: int
    allowed: bool
    why: str
    connected: bool
    hooks: bool


class Decisions(TypedDict):
    """Decisions of the rules of all gateways."""

    decisions: list[Decision]
    silent: list[str]


class DrainResult(TypedDict):
    """Progress of a gateway that is being drained."""

    gateway: str
    connections: int
    left: int
    ended: bool
    seconds: float


class ConnectedClient(TypedDict):
    """A connected client."""

    gateway: str
    client: str
    user: str | None
    address: str
    listener: str
    version: str
    since: float
    heard: float
    keepalive: int
    durable: bool
    expiry: int | None
    subscriptions: int
    inflight: int
    window: int
    queued: int
    unacknowledged_since: NotRequired[float | None]
    unread: int
    unread_since: float | None
    stalled: bool
    slow: bool
    dropped: int
    unstored: int


class ConnectedClients(TypedDict):
    """A part of the list of connected clients; ``total``: how many there are in all."""

    clients: list[ConnectedClient]
    silent: list[str]
    total: int


class ClientSubscription(TypedDict):
    """A subscription of one client."""

    filter: str
    qos: int
    no_local: bool
    retain_as_published: bool
    identifier: int | None


class ClientDetails(ConnectedClient):
    """A connected client, with its subscriptions, the topic of its will, and why nothing is read from it, if so."""

    epoch: int
    will: str | None
    ruled: bool
    not_read_from: list[str]
    subscribed: list[ClientSubscription]


class KickedClient(TypedDict):
    """A client whose connection was ended."""

    client: str
    gateway: str


class Kicked(TypedDict):
    """Clients whose connections were ended; ``absent``: clients that were not connected."""

    clients: list[KickedClient]
    absent: list[str]
    silent: list[str]
    dry_run: bool


class Subscription(ClientSubscription):
    """A subscription of somebody; ``gateway`` is empty where the client is not connected."""

    gateway: str
    client: str


class Subscriptions(TypedDict):
    """A part of the list of subscriptions; ``total``: how many there are in all."""

    subscriptions: list[Subscription]
    silent: list[str]
    total: int


class Group(TypedDict):
    """The shared subscriptions with one ShareName and filter: how many clients have it, at which gateways."""

    group: str
    filter: str
    members: int
    gateways: list[str]


class Groups(TypedDict):
    """A part of the list of groups with connected members; ``total``: how many there are in all."""

    groups: list[Group]
    silent: list[str]
    total: int


class PublishResult(TypedDict):
    """A message that was published, and by which gateway."""

    gateway: str
    topic: str
    bytes: int
    qos: int
    retain: bool


class ClusterGateway(TypedDict):
    """A gateway, from its lease and its answer; null: that is not known."""

    id: str
    name: str
    state: str
    listen: list[str]
    version: str
    build: str
    started: float | None
    alive: float | None
    connections: int | None
    nats: str | None
    memory: int | None
    tasks: int | None
    passed_over: int | None
    not_retained: int | None


class NatsServer(TypedDict):
    """A nats-server; ``leader``: of JetStream, ``connected``: this answer came by it."""

    name: str
    version: str
    cluster: str
    jetstream: bool
    connections: int | None
    leader: bool
    connected: bool


class Nats(TypedDict):
    """The nats-servers."""

    connected: str
    version: str
    cluster: str
    urls: list[str]
    servers: list[NatsServer]


class ClusterStream(TypedDict):
    """A stream; only ``name`` and ``obstacle`` where it does not answer."""

    name: str
    obstacle: str
    replicas: NotRequired[int]
    leader: NotRequired[str]
    followers: NotRequired[list[Follower]]
    messages: NotRequired[int]
    bytes: NotRequired[int]
    consumers: NotRequired[int]


class Cluster(TypedDict):
    """The gateways, the nats-servers and the streams."""

    gateways: list[ClusterGateway]
    nats: Nats
    streams: list[ClusterStream]


class LeaseRemoved(TypedDict):
    """Work that was done for the clients of a dead gateway."""

    gateway: str
    done: str


class PluginHook(TypedDict):
    """A callback of a plugin, and what it has done."""

    point: str
    callback: str
    priority: int
    calls: int
    failures: int


class Plugin(TypedDict):
    """A plugin that is installed."""

    name: str
    loaded: bool
    error: NotRequired[str]
    package: str
    hooks: list[PluginHook]


class GatewayPlugins(TypedDict):
    """The plugins of a gateway."""

    id: str
    plugins: list[Plugin]
    error: NotRequired[str]


class PluginChange(TypedDict):
    """A plugin that a gateway has loaded, or unloaded."""

    id: str
    name: str
    loaded: bool


class LogLevel(TypedDict):
    """The level in force of a logger of a gateway."""

    gateway: str
    logger: str
    level: str


class LogLevels(TypedDict):
    """Log levels of gateways; ``silent`` are the gateways that have not answered."""

    loggers: list[LogLevel]
    silent: list[str]


class Reloaded(TypedDict):
    """A gateway that has read its files again."""

    id: str
    problems: list[str]


RESULTS: Final[Mapping[str, Any]] = {
    "status": Status,
    "history": History,
    "audit": Audit,
    "listeners": Listeners,
    "hooks": Hooks,
    "acl.check": Decisions,
    "drain": DrainResult,
    "log.list": LogLevels,
    "log.level": LogLevels,
    "clients.list": ConnectedClients,
    "clients.show": ClientDetails,
    "clients.kick": Kicked,
    "sessions.list": Sessions,
    "sessions.show": SessionDetails,
    "sessions.clean": CleanResult,
    "subscriptions": Subscriptions,
    "groups": Groups,
    "topics": Topics,
    "retained.list": RetainedList,
    "retained.get": RetainedMessage,
    "retained.delete": RetainedRemoved,
    "publish": PublishResult,
    "streams.list": Streams,
    "streams.set": StreamChanges,
    "cluster.status": Cluster,
    "cluster.remove": LeaseRemoved,
    "bans.list": list[Ban],
    "bans.add": Ban,
    "bans.remove": BannedWho,
    "plugins.list": list[GatewayPlugins],
    "plugins.load": list[PluginChange],
    "plugins.unload": list[PluginChange],
    "reload": list[Reloaded],
}
"""The result of each verb, by its name; that of ``trace`` comes in lines."""


@cache
def result_schema(verb: str, reference: str) -> dict[str, Any]:
    """The JSON schema of a verb's result, with the types that it names under ``$defs``; an object where it has no type.

    Args:
        reference: where those types will be, with ``{model}`` for the name.
    """
    found = RESULTS.get(verb)
    if found is None:
        return {"type": "object"}
    schema: dict[str, Any] = TypeAdapter(found).json_schema(mode="serialization", ref_template=reference)
    return schema
