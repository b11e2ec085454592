# SPDX-License-Identifier: Apache-2.0
"""Subjects of what gateways say to each other and are asked over NATS: below ``$MQTT.gateways.``."""

from typing import Final

GATEWAYS: Final = "$MQTT.gateways."
"""What gateways ask each other; one that is dead does not answer."""

WHO: Final = b"$MQTT.gateways.who"
"""Every gateway answers with what it is."""

ASK: Final = b"$MQTT.gateways.ask"
"""Every gateway that is meant answers a question, in as many messages as it takes."""

LOOK: Final = b"$MQTT.gateways.look"
"""Every gateway looks at once for gateways whose lease has lapsed."""

PLUGINS: Final = b"$MQTT.gateways.plugins"
"""Every gateway that is meant does something with a plugin, and tells what it has then."""

RELOAD: Final = b"$MQTT.gateways.reload"
"""Every gateway that is meant reads its files again, and tells what is wrong with them."""

STATUS: Final = b"$MQTT.gateways.status."
"""With a gateway's id behind it: a request for its counters."""

COUNTERS: Final = b"$MQTT.gateways.counters"
"""Every gateway of a group, ``{"group": ...}``, tells what it has counted."""

REPORTS: Final = b"$MQTT.gateways.report"
"""Where gateways tell each other what they have; a newcomer's first one is answered."""

HERE: Final = b"$MQTT.gateways.here"
"""A gateway says on which server it is; who is asked to answers with his."""

ECHO: Final = b"$MQTT.gateways.echo."
"""Answered by one gateway on the server whose id follows."""

LEFT: Final = "$MQTT.gateways.left."
"""With a gateway's id behind it: a request with a client id, answered when that gateway has left the session."""

ASSIGNED: Final = b"$MQTT.gateways.assigned"
"""A gateway names the sequence of a record in `$MQTT_shared` and, behind a space, the client id."""
