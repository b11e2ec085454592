# SPDX-License-Identifier: Apache-2.0
"""Errors of the clients, and the texts of MQTT's codes."""

from __future__ import annotations

from typing import Final

from mqtt_nats.codec import ConnackCode, Properties, ReasonCode

ERROR_STATUS: Final = 1
TIMEOUT_STATUS: Final = 27
"""Exit status when the time of ``--timeout`` is over, as of mosquitto's clients."""


class ClientError(Exception):
    """The client cannot go on. ``str()`` is one line for the user; ``status`` is the exit status."""

    status: int = ERROR_STATUS


class Refused(ClientError):
    """A message or a subscription is refused, by the server or by its limits; the connection is as before."""


class TimeoutReached(ClientError):
    """The time of ``--timeout`` is over before the work is done."""

    status = TIMEOUT_STATUS


class Interrupted(Exception):
    """SIGINT or SIGTERM has arrived: the client disconnects and ends."""


def reason_text(code: int, properties: Properties | None = None) -> str:
    """Return name, number and Reason String of a reason code of MQTT 5.0 (section 2.4)."""
    name = ReasonCode(code).name.lower().replace("_", " ") if code in set(ReasonCode) else "unknown reason"
    text = f"{name} (reason code 0x{code:02x})"
    detail = (properties or {}).get("reason_string")
    return f"{text}: {detail}" if detail and detail != name else text


def return_text(code: int) -> str:
    """Return name and number of a CONNACK return code of MQTT 3.1.1 (table 3.1)."""
    name = ConnackCode(code).name.lower().replace("_", " ") if code in set(ConnackCode) else "unknown reason"
    return f"{name} (return code {code})"
