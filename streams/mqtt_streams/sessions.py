# SPDX-License-Identifier: Apache-2.0
"""`$MQTT_sess`: one record per session, in nats-server's JSON plus the key `v5` of the gateways.

nats-server's listener drops `v5` when it rewrites a record; the session then has MQTT 3.1.1 semantics.

`v5` has a version. The version number grows when a gateway that does not know a new feature would do harm. A gateway
neither reads nor overwrites a record with a higher version than it knows. Any other addition is a new key: gateways
that do not know the key write it back unchanged.
"""

from dataclasses import dataclass, field
from typing import Final

import orjson

from mqtt_streams import stored
from mqtt_streams.api import ApiError, JetStream, NoResponders, publish
from mqtt_streams.consumers import ACK_WAIT_NS, ConsumerRef
from mqtt_streams.error_codes import WRONG_LAST_SEQUENCE
from mqtt_streams.fields import MAX_SEQUENCE, Fields, is_literal, is_subject
from mqtt_streams.fields import PoisonedRecord as PoisonedRecord
from mqtt_streams.hashing import HASH_LENGTH, SECOND_KEY_LENGTH, name_hash, second_key
from mqtt_streams.headers import EXPECTED_LAST_SUBJECT_SEQUENCE, REPLACES, REPLACING
from mqtt_streams.messages import DELIVER_PREFIX
from mqtt_streams.messages import PREFIX as MESSAGE_PREFIX
from mqtt_streams.pubrel import DELIVER_PREFIX as PUBREL_DELIVER_PREFIX
from mqtt_streams.pubrel import PREFIX as PUBREL_PREFIX
from mqtt_streams.session_parts import FIRST as FIRST
from mqtt_streams.session_parts import V5 as V5
from mqtt_streams.session_parts import V5_VERSION as V5_VERSION
from mqtt_streams.session_parts import Draining as Draining
from mqtt_streams.session_parts import EndedShare as EndedShare
from mqtt_streams.session_parts import Kind as Kind
from mqtt_streams.session_parts import SharedSubscription as SharedSubscription
from mqtt_streams.session_parts import SubscriptionOptions as SubscriptionOptions
from mqtt_streams.session_parts import encode_v5 as encode_v5
from mqtt_streams.session_parts import is_consumer_of
from mqtt_streams.session_parts import read_v5 as read_v5

STREAM: Final = "$MQTT_sess"
PREFIX: Final = "$MQTT.sess."
SECOND: Final = "second."
"""Token in front of the second key in the subject of a session record."""
BUCKET_LENGTH: Final = 2
"""Characters of a key that name the bucket of the session's claims: 62 × 62 buckets."""

SECOND_BUCKET: Final = "2"
"""Bucket of the claims of all sessions under second keys: every gateway hears them."""

SECOND_SID: Final = " fwc"
"""Appended to the second subject of a `#` filter to make its key in `cons`."""

_EXPECTED: Final = b"NATS/1.0\r\n%b%b:%%d\r\n\r\n" % (REPLACES, EXPECTED_LAST_SUBJECT_SEQUENCE.encode())
_MAX_ACK_PENDING: Final = 65535


class ForeignRecord(PoisonedRecord):
    """Session record of another client id with the same hash. The error text does not contain that client id."""


class NoRecord(PoisonedRecord):
    """There is no session record, but an answer of nats-server in its place (`seq`), which a record may replace."""


class NewerRecord(PoisonedRecord):
    """Session record of a newer gateway, in an unknown version; only a gateway that knows it may replace the record."""


class Conflict(Exception):
    """The session record was written by another gateway or listener since it was read."""


