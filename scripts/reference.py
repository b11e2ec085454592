# SPDX-License-Identifier: Apache-2.0
"""Write the tables of the reference pages, from the models and the code: ``python -m scripts.reference``.

What stands between ``<!-- begin: NAME -->`` and ``<!-- end -->`` in a page is replaced; the rest is written by hand.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from mqtt_nats.access.settings import KINDS
from mqtt_nats.base.limit_settings import ClientLimits, with_unit
from mqtt_nats.codec import errors
from mqtt_nats.codec.reasons import ConnackCode, ReasonCode, connack_code
from mqtt_nats.config.options import default_text
from mqtt_nats.config.settings import Settings, flag_name, has_flag
from mqtt_nats.transport.listener_settings import ListenerSettings
from mqtt_streams.definitions import EVERY, load_definition
from scripts import comparison, delivery_states, packages

ROOT: Final = Path(__file__).parents[1]

WHEN: Final = {
    "SUCCESS": "Done. In DISCONNECT: the client ends the connection, and its will is discarded.",
    "GRANTED_QOS_1": "SUBACK: the subscription is granted with at most QoS 1.",
    "GRANTED_QOS_2": "SUBACK: the subscription is granted with QoS 2.",
    "DISCONNECT_WITH_WILL": "From clients: the connection ends, and the will is published all the same.",
    "NO_MATCHING_SUBSCRIBERS": "Not sent: a gateway does not know who subscribes elsewhere.",
    "NO_SUBSCRIPTION_EXISTED": "UNSUBACK: there was no such subscription.",
    "CONTINUE_AUTHENTICATION": "AUTH: the next step of enhanced authentication.",
    "REAUTHENTICATE": "AUTH, from clients: authenticate again on the same connection.",
    "UNSPECIFIED_ERROR": (
        "What has no code of its own: an error of the gateway, which is in its log with a traceback; a hook that "
        "refuses without a reason; JetStream has refused to store a message."
    ),
    "MALFORMED_PACKET": "The bytes are not MQTT.",
    "PROTOCOL_ERROR": "The packet is understood, and not allowed here or with this content.",
    "IMPLEMENTATION_SPECIFIC_ERROR": "Only where a hook says so.",
    "UNSUPPORTED_PROTOCOL_VERSION": "CONNACK: neither MQTT 3.1, 3.1.1 nor 5.0.",
    "CLIENT_IDENTIFIER_NOT_VALID": "CONNACK: an empty client id of a client of 3.1, or of 3.1.1 that wants a session.",
    "BAD_USER_NAME_OR_PASSWORD": "CONNACK: no authenticator lets this client in.",
    "NOT_AUTHORIZED": (
        "The ACL, the NATS user or a hook forbids it; credentials have expired; a topic that NATS or the gateways "
        "need themselves; an answer to a request that was not for this client."
    ),
    "SERVER_UNAVAILABLE": (
        "NATS or JetStream does not answer, or the session can only be served by a newer gateway: try again, "
        "elsewhere if there is an elsewhere."
    ),
    "SERVER_BUSY": (
        "Try again in a moment: too many are being authenticated or claim this session, or the stream wasreplaced."
    ),
    "BANNED": "CONNACK: the client id, user or address is banned (`mqtt-nats ctl bans list`).",
    "SERVER_SHUTTING_DOWN": "DISCONNECT: the gateway stops.",
    "BAD_AUTHENTICATION_METHOD": "The method of enhanced authentication is not served here, or is not that of CONNECT.",
    "KEEP_ALIVE_TIMEOUT": "DISCONNECT: nothing came for one and a half times the keep alive.",
    "SESSION_TAKEN_OVER": "DISCONNECT: another connection has come with the same client id, at whichever gateway.",
    "TOPIC_FILTER_INVALID": "SUBACK, UNSUBACK: the filter is longer or deeper than the limits.",
    "TOPIC_NAME_INVALID": "PUBACK, PUBREC, DISCONNECT: the topic is not legal, or longer or deeper than the limits.",
    "PACKET_IDENTIFIER_IN_USE": "Not sent by a gateway: a repeated identifier is the same publish again.",
    "PACKET_IDENTIFIER_NOT_FOUND": "PUBREL, PUBCOMP: nothing is known of this identifier.",
    "RECEIVE_MAXIMUM_EXCEEDED": "DISCONNECT: more publishes without acknowledgement than `receive_maximum` allows.",
    "TOPIC_ALIAS_INVALID": "DISCONNECT: an alias above `topic_alias_maximum`, or one that stands for no topic.",
    "PACKET_TOO_LARGE": "Larger than `max_packet_size`, or than nats-server takes (`max_payload`), headers included.",
    "MESSAGE_RATE_TOO_HIGH": (
        "DISCONNECT: so far above `message_rate` or `byte_rate` that a pause of `rate_pause` would not do."
    ),
    "QUOTA_EXCEEDED": (
        "A limit of the configuration: subscriptions, filters in a packet, user properties, publishes held at QoS "
        "2, retained messages, or what waits for a client that does not read."
    ),
    "ADMINISTRATIVE_ACTION": "DISCONNECT: somebody has ended the connection, or banned the client.",
    "PAYLOAD_FORMAT_INVALID": "With `validate_payload_format`: the payload is not the text that it is said to be.",
    "RETAIN_NOT_SUPPORTED": "Not sent.",
    "QOS_NOT_SUPPORTED": "Above `max_qos`.",
    "USE_ANOTHER_SERVER": "DISCONNECT: the gateway stops, and `server_reference` says where to go.",
    "SERVER_MOVED": "Not sent.",
    "SHARED_SUBSCRIPTIONS_NOT_SUPPORTED": "Not sent.",
    "CONNECTION_RATE_EXCEEDED": "CONNACK: `connect_rate` is exceeded; CONNECT would wait for more than four seconds.",
    "MAXIMUM_CONNECT_TIME": "DISCONNECT: the credentials have expired, a token's `exp` for instance.",
    "SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED": "Not sent.",
    "WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED": "Not sent.",
}
"""Condition of each reason code; those of which nothing else can be read from the code begin with "Not sent"."""


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([_row(*heading), "|" + "---|" * len(heading), *(_row(*row) for row in rows)])


def _default(field: Any) -> str:
    return "needed" if field.is_required() else f"`{default_text(with_unit(field.default, field))}`"


def settings(limits: bool) -> str:
    """The settings of the gateway, those that bound clients or the others."""
    rows = [
        (
            f"`{name}`",
            f"`{flag_name(name)}`" if has_flag(name) else "–",
            f"`{default_text(with_unit(field.default, field))}`",
            field.description or "",
        )
        for name, field in Settings.model_fields.items()
        if (name in LIMITS) == limits
    ]
    return _table(["limit" if limits else "setting", "flag", "default", "meaning"], rows)


LIMITS: Final = frozenset(ClientLimits.model_fields)


def listeners() -> str:
    """Return the table of the settings of a listener."""
    fields = ListenerSettings.model_fields.items()
    rows = [(f"`{name}`", _default(field), field.description or "") for name, field in fields]
    return _table(["of a listener", "default", "meaning"], rows)


def authenticators() -> str:
    """Return the table of the settings of an authenticator, by its type."""
    rows = [
        (f"`{kind}.{name}`", _default(field), field.description or "")
        for kind, model in KINDS.items()
        for name, field in model.model_fields.items()
        if name not in ("name", "type", "tenant")
    ]
    return _table(["of an authenticator", "default", "meaning"], rows)


def _text(node: ast.expr) -> str:
    """Return the text that an expression makes; empty where the text is not known before the expression runs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values)
    return ""


