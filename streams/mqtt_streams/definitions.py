# SPDX-License-Identifier: Apache-2.0
"""Definitions of the streams (package data), and their creation and update in a JetStream account.

The JSON files have the format of `nats stream add --config <file>`. Streams with a consumer per subscription set
`max_consumers` explicitly because nats-server 2.15 takes -1 as 1,000.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final, Literal

import orjson

from mqtt_streams.account import AccountLimits, account_limits
from mqtt_streams.api import ApiError, JetStream, NoLeader, NoResponders, RequestTimeout, api_prefix, call, decode
from mqtt_streams.bans import STREAM as BANS
from mqtt_streams.error_codes import (
    ACCOUNT_RESOURCES_EXCEEDED,
    CLUSTER_NO_PEERS,
    INSUFFICIENT_RESOURCES,
    MAXIMUM_STREAMS,
    MEMORY_EXCEEDED,
    NOT_ENABLED,
    NOT_ENABLED_FOR_ACCOUNT,
    REPLICAS_NOT_SUPPORTED,
    STORAGE_EXCEEDED,
    STREAM_CREATE_FAILED,
    STREAM_NAME_EXISTS,
    STREAM_NOT_FOUND,
    SUBJECTS_OVERLAP,
)
from mqtt_streams.fleet import STREAM as FLEET
from mqtt_streams.gateways import STREAM as GATEWAYS
from mqtt_streams.messages import PREFIX as MESSAGE_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.positions import STREAM as POSITIONS
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.qos2 import STREAM as QOS2IN
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.retained import listener_has_clients
from mqtt_streams.sessions import PREFIX as SESSION_PREFIX
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.shared import STREAM as SHARED
from mqtt_streams.stored import time_ns
from mqtt_streams.timers import STREAM as TIMERS
from mqtt_streams.wills import STREAM as WILLS

STREAMS: Final = (SESSIONS, MESSAGES, RETAINED, QOS2IN, OUT, TIMERS, WILLS, SHARED, GATEWAYS, BANS, FLEET)

OPTIONAL: Final = (POSITIONS,)
"""Streams that only some settings need; gateways also run without them."""

EVERY: Final = STREAMS + OPTIONAL
"""All streams, optional ones included: administrators' commands list and change these."""

NEVER_AGAIN: Final = (SESSIONS, QOS2IN)
"""Streams whose sequences identify records elsewhere: as epochs of sessions, as ids of releases.

A stream of this list that was removed is created again with sequences above all former ones.
"""

RECORDS: Final = (SESSIONS, RETAINED, POSITIONS, WILLS, SHARED, GATEWAYS, BANS, FLEET)
"""Streams whose records are replaced. Their limit of messages per subject is above 1: see `kept_single`."""

BY_SIZE: Final = 3
"""Replicas of streams when the setting is absent and the cluster has enough servers."""

_TOO_FEW: Final = (CLUSTER_NO_PEERS, REPLICAS_NOT_SUPPORTED)
_SWITCHES: Final = ("allow_direct", "allow_msg_ttl", "allow_msg_schedules", "allow_rollup_hdrs")
_NS: Final = 1_000_000_000

IDS_WINDOW: Final = 30 * _NS
"""Duplicate window in nanoseconds where every message has an id: nats-server keeps each id in memory for this time."""

_DURATIONS: Final = ("max_age", "duplicate_window")
_LIMITS: Final = ("max_age", "max_bytes", "max_msgs", "max_msg_size")
_UNITS: Final = (("d", 86400 * _NS), ("h", 3600 * _NS), ("m", 60 * _NS), ("s", _NS), ("ms", 1_000_000))

_DEFAULT_WINDOW: Final = 120 * _NS

_NEVER: Final = "0001-"
"""Beginning of the time of the last message of a stream that has never had one."""

