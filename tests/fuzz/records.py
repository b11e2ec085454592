# SPDX-License-Identifier: Apache-2.0
"""Mutated session records."""

from __future__ import annotations

from typing import Any, Final

import orjson

import mqtt_streams.fields
import mqtt_streams.sessions
from mqtt_streams import sessions
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.hashing import name_hash, second_key
from mqtt_streams.sessions import (
    FIRST,
    V5,
    V5_VERSION,
    Draining,
    NewerRecord,
    PoisonedRecord,
    SessionRecord,
    SharedSubscription,
    SubscriptionOptions,
)
from tests.fuzz.engine import Input, Target, Unexpected, expect
from tests.fuzz.mutation import of_json

CLIENT_ID: Final = "fuzz"
USER: Final = "ann"
_HASH: Final = name_hash(CLIENT_ID)
_SECOND: Final = second_key(CLIENT_ID, USER)
KEYS: Final = ("", _HASH, _SECOND)
"""Variants, by the last token of the subject: not known, the hash of the client id, the user's second key."""

_NAMES: Final = frozenset(" \t\r\n\f\v\0\x7f.*>")
"""Characters that would change the subject in which the name of a consumer stands."""

_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, 2, 3, -1, 5, 65_535, 65_536, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64),
    *(0.5, -0.0, 1e308, "", "a", "fuzz", "durable", "regular", ">", "*", "a.>", "$MQTT.msgs.>", "$MQTT.sub.x", "a b"),
    *(_SECOND, f"{_SECOND}_x", USER),
    *("\0", "\ud800", "x" * 70, f"{_HASH}_x", f"$MQTT_PUBREL_{_HASH}", [], {}, [1], {"a": 1}, [[]], {"": {}}),
)


def _consumer(name: str, subject: str, start: int | None = None, key: str = _HASH) -> ConsumerRef:
    return ConsumerRef(f"{key}_{name}", f"$MQTT.sub.{name}", f"$MQTT.msgs.{subject}", 100, start_seq=start)


def seeds() -> list[Input]:
    """Records that are right: of nats-server's listener, with everything that there is, at a second key."""
    plain = SessionRecord(CLIENT_ID, "server", False, {"a.b": 1}, {"a.b": _consumer("n", "a.b")})
    full = V5(
        *("durable", 3600, "gateway", "nonce", True, 1.5e9),
        {"a.>": SubscriptionOptions("a/#", True, True, 1, 7), "a": SubscriptionOptions("a/#")},
        {"a.>": 17, "a.> fwc": 18},
        [Draining(f"{_HASH}_old", "$MQTT.msgs.old", 1, 40, 3, True)],
        {"a.>": 5},
        {"a.>": (2, 30)},
        ["other"],
        {"$share/group/x/#": SharedSubscription(1, True, 9, 11)},
        *("generation", 12, "position", 10, FIRST),
        leaving=["$share/group/y"],
    )
    records = [
        SessionRecord(""),
        plain,
        SessionRecord(CLIENT_ID, "gateway", True, v5=V5("regular", 0)),
        SessionRecord(
            CLIENT_ID,
            "gateway",
            False,
            {"a.>": 2, "a": 2},
            {"a.>": _consumer("n", "a.>", 3), "a.> fwc": _consumer("m", "a")},
            v5=full,
            extra={"later": [1]},
        ),
    ]
    second = SessionRecord(
        CLIENT_ID, "gateway", subs={"a": 1}, cons={"a": _consumer("n", "a", key=_SECOND)}, v5=V5(user=USER, quota="q")
    )
    newer = {"id": CLIENT_ID, "v5": {"version": V5_VERSION + 1, "anything": True}}
    stored = [*(one.encode() for one in records), orjson.dumps(newer)]
    return [*((variant, one) for variant in (0, 1) for one in stored), (2, second.encode())]


def check(one: Input, number: int) -> tuple[int, bool]:
    """Any bytes give a record, PoisonedRecord or NewerRecord.

    A record that is written and read again is the same, with its user and its unknown keys. A record is stored at
    the hash of its client id, or at the second key, which is made of client id and user. A record names only
    consumers of that key, and each name is one token of a subject. A record of another client id is refused. A
    record of a newer version is NewerRecord, whatever else it has.
    """
    variant, data = one
    key = KEYS[variant]
    try:
        record = sessions.decode(data, key=key)
    except NewerRecord:
        return 0, True
    except PoisonedRecord as error:
        expect(not _is_newer(data), f"a newer record is taken for a broken one: {error}")
        expect(len(str(error)) < 1000, f"the error has {len(str(error))} characters")
        return 0, True
    except Exception as error:
        raise Unexpected(f"{type(error).__name__}: {error}") from error
    expect(not _is_newer(data), "a newer record is read")
    names = [*(each.durable_name for each in record.cons.values())]
    if record.v5 is not None:
        names += [each.name for each in record.v5.draining]
        expect(all(_NAMES.isdisjoint(name) for name in record.v5.wills), "the name of a gateway is no token")
    user = record.v5.user if record.v5 is not None else None
    own = name_hash(record.client_id)
    if key:
        expect(key in (own, second_key(record.client_id, user or "")), f"it is stored at {key}")
        own = key
    expect(record.key == own, f"its key is {record.key}")
    for name in names:
        expect(own in name, f"{name!r} is a consumer of another client")
        expect(_NAMES.isdisjoint(name), f"{name!r} is no token")
    _written_again(record)
    try:
        sessions.decode(data, client_id=record.client_id + "x", key=key)
    except PoisonedRecord:
        return 1, False
    raise Unexpected("the record of another client id is read")


def _written_again(record: SessionRecord) -> None:
    try:
        again = sessions.decode(record.encode(), client_id=record.client_id, key=record.key)
    except Exception as error:
        raise Unexpected(f"written again it is refused: {type(error).__name__}: {error}") from error
    if record.v5 is not None and not record.v5.q2:
        record.v5.former = 0  # it is kept while QoS 2 publishes may be held
    expect(again == record, f"written again it is {again}")
    expect(again.encode() == record.encode(), "written twice it differs")


def _is_newer(data: bytes) -> bool:
    """Whether the record says of itself that it is of a newer version."""
    try:
        found = orjson.loads(data)
        version = found["v5"]["version"]
        return type(found.get("id", "")) is str and type(version) is int and version > V5_VERSION
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


TARGET: Final = Target(
    "session-record",
    (mqtt_streams.sessions, mqtt_streams.fields),
    seeds,
    check,
    variants=len(KEYS),
    mutate=of_json(
        _VALUES, b'"v5":{', b'"id":"', b"null", b"1e999", b'"version":3', b"\\u0000", b"\\ud800", b"[" * 200
    ),
)