@dataclass(slots=True)
class SessionRecord:
    """Record of one session. `subs`: granted QoS by subject; `cons`: consumer by key (`second_sid`: second one of `#`).

    `v5`: None in a record that nats-server's listener wrote last. `extra`: unknown keys, written back unchanged.
    `time_ns`: store time of a loaded record, nanoseconds since 1970; else 0. `key`: last token of the record's subject,
    part of every name of the session: the hash of the client id, or the second key where another client has the hash.
    """

    client_id: str
    origin: str = ""
    clean: bool = False
    subs: dict[str, int] = field(default_factory=dict)
    cons: dict[str, ConsumerRef] = field(default_factory=dict)
    pubrel: ConsumerRef | None = None
    v5: V5 | None = None
    extra: dict[str, object] | None = None
    time_ns: int = field(default=0, compare=False)
    key: str = ""

    def __post_init__(self) -> None:
        """Set an empty `key` to the hash of the client id."""
        self.key = self.key or name_hash(self.client_id)

    def upgrade(self) -> V5:
        """Return the gateways' part, made if nats-server's listener wrote the record last."""
        if self.v5 is None:
            self.v5 = V5(kind="durable", q2=True, listener=True)
        return self.v5

    def sign(self, gateway: str, nonce: str) -> None:
        """Set the writer of the record, and the value that distinguishes this write."""
        self.origin = gateway
        if self.v5 is not None:
            self.v5.sign(gateway, nonce)

    def deliver_pubrels_by(self, consumer: ConsumerRef) -> None:
        """Set the consumer of PUBREL records."""
        self.pubrel = consumer

    def encode(self) -> bytes:
        """Return the stored JSON; empty values are left out, as nats-server does."""
        body: dict[str, object] = {}
        if self.origin:
            body["origin"] = self.origin
        body["id"] = self.client_id
        if self.clean:
            body["clean"] = True
        if self.subs:
            body["subs"] = self.subs
        if self.cons:
            body["cons"] = {sid: consumer.to_config() for sid, consumer in self.cons.items()}
        if self.pubrel is not None:
            body["pubrel"] = self.pubrel.to_config()
        if self.v5 is not None:
            body["v5"] = encode_v5(self.v5)
        return orjson.dumps(body if self.extra is None else body | self.extra)


def second_sid(subject: str) -> str:
    """Return the key in `cons` of the second subject of a filter that ends in `#`."""
    return subject + SECOND_SID


def first_subject(sid: str) -> str:
    """Return the subject of a filter in `subs` that has the consumer with this key in `cons`."""
    subject = sid.removesuffix(SECOND_SID)
    return subject if subject == sid else f"{subject}.>"


def _consumer(value: object, where: str, client_hash: str, client_id: str) -> ConsumerRef:
    reader = Fields(value, where)
    name = reader.text("durable_name")
    if not is_consumer_of(name, client_hash):
        raise PoisonedRecord(f"{where}: durable_name is not a consumer of this client")
    deliver = reader.text("deliver_subject")
    if not is_literal(deliver) or not deliver.startswith((DELIVER_PREFIX, PUBREL_DELIVER_PREFIX)):
        raise PoisonedRecord(f"{where}: deliver_subject is not one for deliveries to clients")
    filter_subject = reader.text("filter_subject", "")
    if filter_subject and not (
        is_subject(filter_subject) and filter_subject.startswith((MESSAGE_PREFIX, PUBREL_PREFIX))
    ):
        raise PoisonedRecord(f"{where}: filter_subject is not one of messages or PUBRELs")
    for key in ("deliver_policy", "ack_policy", "replay_policy"):
        reader.text(key, "")
    return ConsumerRef(
        name,
        deliver,
        filter_subject,
        reader.number("max_ack_pending", 0, _MAX_ACK_PENDING, 0),
        reader.number("ack_wait", 0, MAX_SEQUENCE, ACK_WAIT_NS),
        reader.optional_number("opt_start_seq", 0, MAX_SEQUENCE),
        reader.number("inactive_threshold", 0, MAX_SEQUENCE, 0),
        reader.number("num_replicas", 0, 5, 0),
        reader.values,
        client_id,
    )


def _check_version(v5: object) -> None:
    version = v5.get("version") if isinstance(v5, dict) else None
    if isinstance(version, int) and version > V5_VERSION:
        raise NewerRecord(f"v5: version {version} was written by a newer gateway, this one knows {V5_VERSION}")