_HINTS: Final[Mapping[int, str]] = {
    ACCOUNT_RESOURCES_EXCEEDED: "raise JetStream's limits of the account or the server",
    INSUFFICIENT_RESOURCES: "raise JetStream's limits of the account or the server, or free space",
    MAXIMUM_STREAMS: "raise the account's limit of streams",
    MEMORY_EXCEEDED: "raise JetStream's memory limit of the account or the server",
    NOT_ENABLED_FOR_ACCOUNT: "enable JetStream for the account",
    STORAGE_EXCEEDED: "raise JetStream's storage limit (max_file_store), or free space",
    REPLICAS_NOT_SUPPORTED: "several replicas need a cluster: set stream_replicas to 1",
    CLUSTER_NO_PEERS: "the cluster has too few JetStream servers for stream_replicas",
    NOT_ENABLED: "start nats-server with JetStream (-js)",
}


class StreamSetupError(Exception):
    """The streams cannot be used; the text is one line that names the error and the remedy."""


class StreamConflict(StreamSetupError):
    """An existing stream contradicts its definition."""

    def __init__(self, stream: str, setting: str, has: object, needs: object, remedy: str = "") -> None:
        remedy = remedy or f"change it with `nats stream edit '{stream}'`, or remove the stream if its content may go"
        super().__init__(
            f"stream {stream}: {setting} is {shown(setting, has)} but must be {shown(setting, needs)}; {remedy}"
        )
        self.stream = stream
        self.setting = setting


class NotAnswering(StreamSetupError):
    """JetStream does not answer, but may answer later: after an election, or when another client's change is done."""


class StillThere(NotAnswering):
    """nats-server may still be removing the files of a former stream with this name."""


class _TooFew(Exception):
    """The cluster has too few servers for the wanted replicas, and a lower number is allowed."""


class _Replicas:
    """Number of replicas of the streams; without a setting, as many as the cluster has servers for."""

    def __init__(self, asked: int | None, infos: Iterable[dict[str, Any]]) -> None:
        found = list(infos)
        self._asked = asked is not None
        self._least = max((info["config"].get("num_replicas", 1) for info in found), default=1)
        alone = any(not (info.get("cluster") or {}).get("name") for info in found)
        self.wanted = asked or (self._least if alone else max(self._least, BY_SIZE))

    def refused(self, error: ApiError) -> None:
        """Lower `wanted` and raise _TooFew when the refusal allows fewer replicas; return otherwise."""
        if error.err_code in _TOO_FEW and not self._asked and self.wanted > self._least:
            self.wanted = self._least
            raise _TooFew


@dataclass(frozen=True, slots=True)
class EnsureReport:
    """Result of `ensure_streams`.

    `domain`: the JetStream domain, "" for none. `upgraded`: changed settings by stream. `kept`: differences that were
    left, one line each. `configs`: present configuration of each stream. `limits`: limits of the account. `remains`:
    number of messages in a created stream that come from a stream of that name whose definition nats-server has lost.
    `lost`: the stream of sessions or of messages, if it was missing although the other one has been used. `single`: why
    streams of `RECORDS` keep one message per subject, by stream: what is removed there may come back after a kill.
    """

    domain: str
    limits: AccountLimits
    created: list[str] = field(default_factory=list)
    remains: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    upgraded: dict[str, list[str]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    single: dict[str, str] = field(default_factory=dict)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)


def load_definition(stream: str) -> dict[str, Any]:
    """Return the definition of a stream of EVERY, as a new dict."""
    resource = files("mqtt_streams").joinpath("definitions", f"{stream.removeprefix('$')}.json")
    definition: dict[str, Any] = orjson.loads(resource.read_bytes())
    return definition