def said() -> tuple[dict[ReasonCode, list[str]], set[ReasonCode]]:
    """The texts of errors by their reason code, and the codes that the source of the gateway names at all."""
    kinds = {
        name: kind.reason
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.MqttError)
    }
    texts: dict[ReasonCode, set[str]] = {code: set() for code in ReasonCode}
    named: set[ReasonCode] = set()
    for path in sorted((ROOT / "mqtt_nats").rglob("*.py")):
        if path.name == "reasons.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and (code := _code(node)) is not None:
                named.add(code)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                given = [_code(one) for one in (*node.args[1:], *(word.value for word in node.keywords))]
                code = next((one for one in given if one is not None), kinds[node.func.id])
                named.add(code)
                if node.args and (text := _text(node.args[0])):
                    texts[code].add(text)
    return {code: sorted(found) for code, found in texts.items()}, named


def _code(node: ast.expr) -> ReasonCode | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ReasonCode":
        return ReasonCode.__members__.get(node.attr)
    return None


def reasons() -> str:
    """Return the table of reason codes, each with its condition."""
    rows = []
    for code in ReasonCode:
        old = connack_code(code)
        own = old is not ConnackCode.SERVER_UNAVAILABLE or code is ReasonCode.SERVER_UNAVAILABLE
        name = code.name.replace("_", " ").capitalize().replace("qos", "QoS").replace("Qos", "QoS")
        rows.append((f"`0x{code:02X}`", name, str(old.value) if own else "", WHEN[code.name]))
    return _table(["code", "name", "3.1.1", "when"], rows)


