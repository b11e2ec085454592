# SPDX-License-Identifier: Apache-2.0
"""Settings: read once from flags, environment and file, then immutable.

A flag wins over an environment variable (``MQTT_NATS_`` and the name in capitals), which wins over
the TOML file. docs/configuration.md lists every setting; a test compares the two.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ByteSize, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from mqtt_nats.access.settings import KINDS, AccessSettings
from mqtt_nats.base.config_files import is_json, nearest, read_file, without_secrets
from mqtt_nats.base.errors import StartupError, worded
from mqtt_nats.base.limit_settings import (
    DURATION,
    MOST_BYTES,
    MOST_SECONDS,
    Count,
    Seconds,
)
from mqtt_nats.config.accounts import NatsSettings, TenantName, TenantSettings
from mqtt_nats.config.admin_settings import AdminSettings
from mqtt_nats.transport.listener_settings import Address, ConnectionSettings, ListenerSettings, parse_address

ENV_PREFIX = "MQTT_NATS_"

TABLES = ("listeners", "authenticators", "plugins", "tenants", "mappings")
"""Settings that are tables or lists of tables; they have no flag."""


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


DRAINED_PER_S: Final = 2000.0
"""Clients that a stopping gateway disconnects per second by default: those that a single other gateway can serve."""

DRAINED_WITHIN_S: Final = 5.0
"""Seconds within which a stopping gateway has disconnected all clients by default."""


class Settings(ConnectionSettings, AccessSettings, AdminSettings, NatsSettings, BaseSettings):
    """All settings of a gateway. The constructor reads neither environment nor file; ``load`` does."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    listen: Address = Field(
        default="127.0.0.1:1883",
        description="Address for MQTT over TCP, HOST:PORT; the host `*` is all addresses, IPv4 and IPv6; port 0 takes "
        "a free one.",
    )
    listeners: tuple[ListenerSettings, ...] = Field(
        default=(),
        description="More listeners, `[[listeners]]` in the file. With entries here, `listen` is open only if it is "
        "set.",
    )
    workers: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Gateway processes that share the address; one that dies is started again.",
    )
    tenants: dict[TenantName, TenantSettings] = Field(
        default={},
        description="NATS accounts beside the gateway's own, `[tenants.NAME]` in the file, for listeners and users.",
    )
    embedded: bool = Field(
        default=False, description="Start a nats-server as a child process (extra `embedded`), instead of using `nats`."
    )
    embedded_port: int = Field(
        default=4222, ge=0, le=65535, description="Port of the embedded nats-server on 127.0.0.1; 0 takes a free one."
    )

    session_of_other_user: Annotated[Literal["refuse", "separate"], BeforeValidator(_lower)] = Field(
        default="refuse",
        description="For a client that connects with the client id of a session of another user: `refuse` the client,"
        " or give it a `separate` session.",
    )
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = Field(
        default=None,
        description="Name of this gateway, for `mqtt-nats ctl`. Unset: the name of the host or pod, with a number for "
        "workers and for further gateways of a host. A gateway with a dead one's name first publishes the dead one's "
        "wills.",
    )
    gateway_lease: Annotated[int, DURATION] = Field(
        default=20,
        ge=1,
        le=3600,
        description="Time without a sign of life after which a gateway counts as dead, and another one publishes the "
        "wills of its clients. Less than 20 s is not safe in a cluster, where electing a leader takes "
        "time.",
    )
    drain_time: Annotated[float, DURATION] = Field(
        default=0.0,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="Time over which a gateway that stops disconnects its clients, one after the other. 0: 2,000 in a "
        "second, and all of them within five seconds.",
    )
    server_reference: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="Server Reference for 5.0 clients that a stopping gateway disconnects: where they should connect "
        "(reason 0x9C).",
    )
    max_unread_bytes: ByteSize = Field(
        default=ByteSize(256 * 1024 * 1024),
        ge=1024 * 1024,
        le=MOST_BYTES,
        description="Bytes that may wait in one gateway process for all clients that do not read or acknowledge. "
        "Above this, the clients with the most are served from JetStream later, lose QoS 0 messages, or "
        "are disconnected.",
    )
    stall_time: Seconds = Field(
        default=10.0,
        description="Time without reading after which a client with a durable session gets no more messages at QoS 1 "
        "and 2 until it reads again; the messages wait in JetStream.",
    )
    validate_payload_format: bool = Field(
        default=False, description="Refuse 5.0 publishes that say their payload is UTF-8 text when it is not."
    )
    backlog: Count = Field(
        default=4096, description="Connections that may wait in the kernel until the gateway accepts them."
    )

    message_retention: Annotated[int, DURATION] = Field(
        default=86_400,
        ge=1,
        le=MOST_SECONDS,
        description="Seconds for which QoS 1 and 2 messages are stored (max_age of `$MQTT_msgs`).",
    )
    stream_replicas: int | None = Field(
        default=None,
        ge=1,
        le=5,
        description="Replicas of the streams; unset: by the size of the cluster, three where it has three servers or "
        "more, otherwise one. Streams that have fewer get more, none loses any.",
    )
    message_ids: Literal["replicated", "always", "never"] = Field(
        default="replicated",
        description="Whether QoS 1 messages are stored under an id, by which JetStream recognises one that is sent to "
        "it twice because its leader has changed: where the streams have replicas, `always` or `never`.",
    )
    local_dispatch: bool = Field(
        default=True,
        description="Deliver messages to subscribers of this gateway directly, and not through NATS.",
    )
    session_positions: Annotated[Literal["auto", "consumers", "records"], BeforeValidator(_lower)] = Field(
        default="auto",
        description="Whether a durable session has a dormant consumer for each subscription, which shows its backlog "
        "in JetStream and serves the client at nats-server's own listener. `consumers`: each. `records`: none. "
        "`auto`: up to `session_consumers` in the account.",
    )
    session_consumers: Count | None = Field(
        default=None,
        description="Consumers of `$MQTT_msgs` from which on sessions have `records`, where `session_positions` is "
        "`auto`; unset: 1,000 where that stream has one replica, 200 where it has more.",
    )
    plugins: dict[str, dict[str, Any]] = Field(
        default={},
        repr=False,
        description="Options of plugins, `[plugins.NAME]` in the file. Those that have such a table, empty or not, are "
        "loaded at the start, unless it says `load = false`.",
    )
    sys_interval: Annotated[float, DURATION] = Field(
        default=60.0,
        ge=0,
        le=MOST_SECONDS,
        allow_inf_nan=False,
        description="Seconds between two rounds of `$SYS` topics; 0: there are none.",
    )
    presence: bool = Field(
        default=True, description="Publish an event when a client has connected or its connection has ended."
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_lower)] = Field(
        default="info", description="Least severe messages that are logged."
    )
    log_connections: bool = Field(
        default=True, description="Log each connection that begins, and each that ends with the cause of its end."
    )
    log_format: Annotated[Literal["text", "json"], BeforeValidator(_lower)] = Field(
        default="text", description="Log lines for people, or JSON objects with the ids of what they are about."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the constructor's arguments as only source; ``load`` merges the sources to name the file in errors."""
        return (init_settings,)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        given = self.model_fields_set
        if self.embedded and "nats" in given:
            raise ValueError(
                "nats and embedded exclude each other: give --nats or --embedded, not both; MQTT_NATS_NATS counts too"
            )
        addresses = [one.listen for one in self.all_listeners if parse_address(one.listen)[1]]
        for address in addresses:
            if addresses.count(address) > 1:
                raise ValueError(f"two listeners have the address {address}")
        self.check_access(self.all_listeners, self.listeners)
        self.check_admin(addresses)
        bound = {f"listener {one.listen}": one.tenant for one in self.listeners}
        bound |= {f"authenticator {one.called}": one.tenant for one in self.authenticators}
        for what, tenant in bound.items():
            if tenant is not None and tenant not in self.tenants:
                raise ValueError(f"{what}: there is no tenant {tenant!r}")
        return self

    @property
    def all_listeners(self) -> tuple[ListenerSettings, ...]:
        """All listeners: ``listeners``, and ``listen`` if it is set or ``listeners`` is empty."""
        if self.listeners and "listen" not in self.model_fields_set:
            return self.listeners
        return (ListenerSettings(listen=self.listen), *self.listeners)

    def drain_seconds(self, clients: int) -> float:
        """Return the seconds over which so many clients are disconnected when the gateway stops."""
        return self.drain_time or min(clients / DRAINED_PER_S, DRAINED_WITHIN_S)

    def of(self, tenant: str) -> Self:
        """Return the settings in force for a tenant; "" = the gateway's own account."""
        return self.model_copy(update=self.tenants[tenant].over(self, self.nats)) if tenant else self

    @property
    def listen_address(self) -> tuple[str, int]:
        """``listen`` as (host, port), the host without brackets."""
        return parse_address(self.listen)

    @classmethod
    def load(cls, flags: Mapping[str, Any], config: Path | None = None) -> Self:
        """Merge flags over environment over file and validate the result.

        ``flags`` has setting names as keys; a value of None means not given. ``config`` defaults to
        the environment variable ``MQTT_NATS_CONFIG``. Unknown environment variables are ignored
        (Kubernetes sets some for a service of this name), unknown keys of the file are errors.
        Raises StartupError.
        """
        return _checked(cls, gather(flags, config))

    @classmethod
    def load_nats(cls, flags: Mapping[str, Any], config: Path | None = None) -> Self:
        """Return settings as ``load``, of which only those of :class:`NatsSettings` are read and checked.

        So a command of an operator starts sooner, and takes a gateway's file without the files that it names.

        Raises:
            StartupError: one of these settings is wrong, or a key of the file is unknown.
        """
        found = gather(flags, config)
        values = {name: value for name, value in found.values.items() if name in NatsSettings.model_fields}
        checked = _checked(NatsSettings, Sources(values, found.origins, found.unknown))
        return cls.model_construct(checked.model_fields_set, **dict(checked))


class Sources(NamedTuple):
    """Values of settings from flags, environment and file, with their origins."""

    values: dict[str, Any]
    origins: dict[str, list[str]]
    """Origins of each value, for the file with lines, also of named entries of tables, such as `tenants.acme`."""
    unknown: list[str]
    """Errors about settings of the file that do not exist."""


M = TypeVar("M", bound=BaseModel)


def _checked(model: type[M], found: Sources) -> M:
    """Return the model with the values of the sources. Raises StartupError with all errors."""
    problems = found.unknown
    try:
        settings = model(**found.values)
    except ValidationError as error:
        problems = [*problems, *_problems(error, found)]
    if problems:
        raise StartupError(*problems)
    return settings


def gather(flags: Mapping[str, Any], config: Path | None = None) -> Sources:
    """Return the merged values of flags, environment and file. Arguments as for :meth:`Settings.load`.

    Raises:
        StartupError: a source cannot be read.
    """
    if config is None and (named := os.environ.get(ENV_PREFIX + "CONFIG")):
        config = Path(named)
    values: dict[str, Any] = {}
    origins: dict[str, list[str]] = {}
    unknown: list[str] = []
    if config is not None:
        values, lines, unknown = read_file(config, Settings.model_fields)
        origins = {name: [f"{config}:{line}" for line in found] or [str(config)] for name, found in lines.items()}
    try:
        environment = EnvSettingsSource(Settings)()
    except SettingsError:  # raised for wrong JSON only: `TABLES` are the only settings that are no plain text
        names = [name for name in TABLES if not is_json(os.environ.get(env_name(name)))]
        what = "a list of objects" if {*names} & {"listeners", "authenticators"} else "an object"
        text = " and ".join(map(env_name, names))
        raise StartupError(f"{text} is not valid JSON: expected {what}") from None
    given = {name: value for name, value in flags.items() if value is not None}
    # A flag or an environment variable replaces a table of the file as a whole.
    origins = {name: where for name, where in origins.items() if name.partition(".")[0] not in environment | given}
    origins |= {name: [env_name(name)] for name in environment} | {name: [flag_name(name)] for name in given}
    return Sources(values | environment | given, origins, unknown)


def env_name(setting: str) -> str:
    """Return the environment variable of a setting."""
    return ENV_PREFIX + setting.upper()


def flag_name(setting: str) -> str:
    """Return the command line flag of a setting."""
    return "--" + setting.replace("_", "-")


def is_secret(field: FieldInfo) -> bool:
    """Whether the setting is a secret; a secret has no flag, because every user of the machine can read flags."""
    return SecretStr in get_args(field.annotation)


def has_flag(name: str) -> bool:
    """Whether the setting can be given on the command line."""
    return not is_secret(Settings.model_fields[name]) and name not in TABLES


def cannot_listen(address: str, error: OSError) -> str:
    """Return the error text for an address on which the process cannot listen."""
    return (
        f"cannot listen on {address}: {error.strerror or error}; "
        "stop what listens there or choose another address with --listen"
    )


def _of_entry(where: tuple[int | str, ...], kind: str, message: str) -> str:
    """Return the error text for an entry of `TABLES`; entries without names are counted from 1."""
    parts, fields = list(where), ListenerSettings.model_fields
    if where[0] == "tenants":
        fields = TenantSettings.model_fields
        parts = [part for part in where if part != "[key]"]
    if where[0] == "authenticators" and len(where) > 2:
        fields = KINDS[str(parts.pop(2))].model_fields
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        message = f"type must be one of {', '.join(KINDS)}"
    name = "".join(f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    if kind == "extra_forbidden":
        hint = nearest(str(where[-1]), fields)
        if where[-1] in Settings.model_fields:
            hint = "it is a setting of the gateway: write it before the first [table] of the file"
        message = f"unknown setting: {hint}".removesuffix(": ")
    return f"{name}: {message}"


def _problems(error: ValidationError, found: Sources) -> list[str]:
    """Return a line for each error, with the origin of the setting and without the values of secrets."""
    problems = []
    for detail in error.errors(include_url=False, include_context=False):
        problem, where = worded(detail), detail["loc"]
        name = str(where[0]) if where else ""
        field = Settings.model_fields.get(name)
        if name in TABLES:
            problem = _of_entry(where, detail["type"], problem)
        elif name:
            shows = field is not None and not is_secret(field) and name != "nats"
            shown = f" = {str(without_secrets(found.values.get(name)))[:80]!r}" if shows else ""
            problem = f"{name}{shown}: {problem}"
        problems.append(f"invalid setting: {problem}{_at(where, found.origins)}")
    return list(dict.fromkeys(problems))


def _at(where: tuple[int | str, ...], origins: Mapping[str, Sequence[str]]) -> str:
    """Return the origin of a setting, or of the entry of a table, in brackets; empty where there is none."""
    found = origins.get(".".join(map(str, where[:2]))) or origins.get(str(where[0]) if where else "", ())
    number = where[1] if len(where) > 1 and isinstance(where[1], int) and where[1] < len(found) else 0
    return f" ({found[number]})" if found else ""
