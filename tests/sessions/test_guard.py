# SPDX-License-Identifier: Apache-2.0
"""Permissions of a connection: what is remembered, what is logged, and what hooks change."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mqtt_nats.access.acl import Identity, Permissions
from mqtt_nats.access.authenticator import ANONYMOUS
from mqtt_nats.base.bucket import MemoryBudget
from mqtt_nats.client.client import Client
from mqtt_nats.config.settings import Settings
from mqtt_nats.hooks.chain import Continue
from mqtt_nats.hooks.events import Authorizing
from mqtt_nats.hooks.points import CLIENT_AUTHORIZE
from mqtt_nats.hooks.registry import Hooks
from mqtt_nats.pubsub.data_path import ClientMemory
from mqtt_nats.pubsub.routing_table import Filter
from mqtt_nats.sessions.guard import AskingGuard, Guard, denied_subscriptions, may_read_all
from mqtt_nats.sessions.session import Session
from mqtt_streams.sessions import V5, Draining, SessionRecord, SharedSubscription
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeClient, FakeServices, FakeSettings, as_client, v5_of

KEY = b"\0\1a"


@stands_for(Settings)
class FakeGuardSettings(FakeSettings):
    """Stands for `Settings`: whether each message is checked."""

    def __init__(self, acl_subscribe: str) -> None:
        self.acl_subscribe = acl_subscribe


@stands_for(Permissions)
class FakePermissions:
    """Stands for `Permissions`: the same decision about everything, and how often it was asked for."""

    def __init__(self, *, permits: bool) -> None:
        self.fake_permits = permits
        self.fake_asked = 0

    def publish(self, key: bytes, qos: int, retain: bool) -> bool:
        self.fake_asked += 1
        return self.fake_permits

    def may_subscribe(self, topic: str, qos: int) -> bool:
        self.fake_asked += 1
        return self.fake_permits

    def may_share(self, topic: str, qos: int) -> bool:
        return self.may_subscribe(topic, qos)


@stands_for(Permissions)
class AllBut(FakePermissions):
    """Stands for `Permissions`: every topic filter but one may be subscribed."""

    def __init__(self, denied: str) -> None:
        super().__init__(permits=True)
        self.fake_denied = denied

    def may_subscribe(self, topic: str, qos: int) -> bool:
        return topic != self.fake_denied


@stands_for(Client)
class FakeGuarded(FakeClient):
    """Stands for `Client`, whose permissions are asked for."""

    def __init__(self, acl_subscribe: str = "subscribe") -> None:
        services = FakeServices()
        services.settings = FakeGuardSettings(acl_subscribe)
        super().__init__(services)
        self.memory = ClientMemory(MemoryBudget(10_000, 10_000))
        self.filters: dict[Filter, int] = {}
        self.guarded: Guard | None = None
        self.granted = ANONYMOUS
        self.fake_dropped: list[tuple[str, int, str]] = []

    def drop(self, topic: str, qos: int, reason: str, message_id: str = "") -> None:
        self.fake_dropped.append((topic, qos, reason))


def guard(client: FakeGuarded, permissions: FakePermissions, kind: type[Guard] = Guard) -> Guard:
    identity = Identity("user", "client", "127.0.0.1", frozenset())
    return kind(cast(Session, client), identity, cast(Permissions, permissions))


def test_a_decision_is_asked_for_once() -> None:
    client, permissions = FakeGuarded(), FakePermissions(permits=True)
    one = guard(client, permissions)
    assert one.may_publish(KEY, 1, False)
    assert one.may_publish(KEY, 1, False)
    assert permissions.fake_asked == 1
    client.memory.forget_decisions()
    assert one.may_publish(KEY, 1, False)
    assert permissions.fake_asked == 2


def test_a_denied_publish_is_counted() -> None:
    client = FakeGuarded()
    one = guard(client, FakePermissions(permits=False))
    assert not one.may_publish(KEY, 1, True)
    assert client.fake_dropped == [("a", 1, "denied")]
    assert not one.permits(KEY, 1, True)
    assert len(client.fake_dropped) == 1, "a question is no denial"


@pytest.mark.parametrize(("acl_subscribe", "withheld"), [("subscribe", False), ("deliver", True)])
def test_messages_are_withheld_where_each_one_is_checked(acl_subscribe: str, withheld: bool) -> None:
    client = FakeGuarded(acl_subscribe)
    one = guard(client, FakePermissions(permits=False))
    assert one.withholds(KEY, 0) is withheld
    assert client.fake_dropped == ([("a", 0, "not permitted")] if withheld else [])


@pytest.mark.parametrize("permits", [True, False])
def test_a_hook_changes_the_decision_of_the_rules(permits: bool) -> None:
    client = FakeGuarded()
    hooks = Hooks(lambda work, name: None)
    services: Any = client.services
    services.hooks = hooks
    seen: list[tuple[str, bool]] = []

    def decide(event: Authorizing, allowed: bool) -> Continue[bool]:
        seen.append((event.topic, allowed))
        return Continue(not allowed)

    hooks.add(CLIENT_AUTHORIZE, decide, owner="test")
    one = guard(client, FakePermissions(permits=permits), AskingGuard)
    assert one.permits(KEY, 1, False) is not permits
    assert seen == [("a", permits)]


@pytest.mark.parametrize("durable", [True, False])
def test_a_resumed_session_whose_filters_the_rules_deny(durable: bool) -> None:
    """Of the record, which is all that a resumed session has at first; without rules, presence needs one."""
    client = FakeGuarded()
    client.durable = durable
    assert client.record is not None
    client.record.subs = {"a.b": 1, "$SYS.brokers.gw.clients.x": 0}
    v5_of(client).shared = {"$share/g/t": SharedSubscription(1, False, None, 1)}
    assert denied_subscriptions(as_client(client)) == ({"$SYS/brokers/gw/clients/x"} if durable else set())
    client.guarded = guard(client, FakePermissions(permits=False))
    assert denied_subscriptions(as_client(client)) == (
        {"a/b", "$SYS/brokers/gw/clients/x", "$share/g/t"} if durable else set()
    )
    client.guarded = guard(client, FakePermissions(permits=True))
    assert denied_subscriptions(as_client(client)) == set()


@pytest.mark.parametrize(("denied", "permitted"), [("other", True), ("a/b", False), ("old", False), ("t", False)])
def test_a_session_of_no_user_is_for_who_may_subscribe_all_of_it(denied: str, permitted: bool) -> None:
    """Its subscriptions, ended ones that still bring messages, and shared ones."""
    v5 = V5(
        draining=[Draining("name", "$MQTT.msgs.old", 1, 9), Draining("empty", "$MQTT.msgs.other", 0, 9)],
        shared={"$share/g/t": SharedSubscription(1, False, None, 1)},
    )
    record = SessionRecord("client", subs={"a.b": 1}, v5=v5)
    client = FakeGuarded()
    assert may_read_all(as_client(client), record), "no rules apply"
    client.guarded = guard(client, AllBut(denied))
    assert may_read_all(as_client(client), record) is permitted
