# SPDX-License-Identifier: Apache-2.0
"""Subjects of messages between gateways, and of requests to gateways, over NATS: nearly all below ``$MQTT.gateways.``.

Replies to gateways and to ``ctl`` arrive below `INBOX`.
"""

import secrets
from typing import Final

INBOX: Final = "$MQTT.inbox."
"""Prefix of the subjects on which gateways and ``ctl`` wait for replies: no other NATS user needs it."""

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

ECHO: Final = b"$MQTT.gateways.echo."
"""Prefix of a nats-server's id: one gateway on that nats-server answers."""

LOST: Final = b"$MQTT.gateways.lost"
"""A gateway names the nats-server that it has lost here, and the Unix time in seconds when it last heard the server."""

SETTLE: Final = b"$MQTT.gateways.settle"
"""Question to every gateway, with the asking gateway's token: each answers when its stores of now have ended."""

AGAIN: Final = b"$MQTT.again."
"""Prefix of a message's subject: a second live copy, for gateways alone, where the first one may have been lost.

It is not below `GATEWAYS`, where operators publish and subscribe: it is a message of a client."""

LEFT: Final = "$MQTT.gateways.left."
"""Prefix of a gateway's id: request with a client id, answered when that gateway has left the client's session."""

ASSIGNED: Final = b"$MQTT.gateways.assigned"
"""A gateway names the sequence of a record in `$MQTT_shared` and, behind a space, the client id."""

BANS: Final = b"$MQTT.gateways.bans"
"""A written ban is told here, for gateways behind a leafnode: nothing below ``$KV.`` comes through leafnodes."""


def new_inbox() -> bytes:
    """Return a prefix of reply subjects below `INBOX`, with a dot at its end, that nobody can guess."""
    return b"%b%b." % (INBOX.encode(), secrets.token_hex(11).encode())
