# SPDX-License-Identifier: Apache-2.0
"""What a client may not do: how it is told, and what becomes of what it had when the rules change."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.access.acl import EVERYTHING, Both, Identity, Permissions, Rules
from mqtt_nats.access.authenticator import ADMINISTRATOR
from mqtt_nats.base.logs import log_failure, shorten
from mqtt_nats.client.subscribe import may_subscribe, withdraw
from mqtt_nats.codec import NotAuthorized
from mqtt_nats.hooks.calls import dropped
from mqtt_nats.hooks.chain import HookFailed
from mqtt_nats.hooks.events import Authorizing, ClientView
from mqtt_nats.hooks.points import CLIENT_AUTHORIZE
from mqtt_nats.lifecycle.will import drop_will, may_leave
from mqtt_nats.pubsub.shared_filters import plain_filter
from mqtt_streams.hashing import registered_as
from mqtt_streams.subjects import subject_to_filter

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.gateway.broker import Broker

log = logging.getLogger("mqtt_nats.audit")

READING: Final = 4
"""Added to the QoS of a decision about what the client may receive."""


class Guard:
    """One connection's permissions."""

    __slots__ = ("_client", "at_delivery", "identity", "permissions")

    def __init__(self, client: Client, identity: Identity, permissions: Permissions) -> None:
        self._client = client
        self.at_delivery = client.broker.settings.acl_subscribe == "deliver"
        """Each message is looked at, and not only its filter."""
        self.identity = identity
        self.permissions = permissions

    def may_publish(self, key: bytes, qos: int, retain: bool) -> bool:
        """Whether the client may publish this; a denial is logged. ``key`` is the topic, its length first."""
        if self._allows_publish(key, qos, retain):
            return True
        kind = "retained publish" if retain else "publish"
        topic = key[2:].decode()
        self.audit(f"{kind} on {shorten(topic)!r} at QoS {qos}")
        dropped(self._client, topic, qos, "denied")
        return False

    def permits(self, key: bytes, qos: int, retain: bool) -> bool:
        """Whether the client may publish this; nothing is logged."""
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
        """Whether the client may have this subscription; a denial is logged."""
        if self.allows(topic_filter, qos):
            return True
        self.audit(f"subscription of {shorten(topic_filter)!r} at QoS {qos}")
        return False

    def allows(self, topic_filter: str, qos: int) -> bool:
        """Whether the client may have this subscription, shared ones included."""
        return self._allows_subscription(plain_filter(topic_filter), qos)

    def _allows_subscription(self, topic_filter: str, qos: int) -> bool:
        if self.at_delivery:
            return self.permissions.may_touch(topic_filter, qos)
        return self.permissions.may_subscribe(topic_filter, qos)

    def may_receive(self, key: bytes, qos: int) -> bool:
        """Whether the client may have messages of a topic, of which the subscription has that QoS."""
        if not self.at_delivery:
            return True
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
        """None: that is not known at the moment."""
        return self.permissions.may_subscribe(topic, qos)

    def withholds(self, key: bytes, qos: int, message_id: str = "") -> bool:
        """Whether the client may not have a message that its subscription, at that QoS, brings; it is counted."""
        if self.may_receive(key, qos):
            return False
        dropped(self._client, key[2:].decode(), qos, "not permitted", message_id)
        return True

    def audit(self, what: str) -> None:
        """Count and log a denial."""
        one = self.identity
        user = "anonymous" if one.user is None else f"user {shorten(one.user)!r}"
        text = "denied: %s; %s, %s, from %s"
        log_failure(log, logging.WARNING, "denied", text, what, self._client, user, one.address or "unknown")