async def ensure_streams(
    js: JetStream,
    *,
    replicas: int | None = None,
    message_retention: int = 86400,
    message_ids: Literal["replicated", "always", "never"] = "never",
    positions: bool = False,
    max_retained: int | None = None,
) -> EnsureReport:
    """Create missing streams, update allowed differences, refuse a stream that contradicts its definition.

    `replicas`: of new streams, and of existing ones that have fewer; None = by the size of the cluster: three with
    three servers or more, one with fewer servers, and never fewer than any of the streams has.
    `message_retention`: seconds a QoS 1/2 message is kept. A `$MQTT_msgs` of nats-server's listener, which removes what
    all consumers have, gets the retention limits; its messages stay for as long again as they have, and for
    `message_retention` at least. `message_ids`: whether every message is stored under an id, which shortens the
    duplicate window; an existing one stays unless it is the default.
    `max_retained`: most topics with a retained message; existing messages stay, also above the limit; None removes a
    limit that a gateway has set. `positions`: whether positions of sessions are stored. Several gateways may call this
    at the same time. Raises StreamSetupError, StreamConflict; NotAnswering while there is no leader.
    """
    account = await _account(js)
    streams = EVERY if positions else STREAMS
    infos = {stream: await _info(js, stream) for stream in streams}
    level = _Replicas(replicas, (info for info in infos.values() if info))
    report = EnsureReport(str(account.get("domain", "")), account_limits(account, level.wanted))
    report.single.update(await kept_single(js, max_retained))
    for stream, other in ((SESSIONS, MESSAGES), (MESSAGES, SESSIONS)):
        if infos[stream] is None and _has_been_used(infos[other]):
            report.lost.append(stream)
    for stream in streams:
        while True:
            definition = load_definition(stream)
            definition["num_replicas"] = level.wanted
            allowed = account_limits(account, level.wanted).consumers
            if allowed:  # JetStream refuses a stream whose max_consumers is above the account's limit
                definition["max_consumers"] = min(definition["max_consumers"], allowed)
            if stream == RETAINED and max_retained is not None:
                definition |= {"max_msgs": max_retained, "discard": "new"}
            if stream in report.single:
                definition["max_msgs_per_subject"] = 1
            if stream == MESSAGES:
                definition |= _message_limits(definition, message_retention, message_ids)
            try:
                await _ensure(js, report, definition, infos[stream], level)
                break
            except _TooFew:
                continue
    return report


async def kept_single(js: JetStream, max_retained: int | None) -> dict[str, str]:
    """Return the streams of `RECORDS` that have to keep one message per subject, each with the reason.

    nats-server deletes a record on the disk when the header `Nats-Rollup` of the next one asks for it, and not because
    of the limit of messages per subject: so the limit is above 1. nats-server's own MQTT listener does not send the
    header, and removes a record by its sequence alone; above the limit of 1 the record before would take its place at
    once. With `max_retained`, or `discard` = `new` from an operator, nats-server refuses to replace a record in a full
    stream above the limit of 1. Raises NotAnswering, StreamSetupError.
    """
    try:
        retained = await _info(js, RETAINED)
        listener = await listener_has_clients(js) if retained else False
    except (NoResponders, RequestTimeout):
        raise NotAnswering("JetStream does not say who writes to the streams; check that it has a leader") from None
    except ApiError as error:
        raise StreamSetupError(_refusal("who writes to the streams cannot be looked up", error)) from None
    refusing = retained is not None and retained["config"].get("discard") == "new"
    single = {RETAINED: "the number of retained messages is limited"} if refusing or max_retained is not None else {}
    if listener:
        single |= dict.fromkeys((SESSIONS, RETAINED), "nats-server's own MQTT listener has clients")
    return single


def _message_limits(definition: dict[str, Any], message_retention: int, message_ids: str) -> dict[str, Any]:
    """Return the settings of `$MQTT_msgs` that follow from the arguments of `ensure_streams`."""
    max_age = message_retention * _NS
    window = min(definition["duplicate_window"], max_age)  # nats-server refuses a longer one than the age limit
    if with_ids(message_ids, definition["num_replicas"]):
        window = min(window, IDS_WINDOW)
    return {"max_age": max_age, "duplicate_window": window}


def _has_been_used(info: dict[str, Any] | None) -> bool:
    """Whether a message was ever stored; a stream that another gateway creates at this moment has none."""
    return info is not None and not str(info["state"].get("last_ts", _NEVER)).startswith(_NEVER)


def with_ids(message_ids: str, replicas: int) -> bool:
    """Whether every message is stored under an id in a stream with this number of replicas."""
    return message_ids == "always" or (message_ids == "replicated" and replicas > 1)


