# SPDX-License-Identifier: Apache-2.0
"""The gateways' part of a session record: the key `v5` of :mod:`mqtt_streams.sessions`."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

V5_PLAIN: Final = 1
"""Version of a record without `pos`: no position of its session is stored."""
V5_SECOND: Final = 3
"""Version of a record that is stored under the second key of its client id."""
FIRST: Final = -1
"""Value of `V5.first` in the first record of a session: the sequence is not known before the write."""

Kind: TypeAlias = Literal["durable", "regular"]


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """MQTT 5.0 options of a subscription: filter as sent, no local, retain as published, retain handling, id."""

    filter: str
    nl: bool = False
    rap: bool = False
    rh: int = 0
    id: int | None = None


@dataclass(frozen=True, slots=True)
class SharedSubscription:
    """A shared subscription: QoS, retain as published, subscription identifier, stream sequence at which it begins."""

    qos: int
    rap: bool
    id: int | None
    start: int


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
    ones, also of the session before, whose registrations in `$MQTT_shared` may exist. `generation`: id of the
    `$MQTT_msgs` whose sequences the record uses, "" = not known. `fresh`: first sequence of new messages when that
    stream has replaced another one; 0 = it has not. `pos`: id of the session's position when one may be stored,
    else "". `former`: sequence of the record that the last claim has replaced; kept while `q2`. `first`: sequence of
    the session's first record, `FIRST` in that record, 0 = not known. `user`: authenticated user of the session, "" =
    anonymous, None = not known (records of 0.1). `quota`: quota that the session counts for, "" = none. `consumerless`:
    consumers that the session's position speaks for may be missing. `extra`: unknown keys, written back unchanged.
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
    version: int = V5_PLAIN
    first: int = 0
    user: str | None = None
    quota: str = ""
    leaving: list[str] = field(default_factory=list)
    consumerless: bool = False
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

    def name_position(self, position: str, *, consumerless: bool = False) -> None:
        """Set the id of the session's position; "" = none is stored.

        `consumerless`: consumers for which it speaks may be missing from now on.
        """
        self.pos = position
        self.consumerless = self.consumerless or consumerless

    def keep_consumers(self) -> None:
        """Note that all consumers exist: gateways that do not know `consumerless` may continue the session."""
        self.consumerless = False
        self.version = min(self.version, V5_SECOND)

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

    def forget_leaving(self) -> None:
        """Note that the registrations of all ended shared subscriptions are removed."""
        self.leaving = []

    def begin(self, version: int, user: str, quota: str) -> None:
        """Set what only a new session has: the version of its record, its user and its quota."""
        self.version, self.user, self.quota = version, user, quota

    def belong(self, user: str, quota: str) -> None:
        """Set the user of the session, and its quota unless the record has a quota already."""
        self.user = user
        self.quota = self.quota or quota
