# SPDX-License-Identifier: Apache-2.0
"""Settings of limits for clients; most can also be set for a single listener."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_settings import NoDecode

from mqtt_nats.base.networks import parse_network, parse_rules


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() and value.isascii() else value


def _check_rules(value: tuple[str, ...]) -> tuple[str, ...]:
    parse_rules(value)
    return value


def _check_networks(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(parse_network(one)) for one in value)


_UNITS_S: Final = {"d": 86_400, "h": 3600, "m": 60, "s": 1, "ms": 0.001, "": 1}
_PART: Final = r"([0-9]{1,12}(?:\.[0-9]{1,9})?)"
_DURATION: Final = re.compile(f"(?:{_PART}(?:ms|[dhms]))+|{_PART}")
_SIZES: Final = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def parse_duration(text: str) -> float:
    """Return the seconds of ``30s``, ``1h30m``, ``7d``, ``500ms``, or of a number, which has the unit seconds.

    Raises:
        ValueError: the text has another form.
    """
    if not _DURATION.fullmatch(text):
        raise ValueError("expected a duration such as 30s, 1h30m or 7d")
    return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(f"{_PART}(ms|[dhms]|)", text))


def duration_text(seconds: float) -> str:
    """Return a duration in the form that `parse_duration` reads."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:g}ms"
    text = ""
    for unit in ("d", "h", "m"):
        count, seconds = divmod(seconds, _UNITS_S[unit])
        text += f"{count:.0f}{unit}" if count else ""
    return text + f"{seconds:g}s" if seconds or not text else text


def _size_text(size: int) -> str:
    return next((f"{size // factor}{unit}" for unit, factor in _SIZES if size and not size % factor), str(size))


def _seconds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = parse_duration(value.strip())
    return int(found) if found.is_integer() else found


DURATION: Final = BeforeValidator(_seconds)
"""Validator of a setting in seconds, which can be given as a duration."""


