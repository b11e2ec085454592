# SPDX-License-Identifier: Apache-2.0
"""Table of all verbs, from which the command line ``mqtt-nats ctl`` and the HTTP API are made."""

from __future__ import annotations

from typing import Final

from mqtt_nats.ctl.commands import bans, clients, cluster, fleet, gateways, plugins, retained, sessions, streams, topics
from mqtt_nats.ctl.verb import Arguments, Refused, Verb

__all__ = ["VERBS", "Arguments", "Refused", "Verb"]

VERBS: Final[tuple[Verb, ...]] = (
    *gateways.VERBS,
    *clients.VERBS,
    *sessions.VERBS,
    *topics.VERBS,
    *retained.VERBS,
    *streams.VERBS,
    *cluster.VERBS,
    *bans.VERBS,
    *plugins.VERBS,
    *fleet.VERBS,
)