async def _ensure(
    js: JetStream,
    report: EnsureReport,
    definition: dict[str, Any],
    info: dict[str, Any] | None,
    level: _Replicas,
) -> None:
    stream = definition["name"]
    if info is None:
        answer = await _create(js, definition, level)
        if answer is not None:
            report.created.append(stream)
            report.configs[stream] = answer["config"]
            remains = (answer.get("state") or {}).get("messages", 0)
            if remains and answer.get("did_create"):
                report.remains[stream] = remains
            return
        info = await _info(js, stream)  # another gateway, or nats-server's listener, has created the stream
        if info is None:
            raise NotAnswering(f"stream {stream} is being created or removed by another program; try again")
    await _reconcile(js, report, definition, info, level)


async def _account(js: JetStream) -> dict[str, Any]:
    try:
        return await call(js, "INFO")
    except NoLeader as error:
        raise NotAnswering(f"JetStream cannot be used: {error}") from None
    except NoResponders:
        if js.api_prefix != api_prefix(None):
            raise StreamSetupError(
                f"no JetStream answers to {js.api_prefix}.INFO; check the name of the domain in jetstream_domain, and "
                "the leafnode connection to its nats-servers"
            ) from None
        raise StreamSetupError(
            "no JetStream here; start nats-server with -js or a jetstream {} block, and enable it for the account, or "
            "set jetstream_domain to the domain of the hub if this nats-server is a leafnode"
        ) from None
    except RequestTimeout:
        raise NotAnswering(
            "JetStream does not answer; check that its cluster has a leader and the NATS user may publish "
            f"{js.api_prefix}.>"
        ) from None
    except ApiError as error:
        raise StreamSetupError(_refusal("JetStream cannot be used", error)) from None


async def check_own_streams(js: JetStream, domain: str) -> None:
    """Check that no other domain stores the gateways' messages, too: they are published on the same subjects.

    `domain`: that of the streams in use. Where the account's own servers have another one, no stream there may take
    messages of gateways. Raises StreamSetupError.
    """
    try:
        own = decode((await js.request(f"{api_prefix(None)}.INFO")).payload).get("domain", "")
        body = orjson.dumps({"subject": f"{MESSAGE_PREFIX}>"})
        found = decode((await js.request(f"{api_prefix(None)}.STREAM.NAMES", body)).payload).get("streams")
    except (ApiError, NoResponders, RequestTimeout):
        return
    if found and own != domain:
        raise StreamSetupError(
            f"messages would be stored twice: this account has {', '.join(found)} in its own JetStream (domain "
            f"{own!r}), too; remove jetstream_domain to use that one, or the streams of gateways there"
        )


