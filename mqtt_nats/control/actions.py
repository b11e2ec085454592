# SPDX-License-Identifier: Apache-2.0
"""Answers to questions about counters, listeners, hooks and rules, and actions on request."""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from mqtt_nats.access.acl import Identity, Permissions, Rule, Rules
from mqtt_nats.base.logs import levels, set_level
from mqtt_nats.base.networks import parse_host
from mqtt_nats.codec import MqttError, validate_topic_filter, validate_topic_name
from mqtt_nats.codec.topics import MAX_BYTES
from mqtt_nats.control.selection import CONNECTED, RECONNECTED, Refusal, sliced
from mqtt_nats.control.snapshot import snapshot
from mqtt_nats.hooks.points import CLIENT_AUTHORIZE, SESSION_TERMINATED
from mqtt_nats.hooks.session_notices import session
from mqtt_nats.ingress.server_publish import unretain
from mqtt_nats.lifecycle.expiry import end_session
from mqtt_nats.observability.message_log import follow
from mqtt_nats.plugins.host import Host
from mqtt_streams.consumers import consumer_info
from mqtt_streams.hashing import name_hash, registered_as
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.sessions import PoisonedRecord, SessionRecord
from mqtt_streams.stored import get_sequence

if TYPE_CHECKING:
    from mqtt_nats.client.account import Account
    from mqtt_nats.control.server import Control

log = logging.getLogger("mqtt_nats.audit")