def decode(data: bytes, *, client_id: str | None = None, key: str = "") -> SessionRecord:
    """Read a stored record; `client_id`, when given, must be the stored one. `key`: last token of the record's subject.

    Raises PoisonedRecord, nothing else; NewerRecord when its version is not known, whatever else the record contains;
    ForeignRecord when the record has another client id.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise PoisonedRecord(f"the session record is not JSON: {error}") from None
    reader = Fields(value, "session record")
    stored_id = reader.text("id", "")
    if client_id is not None and stored_id != client_id:
        raise ForeignRecord("the session record belongs to another client")
    v5 = reader.values.pop("v5", None)
    _check_version(v5)
    client_hash = key or name_hash(stored_id)
    origin = reader.text("origin", "")
    clean = reader.flag("clean")
    subs_reader = Fields(reader.items("subs"), "session record: subs")
    subs = {}
    for subject in list(subs_reader.values):
        if not is_subject(subject):
            raise PoisonedRecord(f"session record: subs has {subject[:64]!r}, which is not a subject")
        subs[subject] = subs_reader.number(subject, 0, 2)
    cons = {
        sid: _consumer(raw, f"session record: consumer of {sid[:64]!r}", client_hash, stored_id)
        for sid, raw in reader.items("cons").items()
        if raw is not None
    }
    pubrel = reader.values.pop("pubrel", None)
    found = None if v5 is None else read_v5(v5, client_hash)
    if key and not _is_key(key, stored_id, found):
        raise PoisonedRecord("the session record is stored under another subject than its own")
    return SessionRecord(
        stored_id,
        origin,
        clean,
        subs,
        cons,
        None if pubrel is None else _consumer(pubrel, "session record: pubrel", client_hash, stored_id),
        found,
        reader.values or None,
        key=client_hash,
    )


def _is_key(key: str, client_id: str, v5: V5 | None) -> bool:
    """Whether a record of a client may be stored under a key."""
    return key == name_hash(client_id) or (v5 is not None and key == second_key(client_id, v5.user or ""))


def claim_bucket(key: str) -> str:
    """Return the bucket of the claims of a session: the first two characters of its key; one for all second keys."""
    return SECOND_BUCKET if len(key) == SECOND_KEY_LENGTH else key[:BUCKET_LENGTH]


def claims_of(bucket: str) -> str:
    """Return the subjects of the claims of a bucket."""
    return f"$MQTT.JSA.{bucket}.SP.*.*"


def claim_subject(key: str, gateway: str, nonce: str) -> str:
    """Return the subject of the acknowledgement of a claim.

    nats-server's listener has its own id in place of the bucket. It hears all subjects of this form.
    """
    return f"$MQTT.JSA.{claim_bucket(key)}.SP.{key}.{gateway}{nonce}"


def claiming_gateway(tokens: list[bytes]) -> bytes:
    """Return the gateway, or the listener of nats-server, that the tokens of a claim's subject name."""
    return tokens[2] if len(tokens[2]) > BUCKET_LENGTH else tokens[5][:HASH_LENGTH]


class SessionStore:
    """Store that reads and writes session records; `domain` is the JetStream domain, "" for none."""

    def __init__(self, js: JetStream, domain: str = "") -> None:
        self._js = js
        self._prefix = f"{PREFIX}{domain}." if domain else PREFIX

    def subject(self, client_hash: str) -> str:
        """Return the subject of the record with a key; records with second keys have one more token, `SECOND`."""
        return self._prefix + (SECOND + client_hash if len(client_hash) == SECOND_KEY_LENGTH else client_hash)

    async def load(self, client_hash: str, client_id: str | None = None) -> tuple[SessionRecord, int] | None:
        """Return the record and its sequence, None without a record. Raises PoisonedRecord (with `seq`), ApiError."""
        message = await stored.get_last(self._js, STREAM, self.subject(client_hash))
        if message is None:
            return None
        try:
            if message.is_answer:
                raise NoRecord("an answer of nats-server is in the place of the session record")
            record = decode(message.payload, client_id=client_id, key=client_hash)
        except PoisonedRecord as error:
            error.seq = message.seq
            raise
        record.time_ns = message.time_ns
        return record, message.seq

    async def written_at(self, client_hash: str, sequence: int) -> SessionRecord | None:
        """Return the record that a write has stored with this sequence, by direct get.

        It may be replaced by now: a replica that lags may answer. None: it is not there, cannot be read, or direct gets
        are not answered; `load` tells more. Raises RequestTimeout.
        """
        try:
            message = await stored.direct_get(self._js, STREAM, sequence)
            if message is None or message.subject != self.subject(client_hash) or message.is_answer:
                return None
            record = decode(message.payload, key=client_hash)
        except (ApiError, NoResponders, PoisonedRecord):
            return None
        record.time_ns = message.time_ns
        return record

    async def any_second(self) -> bool:
        """Whether any record has a second key."""
        return await stored.get_next(self._js, STREAM, f"{self._prefix}{SECOND}*", 1) is not None

    async def save(self, record: SessionRecord, *, expected: int | None, reply: str = "") -> int:
        """Write a record and return its sequence.

        `expected`: sequence that the session's present record must have, 0 = no record, None = any.
        `reply`: subject on which the acknowledgement of the store announces the takeover. Raises Conflict, ApiError,
        RequestTimeout (the record may have been written: read it back).
        """
        headers = REPLACING if expected is None else _EXPECTED % expected
        try:
            return await publish(self._js, self.subject(record.key), record.encode(), headers, reply=reply)
        except ApiError as error:
            if error.err_code in WRONG_LAST_SEQUENCE:
                raise Conflict(str(error)) from error
            raise

    async def delete(self, client_hash: str, seq: int) -> bool:
        """Remove the record with this key and sequence; False when it was removed or replaced before."""
        return await stored.remove(self._js, STREAM, self.subject(client_hash), seq)