def with_unit(value: Any, field: FieldInfo) -> Any:
    """Return a setting's value for display: a duration such as ``1h30m``, a size such as ``1MiB``, else unchanged."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    kinds = (field.annotation, *get_args(field.annotation))
    parts = [*field.metadata, *kinds, *(part for kind in kinds for part in get_args(kind))]
    if DURATION in parts:
        return duration_text(value)
    return _size_text(int(value)) if ByteSize in parts else value


MOST_BYTES: Final = 2**63 - 1

MOST_SECONDS: Final = 9_223_372_036
"""Most seconds whose nanoseconds, the unit of NATS, fit into 64 bits."""

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
PacketSize = Annotated[ByteSize, Field(ge=64, le=268_435_460)]
Seconds = Annotated[float, DURATION, Field(gt=0, le=MOST_SECONDS, allow_inf_nan=False)]
Inflight = Annotated[int, Field(ge=1, le=16384)]
Sixteen = Annotated[int, Field(ge=1, le=65535)]
Bytes = Annotated[ByteSize, Field(ge=1, le=MOST_BYTES)]
Qos = Annotated[Literal[0, 1, 2], BeforeValidator(_number)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Rules = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_rules)]
Networks = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_networks)]

PER_LISTENER: Final = (
    "max_connections_per_address",
    "connect_rate",
    "connect_rate_per_address",
    "connect_timeout",
    "connect_packet_size",
    "max_packet_size",
    "message_rate",
    "byte_rate",
    "max_subscriptions",
    "max_inflight",
    "max_queued",
    "receive_maximum",
    "max_qos",
    "durable_sessions",
    "carried_messages",
    "temporary_refusals",
)
"""Settings that a listener may override."""


class ClientLimits(BaseModel):
    """Limits of the gateway for clients. `PER_LISTENER` names the limits that a listener may override."""

    model_config = ConfigDict(defer_build=True)  # only models that inherit from this one are built

    max_connections: Count | None = Field(
        default=None,
        description="Connections at the same time, of all listeners, in each worker; further ones are closed before "
        "anything is read from them. Unset: as many as the limit of open files and half of the memory "
        "allow.",
    )
    max_connections_per_address: Count | None = Field(
        default=None,
        description="Connections at the same time from one address (IPv6: one /64), at each listener, in each worker.",
    )
    addresses: Rules = Field(
        default=(),
        description="Who may connect, in order: `allow NETWORK`, `deny NETWORK`, at last `allow all` or `deny all`; "
        "checked before anything is read.",
    )
    connect_rate: Rate | None = Field(
        default=None,
        description="Connections per second at each listener, in each worker. Clients beyond `rate_burst` wait for up "
        "to four seconds. Unset: enough for `max_connections` clients that come together, at least 100 and at most "
        "2,000.",
    )
    connect_rate_per_address: Rate | None = Field(
        default=None, description="The same, from one address (IPv6: one /64)."
    )
    message_rate: Rate | None = Field(
        default=None,
        description="PUBLISH packets per second of one client; when there are more it is read from less often.",
    )
    byte_rate: Bytes | None = Field(
        default=None, description="Bytes per second of one client; when there are more it is read from less often."
    )
    rate_burst: Seconds = Field(
        default=5.0, description="Seconds for which a client, an address or a listener may save up what a rate allows."
    )
    rate_pause: Seconds = Field(
        default=60.0,
        description="Longest pause in reading, in seconds; a client that would have to wait longer for what it has "
        "sent at once is disconnected (0x96).",
    )
    flapping_connects: Count | None = Field(
        default=None,
        description="Connections of one client id of a user, or of an address for anonymous clients, within "
        "`flapping_window` that get it banned; those beyond half of it wait.",
    )
    flapping_connects_per_address: Count | None = Field(
        default=None, description="The same for an address; connections that are refused count too."
    )
    flapping_window: Seconds = Field(default=60.0, description="Seconds over which such connections are counted.")
    flapping_ban: Annotated[Count, DURATION] = Field(
        default=300, description="Seconds for which a client or address is banned by that."
    )
    max_qos: Qos = Field(
        default=2, description="Highest QoS that clients may publish with, and that subscriptions are granted."
    )
    max_client_id_length: Annotated[ByteSize, Field(ge=23, le=65535)] = Field(
        default=ByteSize(256),
        description="Bytes of a client id; it is stored with every message, session and consumer.",
    )
    max_topic_length: Annotated[ByteSize, Field(ge=1, le=65535)] = Field(
        default=ByteSize(3800), description="Bytes of a topic or filter; NATS takes no more than the default."
    )
    max_filters: Count = Field(default=1000, description="Filters in one SUBSCRIBE or UNSUBSCRIBE.")
    max_subscriptions_per_gateway: Count | None = Field(
        default=None,
        description="Subscriptions of all connected sessions, in each worker and account; more are refused. Unset: as "
        "many as a quarter of the memory is there for.",
    )
    max_cache_bytes: Annotated[ByteSize, Field(ge=1024 * 1024, le=MOST_BYTES)] = Field(
        default=ByteSize(64 * 1024 * 1024),
        description="Bytes of memory for what clients make a gateway process remember: topics and who gets their "
        "messages, decisions of rules, topic aliases. When it is full, what was remembered first is forgotten.",
    )
    max_client_cache_bytes: Annotated[ByteSize, Field(ge=64 * 1024, le=MOST_BYTES)] = Field(
        default=ByteSize(16 * 1024 * 1024), description="The same for what one client makes it remember."
    )
    max_held: Sixteen = Field(default=10_000, description="QoS 2 publishes of one client that wait for its PUBREL.")
    max_user_properties: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=64, description="User properties of one packet."
    )
    max_user_property_bytes: Annotated[ByteSize, Field(ge=0, le=MOST_BYTES)] = Field(
        default=ByteSize(64 * 1024), description="Bytes of the names and values of the user properties of one packet."
    )
    max_backlog: Count | None = Field(
        default=None,
        description="QoS 1 and 2 messages that wait for an absent client, for each of its subscriptions; of more, "
        "the oldest are not sent when it returns.",
    )
    max_sessions: Count | None = Field(
        default=10_000,
        description="Sessions that outlive their connections, of one user in the whole cluster, or of the anonymous "
        "clients of one address (IPv6: one /64).",
    )
    session_rate: Rate | None = Field(
        default=500.0,
        description="Such sessions that are begun per second for one user or address, in each worker. Clients beyond "
        "`rate_burst` wait for up to four seconds, and are refused where that is not enough.",
    )
    max_durable_consumers: Count | None = Field(
        default=10_000,
        description="Consumers of JetStream for the durable subscriptions of all these sessions together: one for a "
        "filter at QoS 1 or 2, two for one that ends in `/#`. Those of sessions without consumers count, too.",
    )
    max_durable_consumers_per_gateway: Count | None = Field(
        default=100_000, description="The same for the sessions that are connected to one worker, of all users."
    )
    consumer_rate: Rate | None = Field(
        default=500.0,
        description="Such consumers that are made per second for one user or address, in each worker; a SUBSCRIBE that "
        "wants more is answered later, and one that would wait for longer than `rate_pause` is refused.",
    )
    max_retained: Count | None = Field(
        default=None, description="Retained messages in the whole cluster (`max_msgs` of `$MQTT_rmsgs`)."
    )
    max_retained_size: Bytes | None = Field(default=None, description="Bytes of the payload of a retained message.")


def at_listener(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gateway's settings that a listener overrides; ``given``: the listener's settings by name."""
    return {name: given[name] for name in PER_LISTENER if given.get(name) is not None}