class AskingGuard(Guard):
    """Asks hooks too: they get what the rules say, and have the last word."""

    __slots__ = ("_view",)

    def __init__(self, client: Client, identity: Identity, permissions: Permissions) -> None:
        super().__init__(client, identity, permissions)
        self._view = ClientView(client)

    def _allows_publish(self, key: bytes, qos: int, retain: bool) -> bool:
        allowed = super()._allows_publish(key, qos, retain)
        return self._ask(Authorizing(self._view, "publish", key[2:].decode(), qos, retain), allowed)

    def _allows_subscription(self, topic_filter: str, qos: int) -> bool:
        allowed = super()._allows_subscription(topic_filter, qos)
        return self._ask(Authorizing(self._view, "subscribe", topic_filter, qos, False), allowed)

    def _allows_reading(self, topic: str, qos: int) -> bool | None:
        allowed = bool(super()._allows_reading(topic, qos))
        return self._answer(Authorizing(self._view, "subscribe", topic, qos, False), allowed)

    def _ask(self, event: Authorizing, allowed: bool) -> bool:
        return bool(self._answer(event, allowed))

    def _answer(self, event: Authorizing, allowed: bool) -> bool | None:
        """What hooks say; None: one has failed."""
        chain = self._client.broker.hooks.deciding(CLIENT_AUTHORIZE)
        if chain is None:
            return allowed
        try:
            return chain.decide(event, allowed)
        except HookFailed:
            return None


def identify(client: Client) -> None:
    """The client is known: from now on it may do what the rules, and hooks, say."""
    client.memory.forget_decisions()
    rules, own = client.broker.rules, client.granted.rules
    asking = client.broker.hooks.deciding(CLIENT_AUTHORIZE) is not None
    if client.granted is ADMINISTRATOR or (rules is None and own is None and not asking):
        client.guarded = None
        return
    identity = Identity(client.user, client.client_id, client.connection.host, client.granted.groups)
    found = [one.permissions(identity) for one in (rules, own) if one is not None] or [EVERYTHING]
    permissions = found[0] if len(found) == 1 else Both(found[0], found[1])
    client.guarded = (AskingGuard if asking else Guard)(client, identity, permissions)


def denied_subscriptions(client: Client) -> set[str]:
    """What the session has subscribed and the client may not have (any more), shared subscriptions included."""
    found = {one.text: qos for one, qos in client.filters.items()}
    found |= {text: one.choice.qos for text, one in (client.shares or {}).items()}
    record = client.record
    if client.durable and record is not None:
        for subject, qos in record.subs.items():
            try:
                found.setdefault(subject_to_filter(subject), qos)
            except ValueError:  # not continued here anyway
                continue
        if record.v5 is not None:
            for text, share in record.v5.shared.items():
                found.setdefault(text, share.qos)
    return {text for text, qos in found.items() if not may_subscribe(client, text, qos)}


def change_rules(broker: Broker, rules: Rules) -> None:
    """Have other rules from now on, for everybody who is connected too.

    A subscription that is not permitted any more ends, and so does what waits for it; so does a will.
    """
    broker.rules = rules
    look_again(broker)


def look_again(broker: Broker) -> None:
    """Hold everybody who is connected against the rules, and hooks, of now.

    Who is connecting, and has been identified, has nothing yet that could be taken away: it is only identified anew.
    """
    for client in list(broker.connections):
        if client.alive and client.client_id:
            identify(client)
            if broker.clients.get(registered_as(client.client_id, client.hash)) is client:
                _check(client)


def revoke(broker: Broker) -> None:
    """Disconnect who would not be let in any more."""
    for client in list(broker.connections):
        if client.alive and not client.granted.valid():
            client.end(NotAuthorized("the credentials are not good any more"))


def _check(client: Client) -> None:
    guard = client.guarded
    if guard is None:
        return
    will = client.will
    if will is not None and not may_leave(client, will):
        drop_will(client)
    denied = denied_subscriptions(client)
    if not denied:
        return
    regular, durable = client.regular_side, client.durable_side
    if (regular is not None and regular.waiting) or (durable is not None and durable.stall is not None):
        # Nobody can tell what of the queue is permitted, or what of a stalled subscription others would have brought.
        client.end(NotAuthorized("permissions have changed"))
    else:
        client.do(withdraw(client, denied))
