# SPDX-License-Identifier: Apache-2.0
"""Subjects of messages between gateways, and of requests to gateways, over NATS: below ``$MQTT.gateways.``."""

from typing import Final

GATEWAYS: Final = "$MQTT.gateways."
"""Prefix of all these subjects."""

WHO: Final = b"$MQTT.gateways.who"
"""Request to every gateway for a description of itself."""

ASK: Final = b"$MQTT.gateways.ask"
"""Question to the gateways that the request selects; each answers in one or more messages."""

LOOK: Final = b"$MQTT.gateways.look"
"""Request to every gateway to look for gateways with a lapsed lease at once."""

PLUGINS: Final = b"$MQTT.gateways.plugins"
"""Request to the selected gateways to load, unload or list plugins; each answers with its plugins."""

RELOAD: Final = b"$MQTT.gateways.reload"
"""Request to the selected gateways to reload their files; each answers with the errors in the files."""

STATUS: Final = b"$MQTT.gateways.status."
"""Prefix of a gateway's id: request for the counters of that gateway."""

COUNTERS: Final = b"$MQTT.gateways.counters"
"""Request to every gateway of a group, ``{"group": ...}``, for its counters."""

REPORTS: Final = b"$MQTT.gateways.report"
"""Reports of gateways for the `$SYS` topics; the other gateways answer the first report of a new gateway."""

REPORTS_WANTED: Final = b"$MQTT.gateways.reports_wanted"
"""Request to every gateway for its last report."""

HERE: Final = b"$MQTT.gateways.here"
"""A gateway names its nats-server here; with a reply subject one gateway of each server answers with its own."""

READS_POSITIONS: Final = b"Mqtt-Positions:1"
"""Header of a question on `HERE`: the gateway that has connected can resume sessions with a position in `$MQTT_pos`."""

NAMES_BUCKETS: Final = b"Mqtt-Claim-Buckets:1"
"""Header of a question on `HERE`: the subjects of the gateway's claims name the bucket of the session."""

ECHO: Final = b"$MQTT.gateways.echo."
"""Prefix of a nats-server's id: one gateway on that nats-server answers."""

LEFT: Final = "$MQTT.gateways.left."
"""Prefix of a gateway's id: request with a client id, answered when that gateway has left the client's session."""

ASSIGNED: Final = b"$MQTT.gateways.assigned"
"""A gateway names the sequence of a record in `$MQTT_shared` and, behind a space, the client id."""
