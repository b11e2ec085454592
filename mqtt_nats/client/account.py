# SPDX-License-Identifier: Apache-2.0
"""Account: the services that the clients of a gateway in one NATS account share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mqtt_nats.client.kept_messages import KeptMessages

if TYPE_CHECKING:
    from mqtt_nats.access.acl import Rules
    from mqtt_nats.client.client import Client
    from mqtt_nats.delivery.receiver import DeliveryServices
    from mqtt_nats.ingress.publish import Ingress
    from mqtt_nats.lifecycle.cluster_bans import Banning
    from mqtt_nats.lifecycle.lease import Lease
    from mqtt_nats.lifecycle.readiness import Readiness
    from mqtt_nats.lifecycle.will import Wills
    from mqtt_nats.messages.copies import Copies
    from mqtt_nats.messages.live_copies import LiveCopies
    from mqtt_nats.observability.presence import Presence
    from mqtt_nats.pubsub.backfill import Gaps
    from mqtt_nats.pubsub.beginnings import Beginnings
    from mqtt_nats.pubsub.lost_servers import LostServers
    from mqtt_nats.sessions.services import Registry, Services
    from mqtt_nats.sessions.takeover import Claims


class ClientRules:
    """Access rules for publishing and subscribing in one account."""

    __slots__ = ("present",)

    def __init__(self, present: Rules | None) -> None:
        self.present = present
        """Access rules; None = every client may publish and subscribe on every topic."""

    def use(self, rules: Rules | None) -> None:
        """Set the access rules; None = every client may publish and subscribe on every topic."""
        self.present = rules


@dataclass(frozen=True, eq=False)
class Account:
    """Services of one NATS account for its clients, complete when they are made."""

    services: Services
    ingress: Ingress
    delivery: DeliveryServices
    registry: Registry[Client]
    claims: Claims
    wills: Wills
    presence: Presence
    lease: Lease
    readiness: Readiness
    banning: Banning
    copies: Copies
    live_copies: LiveCopies
    gaps: Gaps
    lost_servers: LostServers
    beginnings: Beginnings
    rules: ClientRules
    accounts: Mapping[str, Account]
    """All accounts of the gateway by tenant, this one included; the gateway's own has the empty name."""
    refused: Mapping[str, str]
    """Why other tenants are not served; empty in the account of a tenant."""
    fit: Callable[[Client], None]
    """Function that puts hooks between a client and its connection after the client has moved to this account."""
    welcomes: dict[tuple[int, ...], bytes]
    """CONNACK packets of most 5.0 connections, by Session Present and limits."""
    kept: KeptMessages = field(default_factory=KeptMessages)

    @property
    def tenant(self) -> str:
        """Name of the tenant; empty = the gateway's own account."""
        return self.services.identity.tenant