async def _request(js: JetStream, verb: str, stream: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        return await call(js, f"STREAM.{verb}.{stream}", body)
    except (NoResponders, RequestTimeout):
        raise NotAnswering(
            f"no answer to {js.api_prefix}.STREAM.{verb}.{stream}; "
            "check that JetStream has a leader and the NATS user may publish there"
        ) from None


async def _info(js: JetStream, stream: str) -> dict[str, Any] | None:
    try:
        return await _request(js, "INFO", stream)
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return None
        raise StreamSetupError(_refusal(f"stream {stream} cannot be looked up", error)) from None


async def _create(js: JetStream, definition: dict[str, Any], level: _Replicas) -> dict[str, Any] | None:
    """Create a stream and return JetStream's answer; None when a stream of this name exists meanwhile."""
    stream = definition["name"]
    if stream in NEVER_AGAIN:
        definition = definition | {"first_seq": time.time_ns() // 1000}  # a stream gets less than 1 message per µs
    try:
        return await _request(js, "CREATE", stream, definition)
    except ApiError as error:
        if error.err_code == STREAM_NAME_EXISTS:
            return None
        if error.err_code == SUBJECTS_OVERLAP:
            raise await _overlap(js, stream, definition["subjects"][0]) from None
        if error.err_code == STREAM_CREATE_FAILED:
            raise StillThere(_refusal(f"stream {stream} cannot be created", error)) from None
        level.refused(error)
        raise StreamSetupError(_refusal(f"stream {stream} cannot be created", error)) from None


async def _overlap(js: JetStream, stream: str, subject: str) -> StreamSetupError:
    try:
        others = (await call(js, "STREAM.NAMES", {"subject": subject})).get("streams") or []
    except (ApiError, NoResponders, RequestTimeout):
        others = []
    names = ", ".join(others) or "another stream"
    return StreamSetupError(
        f"stream {stream} cannot be created: {names} takes {subject} too; remove that subject there"
    )


def _refusal(what: str, error: ApiError) -> str:
    hint = _HINTS.get(error.err_code)
    text = " ".join(str(error).split())
    return f"{what}: {text}; {hint}" if hint else f"{what}: {text}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def shown(setting: str, value: Any) -> str:
    """Return the value of a stream's setting as readable text: nanoseconds as `3d`, `90s`."""
    if setting not in _DURATIONS or not isinstance(value, int):
        return _text(value)
    if value <= 0:
        return "unlimited"
    unit, size = next(((unit, size) for unit, size in _UNITS if not value % size), ("ns", 1))
    return f"{value // size}{unit}"


def _limit(value: Any) -> float:
    """Return a limit as a comparable number: infinity for -1 and 0, which mean no limit."""
    return value if isinstance(value, int) and value > 0 else float("inf")


def _check(stream: str, definition: dict[str, Any], config: dict[str, Any], domain: str) -> None:
    """Raise StreamConflict for a difference that an update cannot, or must not, remove."""
    subjects = config.get("subjects") or []
    accepted = [definition["subjects"]]
    if stream == SESSIONS and domain:
        accepted.append([f"{SESSION_PREFIX}{domain}.>"])
    # Only the stream of messages may have sources; the records in the other streams come from gateways only.
    if config.get("mirror") or (config.get("sources") and stream != MESSAGES):
        raise StreamConflict(stream, "its content", "copied from another stream", "its own")
    if subjects not in accepted:
        raise StreamConflict(stream, "subjects", subjects, definition["subjects"])
    retentions = ("limits", "interest") if stream == MESSAGES else (definition["retention"],)
    if config.get("retention") not in retentions:
        raise StreamConflict(
            stream,
            "retention",
            config.get("retention"),
            " or ".join(retentions),
            "it cannot be changed: remove the stream if its content may go",
        )
    per_subject = definition["max_msgs_per_subject"]
    legal = {1, load_definition(stream)["max_msgs_per_subject"]} if stream in RECORDS else {_limit(per_subject)}
    if _limit(config.get("max_msgs_per_subject")) not in legal:
        raise StreamConflict(stream, "max_msgs_per_subject", config.get("max_msgs_per_subject"), per_subject)
    if stream not in (MESSAGES, RETAINED) and config.get("discard") != definition["discard"]:
        raise StreamConflict(stream, "discard", config.get("discard"), definition["discard"])
    for setting in ("discard_new_per_subject", "sealed", "no_ack", "deny_delete", "deny_purge"):
        if bool(config.get(setting)) != bool(definition.get(setting)):
            raise StreamConflict(stream, setting, bool(config.get(setting)), bool(definition.get(setting)))
    if config.get("subject_transform"):
        raise StreamConflict(stream, "subject_transform", config["subject_transform"], "absent")


def _changes(
    definition: dict[str, Any], config: dict[str, Any], state: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings to update, and remarks on differences that stay."""
    changes: dict[str, Any] = {}
    remarks: list[str] = []
    for switch in _SWITCHES:
        if definition.get(switch) and not config.get(switch):
            changes[switch] = True
    if _limit(definition["max_consumers"]) != float("inf"):
        present = config.get("max_consumers", -1)
        if present <= 0 or present < definition["max_consumers"]:
            changes["max_consumers"] = definition["max_consumers"]
    if definition["name"] in RECORDS and config.get("max_msgs_per_subject") != definition["max_msgs_per_subject"]:
        changes["max_msgs_per_subject"] = definition["max_msgs_per_subject"]
    if config.get("num_replicas", 1) < definition["num_replicas"]:
        changes["num_replicas"] = definition["num_replicas"]
    elif config.get("num_replicas", 1) > definition["num_replicas"]:
        remarks.append(f"num_replicas is {config['num_replicas']}, stream_replicas says {definition['num_replicas']}")
    if config["retention"] != definition["retention"]:
        changes["retention"] = definition["retention"]
        definition = definition | {"max_age": max(definition["max_age"], 2 * _oldest(state))}
    for limit in _LIMITS:
        if _limit(config.get(limit)) != _limit(definition[limit]):
            to, remark = _change_of_limit(limit, definition, config, state["messages"])
            changes |= to
            remarks += remark
    window = changes.get("max_age", 0)
    if window and config.get("duplicate_window", 0) > window:
        changes["duplicate_window"] = window
    elif config.get("duplicate_window") == _DEFAULT_WINDOW and definition["duplicate_window"] == IDS_WINDOW:
        changes["duplicate_window"] = IDS_WINDOW
    if config.get("storage") != definition["storage"]:
        remarks.append(f"storage is {config.get('storage')}: its content does not outlive nats-server")
    return changes, remarks


def _oldest(state: dict[str, Any]) -> int:
    """Return the age of a stream's oldest message in nanoseconds, in whole seconds; 0 = it has none."""
    age = time.time_ns() - time_ns(state["first_ts"]) if state["messages"] else 0
    return max(-(-age // _NS), 0) * _NS


def _change_of_limit(
    limit: str, definition: dict[str, Any], config: dict[str, Any], messages: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings to update for a limit that differs, and remarks on a difference that stays.

    The age limit may grow; it shrinks only where nothing is stored, or where there was none beside interest retention.
    """
    policies = definition["discard"], config.get("discard")
    if limit == "max_msgs" and definition["name"] == RETAINED and "new" in policies:
        changes = {limit: definition[limit]}  # a limit of gateways: with discard=new no message is removed
        bounded = _limit(config.get("max_bytes")) != float("inf")  # by an administrator: keeps discard=new
        if policies == ("new", "old") or (policies == ("old", "new") and not bounded):
            changes["discard"] = definition["discard"]
        return changes, []
    own = limit == "max_age" and definition["name"] == MESSAGES
    grows = _limit(definition[limit]) > _limit(config.get(limit))
    if own and (grows or messages == 0 or config["retention"] == "interest"):
        return {limit: definition[limit]}, []
    says = "message_retention says" if own else "the definition says"
    return {}, [f"{limit} is {shown(limit, config.get(limit))}, {says} {shown(limit, definition[limit])}"]


async def _reconcile(
    js: JetStream,
    report: EnsureReport,
    definition: dict[str, Any],
    info: dict[str, Any],
    level: _Replicas,
) -> None:
    stream = definition["name"]
    config = info["config"]
    _check(stream, definition, config, report.domain)
    changes, remarks = _changes(definition, config, info["state"])
    if changes:
        config = await _update(js, stream, config, changes, remarks, level)
    done = [name for name in changes if config.get(name) == changes[name]]
    if done:
        report.upgraded[stream] = done
    report.kept.extend(f"stream {stream}: {remark}" for remark in remarks)
    report.configs[stream] = config


async def _update(
    js: JetStream,
    stream: str,
    config: dict[str, Any],
    changes: dict[str, Any],
    remarks: list[str],
    level: _Replicas,
) -> dict[str, Any]:
    """Apply changes; `max_consumers` may fail: nats-server before 2.15 cannot change it (and does not need it)."""

    async def attempt(wanted: dict[str, Any]) -> dict[str, Any]:
        updated: dict[str, Any] = (await _request(js, "UPDATE", stream, config | wanted))["config"]
        return updated

    try:
        try:
            return await attempt(changes)
        except ApiError as error:
            if "num_replicas" in changes:
                level.refused(error)
            rest = {name: value for name, value in changes.items() if name != "max_consumers"}
            if len(rest) == len(changes):
                raise
            remarks.append(f"max_consumers is {config.get('max_consumers')} and cannot be changed on this nats-server")
            return await attempt(rest) if rest else config
    except ApiError as error:
        setting = next(iter(changes))
        raise StreamConflict(
            stream,
            setting,
            config.get(setting, "unset"),
            changes[setting],
            _refusal("the update was refused", error),
        ) from None
