# SPDX-License-Identifier: Apache-2.0
"""Hooks and records about connections, wills and subscriptions: refusals, announcements, causes of ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from mqtt_nats.access.authenticator import IGNORE, Allow, Credentials, Denied
from mqtt_nats.client.client import Client
from mqtt_nats.codec import (
    Connect,
    MqttError,
    NotAuthorized,
    ReasonCode,
    Subscribe,
    Subscription,
    Unsubscribe,
    Will,
)
from mqtt_nats.config.settings import Settings
from mqtt_nats.hooks.chain import Continue, Point
from mqtt_nats.hooks.events import Connected, Connecting, Disconnected, Drop, Published, Publishing, Refused
from mqtt_nats.hooks.points import (
    CLIENT_AUTHENTICATE,
    CLIENT_CONNECT,
    CLIENT_CONNECTED,
    CLIENT_DISCONNECTED,
    CLIENT_SUBSCRIBE,
    CLIENT_UNSUBSCRIBE,
    MESSAGE_PUBLISH,
    SESSION_SUBSCRIBED,
    SESSION_TAKEN_OVER,
    SESSION_UNSUBSCRIBED,
)
from mqtt_nats.hooks.registry import Hooks
from mqtt_nats.ingress.interceptors import Taker, Takers
from mqtt_nats.ingress.publish import Ingress
from mqtt_nats.lifecycle import connection_hooks
from mqtt_nats.observability.counters import Counters
from mqtt_nats.observability.presence import Presence
from mqtt_nats.sessions.services import Services
from mqtt_nats.transport.connection import Connection
from tests.conftest import Logged
from tests.harness.doubles import stands_for


@stands_for(Connection)
class FakeConnection:
    """Stands for `Connection`: its address."""

    host, peer, keepalive = "192.0.2.1", "192.0.2.1:1234", 60


@stands_for(Settings)
class FakeSettings:
    """Stands for `Settings`: connections are logged."""

    log_connections = True


@stands_for(Services)
class FakeServices:
    """Stands for `Services`: hooks, counters and settings."""

    def __init__(self) -> None:
        self.hooks = Hooks(lambda work, name: work.close())
        self.counters = Counters([0, 0, 0], [0, 0, 0])
        self.settings = FakeSettings()


@stands_for(Ingress)
class FakeIngress:
    """Stands for `Ingress`: who takes messages of a topic."""

    def __init__(self) -> None:
        self.takers = Takers()


@stands_for(Client)
class FakeClient:
    """Stands for `Client`: a connected client, and how its connection ends."""

    def __init__(self) -> None:
        self.services = FakeServices()
        self.ingress = FakeIngress()
        self.connection = FakeConnection()
        self.client_id, self.user, self.version, self.epoch = "lamp", "ann", 5, 7
        self.greeted, self.taken, self.sent_disconnect = True, False, False
        self.why: MqttError | None = None

    def __str__(self) -> str:
        return f"client {self.client_id!r}"


@stands_for(Presence)
class FakePresence:
    """Stands for `Presence`: what it was told."""

    def __init__(self) -> None:
        self.fake_told: list[tuple[object, ...]] = []

    def connected(self, client: FakeClient, present: bool) -> None:
        self.fake_told.append(("connected", present))

    def disconnected(self, client: FakeClient, reason: ReasonCode, text: str) -> None:
        self.fake_told.append(("disconnected", reason, text))


CONNECT = Connect(5, "", True, 60, "ann", b"secret", properties={"receive_maximum": 9})
WILL = Will("a/will", b"gone", 1, True, {"will_delay_interval": 5, "content_type": "text"})


@pytest.fixture
def fake() -> FakeClient:
    return FakeClient()


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    connection_hooks.log.setLevel("INFO")
    yield
    connection_hooks.log.setLevel("NOTSET")


def real(fake: FakeClient) -> Client:
    return cast("Client", fake)


def adds(fake: FakeClient, point: Point, answer: Callable[..., Any]) -> None:
    cast("Any", fake.services.hooks).add(point, answer)


def fails(*_: object) -> None:
    raise RuntimeError("a defect of the hook")


# -- CONNECT ----------------------------------------------------------------------------------------------


async def test_a_hook_sees_connect_without_its_password(fake: FakeClient) -> None:
    seen: list[Connecting] = []
    adds(fake, CLIENT_CONNECT, lambda event, value: seen.append(event))
    await connection_hooks.ask_hooks_about_connect(real(fake), CONNECT, "assigned")
    assert seen == [Connecting("assigned", "ann", "192.0.2.1", 5, True, 60, False, {"receive_maximum": 9})]


async def test_a_hook_refuses_connect_with_its_reason(fake: FakeClient) -> None:
    await connection_hooks.ask_hooks_about_connect(real(fake), CONNECT, "lamp")
    adds(fake, CLIENT_CONNECT, lambda event, value: Continue(ReasonCode.BANNED))
    with pytest.raises(MqttError, match="the connection is not accepted") as caught:
        await connection_hooks.ask_hooks_about_connect(real(fake), CONNECT, "lamp")
    assert caught.value.reason is ReasonCode.BANNED


async def test_a_hook_that_fails_refuses_connect(fake: FakeClient) -> None:
    adds(fake, CLIENT_CONNECT, fails)
    with pytest.raises(NotAuthorized):
        await connection_hooks.ask_hooks_about_connect(real(fake), CONNECT, "lamp")


async def test_a_hook_that_waits_decides_too(fake: FakeClient) -> None:
    async def later(event: Connecting, value: ReasonCode) -> Continue[ReasonCode]:
        return Continue(ReasonCode.SERVER_BUSY)

    adds(fake, CLIENT_CONNECT, later)
    with pytest.raises(MqttError) as caught:
        await connection_hooks.ask_hooks_about_connect(real(fake), CONNECT, "lamp")
    assert caught.value.reason is ReasonCode.SERVER_BUSY


async def test_authenticators_decide_unless_a_hook_does(fake: FakeClient) -> None:
    credentials = Credentials("lamp", "ann", b"secret", cast("Connection", fake.connection))
    assert await connection_hooks.verdict_of_hooks(real(fake), credentials) is IGNORE
    adds(fake, CLIENT_AUTHENTICATE, lambda event, value: Continue(Allow("bob")))
    assert await connection_hooks.verdict_of_hooks(real(fake), credentials) == Allow("bob")
    adds(fake, CLIENT_AUTHENTICATE, fails)
    assert isinstance(await connection_hooks.verdict_of_hooks(real(fake), credentials), Denied)


# -- wills ------------------------------------------------------------------------------------------------


async def test_a_will_keeps_its_delay_which_hooks_do_not_see(fake: FakeClient) -> None:
    """The delay is about the will, not about its message."""
    seen: list[tuple[Publishing, Published | Drop]] = []

    def change(event: Publishing, message: Published | Drop) -> Continue[Published | Drop]:
        seen.append((event, message))
        return Continue(Published("a/new", b"changed", 0, False, {"content_type": "new"}))

    assert await connection_hooks.ask_hooks_about_will(real(fake), WILL) is WILL
    adds(fake, MESSAGE_PUBLISH, change)
    after = await connection_hooks.ask_hooks_about_will(real(fake), WILL)
    assert seen[0][0].will
    assert seen[0][1] == Published("a/will", b"gone", 1, True, {"content_type": "text"})
    assert after == Will("a/new", b"changed", 0, False, {"content_type": "new", "will_delay_interval": 5})
    assert WILL.properties == {"will_delay_interval": 5, "content_type": "text"}


async def test_a_will_is_dropped_or_refused(fake: FakeClient) -> None:
    answers = [Drop(), Drop(ReasonCode.QUOTA_EXCEEDED, "too many")]
    adds(fake, MESSAGE_PUBLISH, lambda event, message: Continue(answers.pop(0)))
    assert await connection_hooks.ask_hooks_about_will(real(fake), WILL) is None
    with pytest.raises(NotAuthorized, match="too many"):
        await connection_hooks.ask_hooks_about_will(real(fake), WILL)
    adds(fake, MESSAGE_PUBLISH, fails)
    answers.append(Drop())
    with pytest.raises(NotAuthorized):
        await connection_hooks.ask_hooks_about_will(real(fake), WILL)


async def test_a_topic_that_a_plugin_takes_has_no_will(fake: FakeClient) -> None:
    fake.ingress.takers.add("a/", cast("Taker", object()))
    with pytest.raises(NotAuthorized, match="a plugin handles this topic"):
        await connection_hooks.ask_hooks_about_will(real(fake), WILL)


# -- begin and end ----------------------------------------------------------------------------------------


def test_the_begin_of_a_connection_is_counted_logged_and_announced(fake: FakeClient, logged: Logged) -> None:
    presence, seen = FakePresence(), list[Connected]()
    adds(fake, CLIENT_CONNECTED, seen.append)
    connection_hooks.connected(real(fake), cast("Presence", presence), True)
    assert (fake.services.counters.connects, presence.fake_told) == (1, [("connected", True)])
    assert [(one.client.client_id, one.session_present) for one in seen] == [("lamp", True)]
    assert logged.messages == [
        "client 'lamp' from 192.0.2.1:1234 is connected: MQTT 5.0, user 'ann', keep alive 60 s, session resumed"
    ]


ENDS: dict[str, tuple[dict[str, Any], str, ReasonCode]] = {
    "taken over": ({"taken": True, "sent_disconnect": True}, "taken over", ReasonCode.SESSION_TAKEN_OVER),
    "left": ({"sent_disconnect": True}, "client", ReasonCode.NORMAL_DISCONNECTION),
    "violated": ({"why": MqttError("bad", ReasonCode.PROTOCOL_ERROR)}, "protocol error", ReasonCode.PROTOCOL_ERROR),
    "other": ({"why": MqttError("odd", ReasonCode.SERVER_BUSY)}, "error", ReasonCode.SERVER_BUSY),
    "lost": ({}, "lost", ReasonCode.UNSPECIFIED_ERROR),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_connection_has_one_cause(fake: FakeClient, end: str) -> None:
    """A takeover goes before DISCONNECT, which goes before an error: the end that the client can do nothing about."""
    values, cause, reason = ENDS[end]
    for name, value in values.items():
        setattr(fake, name, value)
    presence, seen = FakePresence(), list[Disconnected]()
    adds(fake, CLIENT_DISCONNECTED, seen.append)
    connection_hooks.disconnected(real(fake), cast("Presence", presence))
    assert {name: count for name, count in fake.services.counters.disconnects.items() if count} == {cause: 1}
    assert [(one.reason, one.text) for one in seen] == [(reason, presence.fake_told[0][2])]


def test_a_connection_without_connack_ends_without_notice(fake: FakeClient, logged: Logged) -> None:
    fake.greeted, fake.why = False, MqttError("odd")
    presence, seen = FakePresence(), list[Any]()
    adds(fake, CLIENT_DISCONNECTED, seen.append)
    connection_hooks.disconnected(real(fake), cast("Presence", presence))
    assert (presence.fake_told, seen, logged.messages) == ([], [], [])
    assert not any(fake.services.counters.disconnects.values())


def test_a_session_is_taken_over_only_if_the_connection_had_it(fake: FakeClient) -> None:
    seen = list[Any]()
    adds(fake, SESSION_TAKEN_OVER, seen.append)
    fake.taken = True
    for fake.epoch in (0, 7):
        connection_hooks.disconnected(real(fake), cast("Presence", FakePresence()))
    assert [(one.client_id, one.epoch) for one in seen] == [("lamp", 7)]


def test_where_connections_are_not_logged_errors_are(fake: FakeClient, logged: Logged) -> None:
    fake.services.settings.log_connections = False
    presence = cast("Presence", FakePresence())
    connection_hooks.connected(real(fake), presence, False)
    connection_hooks.disconnected(real(fake), presence)
    assert logged.messages == []
    fake.why = MqttError("odd packet", ReasonCode.PROTOCOL_ERROR)
    connection_hooks.disconnected(real(fake), presence)
    (line,) = logged.messages
    assert line.startswith("client 'lamp' from 192.0.2.1:1234 is disconnected: odd packet")


# -- subscriptions ----------------------------------------------------------------------------------------

FILTERS = (Subscription("a", 1), Subscription("b", 2))


async def test_a_hook_replaces_one_subscription_and_refuses_another(fake: FakeClient) -> None:
    packet = Subscribe(1, FILTERS)
    assert await connection_hooks.ask_hooks_to_subscribe(real(fake), packet) == (packet, {})
    changed = Subscription("a/own", 0)
    wanted = (changed, Refused(ReasonCode.QUOTA_EXCEEDED))
    adds(fake, CLIENT_SUBSCRIBE, lambda event, value: Continue(wanted))
    found = await connection_hooks.ask_hooks_to_subscribe(real(fake), packet)
    assert found == (Subscribe(1, (changed, FILTERS[1])), {1: 0x97})


async def test_a_hook_that_fails_refuses_all_subscriptions(fake: FakeClient) -> None:
    adds(fake, CLIENT_SUBSCRIBE, fails)
    packet = Subscribe(1, FILTERS)
    assert await connection_hooks.ask_hooks_to_subscribe(real(fake), packet) == (packet, {0: 0x83, 1: 0x83})


async def test_subscriptions_of_a_plugin_are_not_shown_to_hooks(fake: FakeClient) -> None:
    """They have no packet identifier: nobody waits for their SUBACK."""
    adds(fake, CLIENT_SUBSCRIBE, fails)
    packet = Subscribe(0, FILTERS)
    assert await connection_hooks.ask_hooks_to_subscribe(real(fake), packet) == (packet, {})


async def test_a_hook_changes_unsubscribe(fake: FakeClient) -> None:
    packet = Unsubscribe(1, ("a", "b"))
    assert await connection_hooks.ask_hooks_to_unsubscribe(real(fake), packet) is packet
    adds(fake, CLIENT_UNSUBSCRIBE, lambda event, filters: Continue(("a/own", "b")))
    assert await connection_hooks.ask_hooks_to_unsubscribe(real(fake), packet) == Unsubscribe(1, ("a/own", "b"))


def test_only_granted_subscriptions_are_announced(fake: FakeClient) -> None:
    seen = list[Any]()
    connection_hooks.subscribed(real(fake), [("a", 1)])  # nobody hears it
    adds(fake, SESSION_SUBSCRIBED, seen.append)
    adds(fake, SESSION_UNSUBSCRIBED, seen.append)
    connection_hooks.subscribed(real(fake), [("a", 2), ("b", 0x87)])
    connection_hooks.unsubscribed(real(fake), ["a"])
    assert [type(one).__name__ for one in seen] == ["Subscribed", "Unsubscribed"]
    assert [one.topic_filter for one in seen] == ["a", "a"]
    assert seen[0].qos == 2
