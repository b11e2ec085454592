# SPDX-License-Identifier: Apache-2.0
"""The gateways' part of a session record: the key `v5` of :mod:`mqtt_streams.sessions`."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Self, TypeAlias, get_args

from mqtt_streams.fields import MAX_SEQUENCE, Fields, PoisonedRecord, is_subject, is_token
from mqtt_streams.pubrel import CONSUMER_PREFIX as PUBREL_CONSUMER_PREFIX

V5_VERSION: Final = 4
"""Version of the `v5` that is written, and the highest that is read. Records with a lower one have the same keys."""
FIRST: Final = -1
"""Value of `V5.first` in the first record of a session: the sequence is not known before the write."""

MAX_SUBSCRIPTION_ID: Final = 268_435_455
"""Highest subscription identifier, a variable byte integer (section 3.8.2.1.2)."""

Kind: TypeAlias = Literal["durable", "regular"]


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """MQTT 5.0 options of a subscription: filter as sent, no local, retain as published, retain handling, id."""

    filter: str
    nl: bool = False
    rap: bool = False
    rh: int = 0
    id: int | None = None

    @classmethod
    def read(cls, value: object, subject: str) -> Self:
        """Return the options of a subscription from a record; raises PoisonedRecord."""
        reader = Fields(value, f"v5: options of {subject!r}")
        return cls(
            reader.text("filter"),
            reader.flag("nl"),
            reader.flag("rap"),
            reader.number("rh", 0, 2, 0),
            reader.optional_number("id", 1, MAX_SUBSCRIPTION_ID),
        )

    def encode(self) -> dict[str, object]:
        """Return the options as they are stored."""
        return {"filter": self.filter, "nl": self.nl, "rap": self.rap, "rh": self.rh, "id": self.id}


@dataclass(frozen=True, slots=True)
class SharedSubscription:
    """A shared subscription: QoS, retain as published, subscription identifier, stream sequence at which it begins."""

    qos: int
    rap: bool
    id: int | None
    start: int

    @classmethod
    def read(cls, value: object) -> Self:
        """Return a shared subscription from a record; raises PoisonedRecord."""
        reader = Fields(value, "v5: shared")
        return cls(
            reader.number("qos", 0, 2),
            reader.flag("rap"),
            reader.optional_number("id", 1, MAX_SUBSCRIPTION_ID),
            reader.number("start", 0, MAX_SEQUENCE, 0),
        )

    def encode(self) -> dict[str, object]:
        """Return the shared subscription as it is stored."""
        return {"qos": self.qos, "rap": self.rap, "id": self.id, "start": self.start}


@dataclass(frozen=True, slots=True)
class EndedShare:
    """Ended shared subscription with QoS 1 messages that were sent to the client, which has not acknowledged them.

    `rap`, `id`: retain as published, and subscription identifier. `sent`: packet identifier and stream sequence of each
    message.
    """

    rap: bool
    id: int | None
    sent: tuple[tuple[int, int], ...]

    @classmethod
    def read(cls, value: object) -> Self:
        """Return an ended shared subscription from a record; raises PoisonedRecord."""
        reader = Fields(value, "v5: ended")
        rap, identifier = reader.flag("rap"), reader.optional_number("id", 1, MAX_SUBSCRIPTION_ID)
        found = []
        for one in _read_list(reader, "sent", "a list"):
            if not isinstance(one, list) or len(one) != 2 or not all(type(part) is int for part in one):
                raise PoisonedRecord("v5: ended does not name messages by packet identifier and stream sequence")
            packet_id, sequence = one
            if not (1 <= packet_id <= 65535 and 1 <= sequence <= MAX_SEQUENCE):
                raise PoisonedRecord("v5: ended has a number that is neither packet identifier nor stream sequence")
            found.append((packet_id, sequence))
        return cls(rap, identifier, tuple(found))

    def encode(self) -> dict[str, object]:
        """Return the ended shared subscription as it is stored."""
        return {"rap": self.rap, "id": self.id, "sent": self.sent}


@dataclass(frozen=True, slots=True)
class Draining:
    """Consumer of an ended subscription (or lower QoS): delivers at `qos` up to stream sequence `end`, then is deleted.

    `start`: stream sequence at which the subscription began; 0 = not known. `whole`: a subscription at QoS 0 has
    replaced it, and every message up to `end` has to be delivered, also messages not sent yet.
    """

    name: str
    filter_subject: str
    qos: int
    end: int
    start: int = 0
    whole: bool = False

    @classmethod
    def read(cls, value: object, client_hash: str) -> Self:
        """Return the consumer of an ended subscription from a record; raises PoisonedRecord."""
        reader = Fields(value, "v5: draining")
        entry = cls(
            reader.text("name"),
            reader.text("filter_subject"),
            reader.number("qos", 0, 2),
            reader.number("end", 0, MAX_SEQUENCE),
            reader.number("start", 0, MAX_SEQUENCE, 0),
            reader.flag("whole"),
        )
        if not is_consumer_of(entry.name, client_hash) or not is_subject(entry.filter_subject):
            raise PoisonedRecord("v5: draining does not name a consumer of this client")
        return entry

    def encode(self) -> dict[str, object]:
        """Return the entry as it is stored; empty values are left out."""
        body: dict[str, object] = {
            "name": self.name,
            "filter_subject": self.filter_subject,
            "qos": self.qos,
            "end": self.end,
        }
        if self.start:
            body["start"] = self.start
        if self.whole:
            body["whole"] = True
        return body


@dataclass(slots=True)
class V5:
    """The gateways' part of a session record.

    `kind`: durable if the expiry interval of the first record was not 0, else regular. `draining`: consumers of ended
    subscriptions. `expiry`: expiry interval in seconds, None = never. `deadline`: Unix time in seconds (nats-server's)
    at which the session ends, set while disconnected. `owner`, `nonce`: writer of the record, and a value that
    distinguishes its writes. `q2`: QoS 2 publishes were held. `options`: by first subject of the filter. `start`: first
    stream sequence by consumer key. `replay`: cursor of an unfinished retained replay by consumer key. `was`: by
    consumer key, the former QoS and the last stream sequence for which it holds. `wills`: gateways under which a will
    of the session may be stored. `shared`: shared subscriptions by their filter, `$share/` included. `leaving`: ended
    ones, also of the session before, whose registrations in `$MQTT_shared` may exist. `ended`: ended ones, by their
    filter, with messages that the client has not acknowledged. `generation`: id of the
    `$MQTT_msgs` whose sequences the record uses, "" = not known. `fresh`: first sequence of new messages when that
    stream has replaced another one; 0 = it has not. `pos`: id of the session's position when one may be stored,
    else "". `former`: sequence of the record that the last claim has replaced; kept while `q2`. `first`: sequence of
    the session's first record, `FIRST` in that record, 0 = not known. `user`: authenticated user of the session, "" =
    anonymous, None = not known (nats-server's listener has begun it). `quota`: quota that the session counts for, "" =
    none. `consumerless`: consumers that the session's position replaces may be missing. `listener`: nats-server's
    listener has served the session. `extra`: unknown keys, written back unchanged.
    """

    kind: Kind = "durable"
    expiry: int | None = None
    owner: str = ""
    nonce: str = ""
    q2: bool = False
    deadline: float | None = None
    options: dict[str, SubscriptionOptions] = field(default_factory=dict)
    start: dict[str, int] = field(default_factory=dict)
    draining: list[Draining] = field(default_factory=list)
    replay: dict[str, int] = field(default_factory=dict)
    was: dict[str, tuple[int, int]] = field(default_factory=dict)
    wills: list[str] = field(default_factory=list)
    shared: dict[str, SharedSubscription] = field(default_factory=dict)
    generation: str = ""
    fresh: int = 0
    pos: str = ""
    former: int = 0
    first: int = 0
    user: str | None = None
    quota: str = ""
    leaving: list[str] = field(default_factory=list)
    consumerless: bool = False
    listener: bool = False
    ended: dict[str, EndedShare] = field(default_factory=dict)
    extra: dict[str, object] | None = None

    def sign(self, owner: str, nonce: str) -> None:
        """Set the writer of the record, and the value that distinguishes this write."""
        self.owner, self.nonce = owner, nonce

    def hold_qos2(self) -> None:
        """Note that QoS 2 publishes of the session may be held."""
        self.q2 = True

    def begin_at(self, sequence: int) -> None:
        """Set the sequence of the session's first record, if it was not known before that was written."""
        if self.first == FIRST:
            self.first = sequence

    def follow(self, former: int) -> None:
        """Set the sequence of the record that this claim replaces."""
        self.former = former

    def expire_after(self, expiry: int | None) -> None:
        """Set the expiry interval in seconds; None = never."""
        self.expiry = expiry

    def name_wills(self, gateways: list[str]) -> None:
        """Set the gateways under which a will of the session may be stored."""
        self.wills = gateways

    def name_position(self, position: str) -> None:
        """Set the id of the session's position; "" = none is stored."""
        self.pos = position

    def move_to_records(self) -> None:
        """Note that the session is in records: consumers that its position replaces may be missing from now on."""
        self.consumerless = True

    def move_to_consumers(self) -> None:
        """Note that all consumers exist."""
        self.consumerless = False

    def count_in(self, generation: str) -> None:
        """Set the id of the `$MQTT_msgs` whose sequences the record uses."""
        self.generation = generation

    def count_anew(self, floor: int) -> None:
        """Lower the sequences to a replaced stream's `floor`: all later messages are new ones."""
        self.start = {key: min(start, floor + 1) for key, start in self.start.items()}
        self.was = {key: (qos, min(until, floor)) for key, (qos, until) in self.was.items() if floor}
        self.draining = [
            replace(one, end=min(one.end, floor), qos=one.qos if floor else 0, start=min(one.start, floor + 1))
            for one in self.draining
        ]
        self.shared = {text: replace(one, start=min(one.start, floor + 1)) for text, one in self.shared.items()}
        for text, ended in list(self.ended.items()):
            self.end_share(text, replace(ended, sent=tuple(one for one in ended.sent if one[1] <= floor)))

    def suspect_from(self, sequence: int) -> None:
        """Set the first sequence of new messages of a stream that has replaced another one; 0 = it has not."""
        self.fresh = sequence

    def forget_draining(self, names: Container[str]) -> None:
        """Remove the consumers of ended subscriptions that are deleted, by name."""
        self.draining = [entry for entry in self.draining if entry.name not in names]

    @property
    def groups(self) -> list[str]:
        """The shared subscriptions, `$share/` included, of which the session may be registered as a member."""
        if not self.shared and not self.leaving:
            return []
        return [*self.shared, *(text for text in self.leaving if text not in self.shared)]

    def share(self, text: str, wanted: SharedSubscription) -> None:
        """Set a shared subscription."""
        self.shared[text] = wanted
        self.leaving = [one for one in self.leaving if one != text]

    def unshare(self, texts: Iterable[str]) -> None:
        """Remove shared subscriptions; the record names them in `leaving` until :meth:`forget_leaving`."""
        for text in texts:
            if self.shared.pop(text, None) is not None:
                self.leaving = [*self.leaving, text]

    def end_share(self, text: str, ended: EndedShare) -> None:
        """Set which messages of an ended shared subscription are not acknowledged; without any it is forgotten."""
        if ended.sent:
            self.ended[text] = ended
        else:
            self.ended.pop(text, None)

    def forget_leaving(self) -> None:
        """Note that the registrations of all ended shared subscriptions are removed."""
        self.leaving = []

    def begin(self, user: str, quota: str) -> None:
        """Set what only a new session has: its user and its quota."""
        self.user, self.quota = user, quota

    def belong(self, user: str, quota: str) -> None:
        """Set the user of the session, and its quota unless the record has a quota already."""
        self.user = user
        self.quota = self.quota or quota


def encode_v5(v5: V5) -> dict[str, object]:
    """Return the gateways' part of a session record as it is stored; empty values are left out."""
    body: dict[str, object] = {
        "version": V5_VERSION,
        "kind": v5.kind,
        "expiry": v5.expiry,
        "owner": v5.owner,
        "nonce": v5.nonce,
    }
    if v5.q2:
        body["q2"] = True
        if v5.former:
            body["former"] = v5.former
    if v5.deadline is not None:
        body["deadline"] = v5.deadline
    if v5.options:
        body["options"] = {subject: one.encode() for subject, one in v5.options.items()}
    if v5.start:
        body["start"] = v5.start
    if v5.draining:
        body["draining"] = [one.encode() for one in v5.draining]
    if v5.replay:
        body["replay"] = v5.replay
    if v5.shared:
        body["shared"] = {name: one.encode() for name, one in v5.shared.items()}
    if v5.leaving:
        body["leaving"] = v5.leaving
    if v5.ended:
        body["ended"] = {text: one.encode() for text, one in v5.ended.items()}
    if v5.wills:
        body["wills"] = v5.wills
    if v5.was:
        body["was"] = {key: {"qos": qos, "until": until} for key, (qos, until) in v5.was.items()}
    if v5.user is not None:
        body["user"] = v5.user
    if v5.generation:
        body["generation"] = v5.generation
    if v5.fresh:
        body["fresh"] = v5.fresh
    if v5.pos:
        body["pos"] = v5.pos
    if v5.quota:
        body["quota"] = v5.quota
    flags = {"consumerless": v5.consumerless, "listener": v5.listener}
    body |= {key: True for key, given in flags.items() if given}
    if v5.first:
        # The nonce marks the first record: who does not know this key writes it back beside a new nonce.
        body["first"] = v5.nonce if v5.first == FIRST else v5.first
    return body if v5.extra is None else body | v5.extra


def is_consumer_of(name: str, client_hash: str) -> bool:
    """Whether a consumer name, which becomes a token of API subjects, belongs to this client."""
    if name == PUBREL_CONSUMER_PREFIX + client_hash:
        return True
    return name.startswith(client_hash + "_") and is_token(name)


def read_v5(value: object, client_hash: str) -> V5:
    """Return the gateways' part of a session record, in a version that is known; raises PoisonedRecord."""
    reader = Fields(value, "v5")
    reader.number("version", 1, MAX_SEQUENCE)
    kind = reader.text("kind")
    if kind not in get_args(Kind):
        raise PoisonedRecord("v5: kind is neither durable nor regular")
    deadline = _read_deadline(reader)
    options = {subject: SubscriptionOptions.read(raw, subject) for subject, raw in reader.items("options").items()}
    draining = [Draining.read(raw, client_hash) for raw in _read_list(reader, "draining", "a list")]
    was = _read_former_qos(reader)
    shared = {name: SharedSubscription.read(raw) for name, raw in reader.items("shared").items()}
    leaving = _read_texts(reader, "leaving", "a list of shared subscriptions")
    nonce = reader.text("nonce", "")
    if isinstance(first := reader.values.get("first"), str):
        reader.values["first"] = FIRST if first == nonce else 0
    wills = _read_texts(reader, "wills", "a list of gateways")
    if not all(map(is_token, wills)):
        raise PoisonedRecord("v5: wills is not a list of gateways")
    return V5(
        "durable" if kind == "durable" else "regular",
        reader.optional_number("expiry", 0, 2**32 - 1),
        reader.text("owner", ""),
        nonce,
        reader.flag("q2"),
        deadline,
        options,
        reader.numbers("start"),
        draining,
        reader.numbers("replay"),
        was,
        wills,
        shared,
        reader.text("generation", ""),
        reader.number("fresh", 0, MAX_SEQUENCE, 0),
        reader.text("pos", ""),
        reader.number("former", 0, MAX_SEQUENCE, 0),
        reader.number("first", FIRST, MAX_SEQUENCE, 0),
        reader.optional_text("user"),
        reader.text("quota", ""),
        leaving,
        reader.flag("consumerless"),
        reader.flag("listener"),
        {text: EndedShare.read(raw) for text, raw in reader.items("ended").items()},
        reader.values or None,
    )


def _read_deadline(reader: Fields) -> float | None:
    deadline = reader.values.pop("deadline", None)
    if deadline is None:
        return None
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not 0 <= deadline < 2**53:
        raise PoisonedRecord("v5: deadline is not a time")
    return float(deadline)


def _read_list(reader: Fields, key: str, expected: str) -> list[object]:
    value = reader.values.pop(key, None) or []
    if not isinstance(value, list):
        raise PoisonedRecord(f"v5: {key} is not {expected}")
    return value


def _read_texts(reader: Fields, key: str, expected: str) -> list[str]:
    found = _read_list(reader, key, expected)
    texts = [one for one in found if isinstance(one, str)]
    if len(texts) < len(found):
        raise PoisonedRecord(f"v5: {key} is not {expected}")
    return texts


def _read_former_qos(reader: Fields) -> dict[str, tuple[int, int]]:
    was = {}
    for key, raw in reader.items("was").items():
        inner = Fields(raw, "v5: was")
        was[key] = (inner.number("qos", 1, 2), inner.number("until", 0, MAX_SEQUENCE))
    return was