def texts() -> str:
    """Return the table of the texts of each reason code, in the log and to 5.0 clients."""
    found, _ = said()
    rows = [(f"`0x{code:02X}`", f"`{one}`".replace("|", r"\|")) for code, lines in found.items() for one in lines]
    return _table(["code", "text"], rows)


def streams() -> str:
    """The definitions of the streams."""
    rows = []
    for name in EVERY:
        found = load_definition(name)
        subjects = ", ".join(f"`{one}`" for one in found["subjects"])
        rows.append((f"`{name}`", found["description"], subjects, found["retention"], _features(found)))
    return _table(["stream", "content", "subjects", "retention", "besides"], rows)


def _features(found: dict[str, Any]) -> str:
    parts = []
    if found["max_msgs_per_subject"] > 0:
        parts.append(f"{found['max_msgs_per_subject']} per subject")
    if found["discard"] == "new":
        parts.append("refuses when full")
    parts += [
        text
        for name, text in (
            ("allow_msg_ttl", "messages with a TTL"),
            ("allow_msg_schedules", "scheduled messages"),
            ("deny_delete", "no deletes"),
        )
        if found.get(name)
    ]
    return ", ".join(parts)


TABLES: Final[dict[str, Callable[[], str]]] = {
    "settings": lambda: settings(False),
    "limits": lambda: settings(True),
    "listeners": listeners,
    "authenticators": authenticators,
    "reasons": reasons,
    "texts": texts,
    "streams": streams,
    "packages": packages.table,
    "package_diagram": packages.diagram,
    "comparison": comparison.table,
    "delivery_states": delivery_states.diagram,
    **{f"neighbours_{name}": partial(packages.neighbours, name) for name in packages.PACKAGES},
}

_PART: Final = re.compile(r"<!-- begin: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def pages() -> list[Path]:
    """Return every page that has generated parts."""
    found = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    return [path for path in found if _PART.search(path.read_text(encoding="utf-8"))]


def generated(path: Path) -> str:
    """Return the text of a page, with its generated parts as they should be."""
    text = path.read_text(encoding="utf-8")
    return _PART.sub(lambda one: f"<!-- begin: {one[1]} -->\n{TABLES[one[1]]()}\n<!-- end -->", text)


def main() -> int:
    """Write the pages that are not current."""
    for path in pages():
        text = generated(path)
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
