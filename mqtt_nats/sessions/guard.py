# SPDX-License-Identifier: Apache-2.0
"""Permissions of one connection: the decisions of rules and hooks, remembered, and the log of denials."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.access.acl import EVERYTHING, PRESENCE, covers
from mqtt_nats.access.authenticator import ADMINISTRATOR
from mqtt_nats.base.logs import log_failure, shorten
from mqtt_nats.hooks.chain import HookFailed
from mqtt_nats.hooks.events import Authorizing, ClientView
from mqtt_nats.hooks.points import CLIENT_AUTHORIZE
from mqtt_nats.pubsub.shared_filters import plain_filter
from mqtt_streams.messages import PREFIX as MESSAGE_PREFIX
from mqtt_streams.subjects import subject_to_filter

if TYPE_CHECKING:
    from mqtt_nats.access.acl import Identity, Permissions
    from mqtt_nats.sessions.session import Session
    from mqtt_streams.sessions import SessionRecord

log = logging.getLogger("mqtt_nats.audit")

READING: Final = 4
"""Added to the QoS in the key of a remembered decision about receiving, to tell it from one about publishing."""


class Guard:
    """Permissions of one connection."""

    __slots__ = ("_client", "at_delivery", "identity", "permissions")

    def __init__(self, client: Session, identity: Identity, permissions: Permissions) -> None:
        self._client = client
        self.at_delivery = client.services.settings.acl_subscribe == "deliver"
        """Whether each message is checked, not only the topic filter of its subscription."""
        self.identity = identity
        self.permissions = permissions

    def may_publish(self, key: bytes, qos: int, retain: bool) -> bool:
        """Whether the client may publish a message; a denial is logged. ``key``: topic after its two length bytes."""
        if self._allows_publish(key, qos, retain):
            return True
        kind = "retained publish" if retain else "publish"
        topic = key[2:].decode()
        self.audit(f"{kind} on {shorten(topic)!r} at QoS {qos}")
        self._client.drop(topic, qos, "denied")
        return False

    def permits(self, key: bytes, qos: int, retain: bool) -> bool:
        """Whether the client may publish a message; nothing is logged."""
        return self._allows_publish(key, qos, retain)

    def _allows_publish(self, key: bytes, qos: int, retain: bool) -> bool:
        asked = (key, qos, retain)
        memory = self._client.memory
        known = memory.decided(asked)
        if known is None:
            known = self.permissions.publish(key, qos, retain)
            memory.decide(asked, known)
        return known

    def may_subscribe(self, topic_filter: str, qos: int) -> bool:
        """Whether the client may have a subscription; a denial is logged."""
        if self.allows(topic_filter, qos):
            return True
        self.audit(f"subscription of {shorten(topic_filter)!r} at QoS {qos}")
        return False

    def allows(self, topic_filter: str, qos: int) -> bool:
        """Whether the client may have a subscription, shared ones included; nothing is logged."""
        plain = plain_filter(topic_filter)
        return self._allows_subscription(plain, qos, shared=plain != topic_filter)

    def _allows_subscription(self, topic_filter: str, qos: int, *, shared: bool) -> bool:
        if self.at_delivery:
            return self.permissions.may_touch(topic_filter, qos)
        if shared:
            return self.permissions.may_share(topic_filter, qos)
        return self.permissions.may_subscribe(topic_filter, qos)

    def may_receive(self, key: bytes, qos: int) -> bool:
        """Whether the client may receive messages of a topic by a subscription of this QoS."""
        return not self.at_delivery or self.may_read(key, qos)

    def may_read(self, key: bytes, qos: int) -> bool:
        """Whether the client may read one topic; the decision is remembered."""
        asked = (key, qos + READING, False)
        memory = self._client.memory
        known = memory.decided(asked)
        if known is None:
            known = self._allows_reading(key[2:].decode(), qos)
            if known is None:
                return False
            memory.decide(asked, known)
        return known

    def _allows_reading(self, topic: str, qos: int) -> bool | None:
        """Whether the client may receive messages of a topic; None: a hook has failed, nothing is remembered."""
        return self.permissions.may_subscribe(topic, qos)

    def withholds(self, key: bytes, qos: int, message_id: str = "") -> bool:
        """Whether the client may not receive a message of a subscription of this QoS; the message is counted."""
        if self.may_receive(key, qos):
            return False
        self._client.drop(key[2:].decode(), qos, "not permitted", message_id)
        return True

    def audit(self, what: str) -> None:
        """Count and log a denial."""
        one = self.identity
        user = "anonymous" if one.user is None else f"user {shorten(one.user)!r}"
        text = "denied: %s; %s, %s, from %s"
        log_failure(log, logging.WARNING, "denied", text, what, self._client, user, one.address or "unknown")


class AskingGuard(Guard):
    """Permissions that hooks decide: a hook gets the decision of the rules and may change it."""

    __slots__ = ("_view",)

    def __init__(self, client: Session, identity: Identity, permissions: Permissions) -> None:
        super().__init__(client, identity, permissions)
        self._view = ClientView(client)

    def _allows_publish(self, key: bytes, qos: int, retain: bool) -> bool:
        allowed = super()._allows_publish(key, qos, retain)
        return self._ask(Authorizing(self._view, "publish", key[2:].decode(), qos, retain), allowed)

    def _allows_subscription(self, topic_filter: str, qos: int, *, shared: bool) -> bool:
        allowed = super()._allows_subscription(topic_filter, qos, shared=shared)
        return self._ask(Authorizing(self._view, "subscribe", topic_filter, qos, False), allowed)

    def _allows_reading(self, topic: str, qos: int) -> bool | None:
        allowed = bool(super()._allows_reading(topic, qos))
        return self._answer(Authorizing(self._view, "subscribe", topic, qos, False), allowed)

    def _ask(self, event: Authorizing, allowed: bool) -> bool:
        return bool(self._answer(event, allowed))

    def _answer(self, event: Authorizing, allowed: bool) -> bool | None:
        """Return the decision of the hooks; None: a hook has failed."""
        chain = self._client.services.hooks.deciding(CLIENT_AUTHORIZE)
        if chain is None:
            return allowed
        try:
            return chain.decide(event, allowed)
        except HookFailed:
            return None


def may_subscribe(client: Session, topic_filter: str, qos: int) -> bool:
    """Whether a client may have a subscription, shared ones included; without rules only `$SYS` filters need one."""
    if client.guarded is not None:
        return client.guarded.may_subscribe(topic_filter, qos)
    if topic_filter[0] != "$" or client.granted is ADMINISTRATOR:
        return True
    plain = plain_filter(topic_filter)
    if (EVERYTHING.may_subscribe if plain == topic_filter else EVERYTHING.may_share)(plain, qos):
        return True
    text = "denied: subscription of %r, which needs a rule; %s"
    log_failure(log, logging.WARNING, "denied", text, shorten(topic_filter), client)
    return False


def hears_presence(client: Session, topic_filter: str, key: bytes, qos: int) -> bool:
    """Whether a client gets a message of presence by a filter.

    A filter of presence alone was checked when it was granted. A wider one brings only the topics that a rule names.
    """
    if covers(PRESENCE, topic_filter):
        return True
    guard = client.guarded
    return client.granted is ADMINISTRATOR if guard is None else guard.may_read(key, qos)


def denied_subscriptions(client: Session) -> set[str]:
    """Return the filters of the session, shared ones included, that the client may not subscribe (any more)."""
    found = {one.text: qos for one, qos in client.filters.items()}
    found |= {text: one.choice.qos for text, one in (client.shares or {}).items()}
    record = client.record
    if client.durable and record is not None:
        for subject, qos in record.subs.items():
            try:
                found.setdefault(subject_to_filter(subject), qos)
            except ValueError:  # a subscription of nats-server's listener that `resubscribe` leaves out
                continue
        if record.v5 is not None:
            for text, share in record.v5.shared.items():
                found.setdefault(text, share.qos)
    return {text for text, qos in found.items() if not may_subscribe(client, text, qos)}


def may_read_all(client: Session, record: SessionRecord) -> bool:
    """Whether the client may subscribe all filters of a session, ended ones with undelivered messages included."""
    guard = client.guarded
    if guard is None:
        return True
    wanted = [*record.subs.items()]
    if record.v5 is not None:
        wanted += [(one.filter_subject.removeprefix(MESSAGE_PREFIX), one.qos) for one in record.v5.draining if one.qos]
        if not all(guard.allows(text, one.qos) for text, one in record.v5.shared.items()):
            return False
    for subject, qos in wanted:
        try:
            topic_filter = subject_to_filter(subject)
        except ValueError:  # a subscription of nats-server's listener that a resume leaves out
            continue
        if not guard.allows(topic_filter, qos):
            return False
    return True
