# SPDX-License-Identifier: Apache-2.0
"""Hooks of a running gateway that are not about messages."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from mqtt_nats.access.authenticator import Allow, Credentials, Denied
from mqtt_nats.client.authentication import _decision
from mqtt_nats.client.message_hooks import MessageHooks
from mqtt_nats.codec import NotAuthorized, ReasonCode, Subscription, Will
from mqtt_nats.hooks import (
    CLIENT_AUTHENTICATE,
    CLIENT_AUTHORIZE,
    CLIENT_CONNECT,
    CLIENT_CONNECTED,
    CLIENT_DISCONNECTED,
    CLIENT_SUBSCRIBE,
    CLIENT_UNSUBSCRIBE,
    MESSAGE_DROPPED,
    SESSION_CREATED,
    SESSION_DISCARDED,
    SESSION_RESUMED,
    SESSION_SUBSCRIBED,
    SESSION_TAKEN_OVER,
    SESSION_TERMINATED,
    SESSION_UNSUBSCRIBED,
    Authorizing,
    Connected,
    Connecting,
    Continue,
    Refused,
    Stop,
    Subscribing,
    Unsubscribing,
    Verdict,
    Wanted,
)
from tests.harness.inprocess import InProcess
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.hooks.conftest import Add

pytestmark = pytest.mark.anyio

NOT_AUTHORIZED = ReasonCode.NOT_AUTHORIZED
SPECIFIC = ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR


async def test_a_connection_that_is_refused(inside: InProcess, add: Add) -> None:
    seen: list[Connecting] = []

    async def refuse(event: Connecting, reason: ReasonCode) -> Stop[ReasonCode] | None:
        seen.append(event)
        return Stop(ReasonCode.BANNED) if event.client_id == "bad" else None

    add(CLIENT_CONNECT, refuse)
    async with await RawClient5.connect5(inside.port, "bad", code=0x8A, username="me") as client:
        await client.expect_closed()
    async with await RawClient5.connect5(inside.port, "good", keepalive=7, receive_maximum=3) as client:
        await client.quiet()
    assert [(one.client_id, one.username, one.version, one.keepalive) for one in seen] == [
        ("bad", "me", 5, 0),
        ("good", None, 5, 7),
    ]
    assert seen[1].properties == {"receive_maximum": 3}
    assert seen[0].address == "127.0.0.1"


@pytest.mark.parametrize("result", ["raises", "nonsense", "is cancelled"])
async def test_a_hook_that_fails_refuses_connections(inside: InProcess, add: Add, result: str) -> None:
    def broken(event: Connecting, reason: ReasonCode) -> Any:
        if result == "raises":
            raise RuntimeError
        return Continue("yes")

    async def cancelled(event: Connecting, reason: ReasonCode) -> Any:
        raise asyncio.CancelledError

    entry = add(CLIENT_CONNECT, cancelled if result == "is cancelled" else broken)
    async with await RawClient5.connect5(inside.port, "any", code=NOT_AUTHORIZED) as client:
        await client.expect_closed()
    assert entry.failures == 1
    async with await RawClient.open(inside.port):
        assert entry.failures == 1


@pytest.mark.parametrize("immediate", [True, False])
async def test_an_authenticator_that_waits_for_what_is_cancelled(immediate: bool) -> None:
    """Denies, as any that fails."""

    async def check() -> bool:
        inner = asyncio.get_running_loop().create_task(asyncio.sleep(100))
        inner.cancel()
        await inner
        return True

    with pytest.raises(NotAuthorized):
        await _decision(check(), 1.0, immediate=immediate)


async def test_a_job_that_waits_for_what_is_cancelled(inside: InProcess) -> None:
    """The client hears of it: its jobs do not just end."""

    async def job() -> None:
        inner = asyncio.get_running_loop().create_task(asyncio.sleep(100))
        inner.cancel()
        await inner

    async with await RawClient5.connect5(inside.port, "job") as client:
        inside.call(lambda: inside.account.registry.clients["job"].do(job()))
        await client.expect_disconnect(ReasonCode.UNSPECIFIED_ERROR)


async def test_who_is_let_in_by_a_hook(inside: InProcess, add: Add) -> None:
    """It decides before the authenticators of the listener, which decide about the others."""
    seen: list[Connected] = []

    async def check(credentials: Credentials, verdict: Verdict) -> Continue[Verdict] | Stop[Verdict] | None:
        if credentials.username == "ann":
            right = credentials.password == b"secret"
            return Stop(Allow("ann") if right else Denied("wrong", ReasonCode.BAD_USER_NAME_OR_PASSWORD))
        return None

    add(CLIENT_AUTHENTICATE, check)
    add(CLIENT_CONNECTED, seen.append)
    async with await RawClient.connect(inside.port, "a", username="ann", password=b"secret") as client:
        await client.quiet()
    async with await RawClient5.connect5(inside.port, "b", username="ann", password=b"x", code=0x86) as client5:
        await client5.expect_closed()
    async with await RawClient.connect(inside.port, "c") as client:
        await client.quiet()
    assert [(one.client.client_id, one.client.user) for one in seen] == [("a", "ann"), ("c", None)]

    async def broken(credentials: Credentials, verdict: Verdict) -> Any:
        raise RuntimeError

    add(CLIENT_AUTHENTICATE, broken, priority=1)
    async with await RawClient5.connect5(inside.port, "d", code=NOT_AUTHORIZED) as client5:
        await client5.expect_closed()


async def test_the_life_of_connections_and_sessions(inside: InProcess, add: Add) -> None:
    """In the order in which things happen, with epochs that grow."""
    seen: list[tuple[Any, ...]] = []
    for point in (SESSION_CREATED, SESSION_RESUMED, SESSION_DISCARDED, SESSION_TAKEN_OVER, SESSION_TERMINATED):
        add(point, lambda event, name=point.name: seen.append((name, event.client_id, event.epoch)))
    add(CLIENT_CONNECTED, lambda event: seen.append(("connected", event.client.client_id, event.session_present)))
    add(CLIENT_DISCONNECTED, lambda event: seen.append(("disconnected", event.client.client_id, event.reason)))

    def names() -> list[tuple[Any, ...]]:
        return [(one[0], one[2] if one[0] in ("connected", "disconnected") else None) for one in seen]

    first = await RawClient5.connect5(inside.port, "life", clean=True, session_expiry_interval=100)
    second = await RawClient5.connect5(inside.port, "life", clean=False, session_expiry_interval=100)
    await first.expect_disconnect(0x8E)
    first.drop()
    await second.disconnect5()
    await aeventually(lambda: len(seen) >= 6)
    third = await RawClient5.connect5(inside.port, "life", clean=True, session_expiry_interval=0)
    third.drop()
    await aeventually(lambda: names()[-1] == ("session.terminated", None), 30.0)
    assert names() == [
        ("session.created", None),
        ("connected", False),
        ("session.taken_over", None),
        ("disconnected", ReasonCode.SESSION_TAKEN_OVER),
        ("session.resumed", None),
        ("connected", True),
        ("disconnected", ReasonCode.NORMAL_DISCONNECTION),
        ("session.discarded", None),
        ("session.created", None),
        ("connected", False),
        ("disconnected", ReasonCode.UNSPECIFIED_ERROR),
        ("session.terminated", None),
    ]
    epochs = {name: epoch for name, _, epoch in seen if name.startswith("session.")}
    assert epochs["session.resumed"] <= epochs["session.discarded"] < epochs["session.created"]
    assert epochs["session.terminated"] >= epochs["session.created"]


async def test_why_the_gateway_has_ended_a_connection(inside: InProcess, add: Add) -> None:
    seen: list[Any] = []
    add(CLIENT_DISCONNECTED, seen.append)
    async with await RawClient.connect(inside.port, "why") as client:
        client.write(b"\x00\x00")
        await client.expect_closed()
    await aeventually(lambda: seen)
    assert seen[0].reason in (ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR)
    assert seen[0].text


async def test_who_was_never_connected_is_never_disconnected(inside: InProcess, add: Add) -> None:
    seen: list[Any] = []
    add(CLIENT_DISCONNECTED, seen.append)
    add(CLIENT_CONNECT, lambda event, reason: Stop(ReasonCode.BANNED) if event.client_id == "out" else None)
    async with await RawClient5.connect5(inside.port, "out", code=0x8A) as client:
        await client.expect_closed()
    async with await RawClient.connect(inside.port, "in") as other:
        await other.disconnect()
    await aeventually(lambda: seen)
    assert [one.client.client_id for one in seen] == ["in"]


async def test_subscriptions_are_changed_and_refused(inside: InProcess, add: Add) -> None:
    told: list[tuple[str, str]] = []

    def change(event: Subscribing, wanted: Wanted) -> Continue[Wanted]:
        found: list[Subscription | Refused] = []
        for one in wanted:
            assert isinstance(one, Subscription)
            if one.topic_filter == "no":
                found.append(Refused(ReasonCode.QUOTA_EXCEEDED))
            else:
                found.append(replace(one, topic_filter=f"s/{one.topic_filter}", qos=0))
        return Continue(tuple(found))

    async def end(event: Unsubscribing, filters: tuple[str, ...]) -> Continue[tuple[str, ...]]:
        return Continue(tuple(f"s/{one}" for one in filters))

    add(CLIENT_SUBSCRIBE, change)
    add(CLIENT_UNSUBSCRIBE, end)
    add(SESSION_SUBSCRIBED, lambda event: told.append(("+", f"{event.topic_filter} {event.qos}")))
    add(SESSION_UNSUBSCRIBED, lambda event: told.append(("-", event.topic_filter)))
    async with await RawClient5.connect5(inside.port, "subscriber") as client:
        wanted = [Subscription(text, 2) for text in ("a", "no", "b/#")]
        assert await client.subscribe5(*wanted) == (0, 0x97, 0)
        await client.deliver("a", b"")
        client.publish("s/a", b"x")
        client.publish("s/b", b"y")
        await client.message("s/a", b"x")
        await client.message("s/b", b"y")
        await client.unsubscribe("a")
        await client.deliver("s/a", b"")
        await client.unsubscribe("a")
    assert told == [("+", "s/a 0"), ("+", "s/b/# 0"), ("-", "s/a")]


async def test_a_hook_that_fails_refuses_subscriptions_but_not_their_end(inside: InProcess, add: Add) -> None:
    def broken(event: Any, value: Any) -> Any:
        return Continue(value[1:])

    async with (
        await RawClient5.connect5(inside.port, "unlucky") as client,
        await RawClient.connect(inside.port, "unlucky3") as old,
    ):
        await client.subscribe("a", "b")
        failing = [add(CLIENT_SUBSCRIBE, broken), add(CLIENT_UNSUBSCRIBE, broken)]
        assert await client.subscribe("c", "d") == (SPECIFIC, SPECIFIC)
        assert await old.subscribe("c") == (0x80,)
        await client.unsubscribe("a", "b")
        await client.deliver("a", b"")
        await client.deliver("c", b"")
        assert [one.failures for one in failing] == [2, 1]


async def test_rules_are_asked_first_and_hooks_last(inside: InProcess, add: Add) -> None:
    """Also about what a client has when the hook comes."""
    seen: list[tuple[str, str, int, bool, bool]] = []
    dropped: list[Any] = []

    def decide(event: Authorizing, allowed: bool) -> Stop[bool] | None:
        seen.append((event.access, event.topic, event.qos, event.retain, allowed))
        return Stop(False) if event.topic.startswith("secret") else None

    async with (
        await RawClient5.connect5(inside.port, "asked") as client,
        await RawClient.connect(inside.port, "asked3", will=Will("secret/will", b"", 0, False)) as old,
    ):
        assert await client.subscribe("secret/a", "$share/g/secret/b") == (0, 0)
        assert await old.subscribe("secret/will") == (0,)
        entry = add(CLIENT_AUTHORIZE, decide)
        add(MESSAGE_DROPPED, dropped.append)
        await client.deliver("open/a", b"", 0, retain=True)
        assert ("publish", "open/a", 0, True, True) in seen
        client.publish5("secret/a", b"", 1, packet_id=9)
        await client.expect_refusal(4, 9, NOT_AUTHORIZED)
        await old.deliver("secret/a", b"", 2)
        assert await client.subscribe("secret/#", "$share/g/secret/x", "open/#") == (NOT_AUTHORIZED, NOT_AUTHORIZED, 0)
        assert ("subscribe", "secret/x", 0, False, True) in seen
        old.drop()
        await aeventually(lambda: len(inside.account.registry.clients) == 1)
        assert [(one.topic, one.qos, one.reason) for one in dropped][-2:] == [
            ("secret/a", 1, "denied"),
            ("secret/a", 2, "denied"),
        ]
        inside.call(lambda: inside.account.services.hooks.remove(entry))
        assert inside.call(lambda: [one.guarded for one in inside.account.registry.clients.values()]) == [None]
        await client.deliver("secret/a", b"", 1)  # and its subscription has ended
        await client.quiet()


async def test_an_authorization_that_fails_denies(inside: InProcess, add: Add) -> None:
    def broken(event: Authorizing, allowed: bool) -> Any:
        raise RuntimeError

    add(CLIENT_AUTHORIZE, broken)
    async with await RawClient5.connect5(inside.port, "unlucky") as client:
        assert await client.subscribe("a") == (NOT_AUTHORIZED,)
        client.publish5("a", b"", 1, packet_id=9)
        await client.expect_refusal(4, 9, NOT_AUTHORIZED)


async def test_without_hooks_of_messages_nothing_stands_in_between(inside: InProcess, add: Add) -> None:
    add(CLIENT_CONNECTED, lambda event: None)
    add(CLIENT_SUBSCRIBE, lambda event, value: None)
    async with await RawClient.connect(inside.port, "plain") as client:
        await client.quiet()

        def handler() -> object:
            one = inside.account.registry.clients["plain"]
            assert not isinstance(one.connection.handler, MessageHooks)
            return one.connection.handler is one and one.guarded is None

        assert inside.call(handler)