async def _counters(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    yield await snapshot(control.account)


async def _history(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    if control.powers.history is None:
        raise Refusal("the history of a gateway is shown in its own account only")
    for point in control.powers.history.since(float(question.get("since") or 0.0)):
        yield point


async def _listeners(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    general = control.account.services.settings
    for listener in control.powers.doors:
        settings = listener.settings
        yield {
            "listen": [str(one) for one in listener.bound] or [settings.listen],
            "type": settings.type,
            "connections": listener.connections,
            "max_connections": settings.max_connections,
            "authenticators": [] if settings.use_identity else list(general.chain_of(settings)),
            "anonymous": not settings.use_identity and general.is_open(settings),
            "use_identity": settings.use_identity,
        }


async def _hooks(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    for one in control.account.services.hooks.accounts():
        yield one._asdict()


# -- rules --------------------------------------------------------------------------------------------


async def _acl(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """Yield the decision of the rules about one user and one topic, at every QoS, and the deciding rule."""
    account = control.account
    topic, asked = str(question.get("topic")), question.get("access")
    name = str(question.get("client") or "")
    client = account.registry.find(name) if name else None
    user = question.get("user")
    if client is not None and client.user == user:
        address = question.get("address") or client.connection.host
        groups, own = client.granted.groups, client.granted.rules
    else:
        client, address, groups, own = None, question.get("address") or "", frozenset(), None
    if address and parse_host(address) is None:
        raise Refusal(f"{address!r} is not an IP address")
    identity = Identity(user, name, address, groups | frozenset(question.get("groups") or ()))
    accesses: list[Literal["publish", "subscribe"]] = []
    if asked != "subscribe" and (asked or _is_topic(topic)):
        accesses.append("publish")
    if asked != "publish":
        accesses.append("subscribe")
    try:
        for access in accesses:
            if access == "publish":
                _check(topic)
            else:
                validate_topic_filter(topic)
        parts: list[tuple[str, Rules | None, Permissions]] = []
        if account.rules.present is not None:
            parts.append(("the ACL file", account.rules.present, account.rules.present.permissions(identity)))
        if own is not None:
            source = own if isinstance(own, Rules) else None
            parts.append(("the client's own rules", source, own.permissions(identity)))
    except MqttError as error:
        raise Refusal(f"{topic!r}: {error}") from None
    except ValueError as error:
        raise Refusal(str(error)) from None
    touching = account.services.settings.acl_subscribe == "deliver"
    for access in accesses:
        for qos in (0, 1, 2) if question.get("qos") is None else (int(question["qos"]),):
            allowed, why = _decision(parts, access, topic, qos, bool(question.get("retain")), touching)
            yield {
                "access": access,
                "qos": qos,
                "allowed": allowed,
                "why": why,
                "connected": client is not None,
                "hooks": account.services.hooks.deciding(CLIENT_AUTHORIZE) is not None,
            }


def _check(topic: str) -> None:
    """Check a topic name. Raises MqttError, ValueError: the text is no topic name."""
    encoded = topic.encode()
    if len(encoded) > MAX_BYTES:
        raise ValueError(f"the topic name has more than {MAX_BYTES} bytes")
    validate_topic_name(len(encoded).to_bytes(2) + encoded)


def _is_topic(text: str) -> bool:
    return "+" not in text and "#" not in text


def _decision(
    parts: Sequence[tuple[str, Rules | None, Permissions]],
    access: Literal["publish", "subscribe"],
    topic: str,
    qos: int,
    retain: bool,
    touching: bool,
) -> tuple[bool, str]:
    """Return whether the access is allowed, and the deciding part: the one that denies it, or the last one."""
    allowed, why = True, "there are no rules"
    for name, rules, permissions in parts:
        allowed, rule = permissions.explain(access, topic, qos, retain, touching)
        if rule is not None and rules is not None:
            number = next(at for at, each in enumerate(rules.rules, 1) if each is rule)
            why = f"{name}, rule {number}: {_said(rule)}"
        else:
            why = f"{name}: no rule applies" if rules is not None else name
        if not allowed:
            break
    return allowed, why


def _said(rule: Rule) -> str:
    what = {"both": "publish and subscribe"}.get(rule.access, rule.access)
    text = f"{'allow' if rule.allow else 'deny'} {what} {', '.join(one.text for one in rule.topics)}"
    if rule.qos is not None:
        text += f" at QoS {', '.join(map(str, sorted(rule.qos)))}"
    if rule.retain is not None:
        text += " retained" if rule.retain else " not retained"
    return text


# -- actions ------------------------------------------------------------------------------------------


async def _publish(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    topic, payload = str(question.get("topic")), b64decode(question.get("payload") or "")
    try:
        _check(topic)
        host = Host(control.account, "mqtt-nats ctl")
        await host.publish(
            topic, payload, int(question.get("qos") or 0), bool(question.get("retain")), question.get("properties")
        )
    except MqttError as error:
        raise Refusal(f"{topic!r}: {error}") from None
    except ValueError as error:
        raise Refusal(str(error)) from None
    yield {"topic": topic, "bytes": len(payload)}


async def _unretain(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    for topic in list(question.get("topics") or ()):
        try:
            _check(str(topic))
            told = await unretain(control.account.ingress, str(topic))
        except (MqttError, ValueError) as error:
            raise Refusal(f"{topic!r}: {error}") from None
        yield {"topic": topic, "told": told}


async def _end_sessions(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """End sessions whose clients are not connected, and remove everything that is stored for them."""
    account = control.account
    written = question.get("written")
    async for name in sliced(list(question.get("clients") or ())):
        sequence = written.get(name) if isinstance(written, dict) else None
        yield {"client": name, "why": await _end(control, str(name), sequence)}
    account.services.nats.link.kick()


async def _end(control: Control, name: str, written: object) -> str:
    """End one session; return "" when it has ended, else the reason why not.

    Args:
        written: sequence of its record before the gateways were asked for connected clients; None: not known.
    """
    account = control.account
    try:
        key = await _key(account, name, written)
        if registered_as(name, key) in account.registry.clients:
            return CONNECTED
        found = await account.services.streams.sessions.load(key, name)
        if found is None:
            return "there is no such session"
        record, sequence = found
        if written is not None and sequence != written:
            return RECONNECTED
        if record.v5 is None and await _is_heard(account, record):
            return "the client seems to be connected to nats-server's own listener"
        await end_session(account.wills, *found)
        if await account.services.streams.sessions.load(key, name) is not None:
            return RECONNECTED
    except PoisonedRecord as error:
        return str(error)
    log.warning("the session of %r is ended by an administrator", name)
    session(account.services.hooks, SESSION_TERMINATED, name, found[1])
    return ""


async def _key(account: Account, name: str, written: object) -> str:
    """Return the key of a client's session: from the record ``written`` if it exists, else the first key."""
    message = (
        await get_sequence(account.services.nats.inbox, SESSIONS, written)
        if isinstance(written, int) and written
        else None
    )
    return name_hash(name) if message is None else message.subject.rpartition(".")[2]


async def _is_heard(account: Account, record: SessionRecord) -> bool:
    """Whether the deliver subject of a consumer of the session has interest."""
    for ref in record.cons.values():
        info = await consumer_info(account.services.nats.inbox, MESSAGES, ref.durable_name)
        if info is not None and info.push_bound:
            return True
    return False


async def _drain(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    if not question.get("gateway"):
        raise Refusal("name one gateway")
    if control.powers.stop is None:
        raise Refusal("a gateway can be drained only from its own account")
    log.warning("an administrator drains the gateway: it disconnects all clients and stops")
    control.powers.stop()
    connections = len(control.account.registry.connections)
    yield {"connections": connections, "seconds": control.account.services.settings.drain_seconds(connections)}


async def _log_levels(control: Control, question: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """Set the level of a logger, if the question has one; yield the levels in force, of all loggers or of this one."""
    logger, level = str(question.get("logger") or ""), str(question.get("level") or "")
    if control.powers.stop is None:
        raise Refusal("the log levels of a gateway belong to its own account")
    if level:
        try:
            set_level(logger, level)
        except ValueError as error:
            raise Refusal(str(error)) from None
        log.warning("an administrator has set the log level of %s to %s", logger, level)
        for account in control.account.accounts.values():
            follow(account.services.hooks)
    for name, found in levels().items():
        if name == logger or not level:
            yield {"logger": name, "level": found}


ANSWERS: Final = {
    "log.levels": _log_levels,
    "counters": _counters,
    "history": _history,
    "listeners": _listeners,
    "hooks": _hooks,
    "acl": _acl,
    "publish": _publish,
    "unretain": _unretain,
    "sessions.end": _end_sessions,
    "drain": _drain,
}
