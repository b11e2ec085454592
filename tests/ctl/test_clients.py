# SPDX-License-Identifier: Apache-2.0
"""``ctl clients``, ``subscriptions`` and ``topics``: who is connected and what for; disconnecting one and many."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.config.settings import Settings
from mqtt_nats.ctl import gateway_requests as asking
from mqtt_nats.ctl.commands import clients
from mqtt_nats.ctl.gateway_requests import PROGRESS, Answers
from mqtt_nats.ctl.nats_connection import connected
from mqtt_nats.ctl.progress_bar import CLEAR, bar
from mqtt_streams import pages
from tests.ctl.conftest import Fleet
from tests.harness.raw5 import DISCONNECT, SESSION_EXPIRY, SUBSCRIPTION_ID, Raw5, prop, publish, will
from tests.harness.waiting import eventually

KICKED = 0x98


@pytest.fixture
def several(fleet: Fleet) -> Iterator[list[Raw5]]:
    """Three clients, two of them at the second gateway."""
    with ExitStack() as stack:
        ports = (fleet.one.port, fleet.two.port, fleet.two.port)
        yield [stack.enter_context(Raw5.open(port, f"c-several-{number}")) for number, port in enumerate(ports)]


def names(fleet: Fleet, *arguments: str) -> dict[str, str]:
    """The gateway of each client that is listed."""
    return {one["client"]: one["gateway"] for one in fleet.json("clients", "list", *arguments)["clients"]}


def test_list(fleet: Fleet, several: list[Raw5]) -> None:
    one, two = fleet.ids
    assert names(fleet, "--match", "c-several-*") == {"c-several-0": one, "c-several-1": two, "c-several-2": two}
    assert names(fleet, "--match", "c-several-?", "--gateway", one) == {"c-several-0": one}
    listener = ("--listener", f"127.0.0.1:{fleet.two.port}")
    assert names(fleet, "--match", "c-several-*", *listener).keys() == {"c-several-1", "c-several-2"}
    assert (
        names(fleet, "--match", "c-several-*", "--address", "127.0.0.0/8").keys()
        == names(fleet, "--match", "c-several-*").keys()
    )
    assert names(fleet, "--match", "c-several-*", "--address", "10.0.0.0/8") == {}
    assert names(fleet, "--match", "c-several-*", "--user", "alice") == {}
    found = fleet.json("clients", "--match", "c-several-*", "--limit", "2")
    assert (len(found["clients"]), found["total"], found["silent"]) == (2, 3, [])
    text = fleet.text("clients", "--match", "c-several-*", "--limit", "2")
    assert re.search(rf"^c-several-0 +{one} +127\.0\.0\.1:\d+ +5\.0 ", text, re.MULTILINE), text
    assert text.rstrip().endswith("2 of 3 are shown")


def test_show(fleet: Fleet) -> None:
    tail = will("c-shown/will", b"gone")
    with Raw5.open(fleet.one.port, "c-shown", prop(SESSION_EXPIRY, 100), flags=4, tail=tail, keepalive=33) as client:
        assert client.subscribed(("a/+", 1), ("$share/g/b", 0), parts=prop(SUBSCRIPTION_ID, 7)) == (1, 0)
        found = fleet.json("clients", "show", "c-shown")
        assert (found["gateway"], found["keepalive"], found["expiry"]) == (fleet.ids[0], 33, 100)
        assert (found["will"], found["durable"], found["slow"]) == ("c-shown/will", True, False)
        assert {(one["filter"], one["qos"], one["identifier"]) for one in found["subscribed"]} == {
            ("a/+", 1, 7),
            ("$share/g/b", 0, 7),
        }
        text = fleet.text("clients", "show", "c-shown")
        assert re.search(r"^session +durable, expires 100 s after the connection$", text, re.MULTILINE), text
        assert re.search(r"^a/\+ +1 +7$", text, re.MULTILINE), text
        client.send(b"\xe0\x00")
    missing = fleet.run("clients", "show", "nobody\x1b[2J")
    assert missing.status == 1
    assert missing.text.startswith("client nobody\\u{1b}[2J is not connected: `mqtt-nats ctl sessions show")


def test_who_does_not_acknowledge_is_slow(fleet: Fleet) -> None:
    """Also where only one of its subscriptions is full: what else waits for that is in JetStream."""
    with (
        Raw5.open(fleet.one.port, "c-silent", prop(SESSION_EXPIRY, 100)) as silent,
        Raw5.open(fleet.one.port, "c-busy") as busy,
    ):
        assert silent.subscribed(("silent/a", 1)) == (1,)
        assert silent.subscribed(("silent/b", 1)) == (1,)
        for number in range(99):
            busy.deliver("silent/a", b"%d" % number, qos=1)
        eventually(lambda: fleet.json("clients", "show", "c-silent")["inflight"] == 99)
        one = fleet.json("clients", "show", "c-silent")
        assert (one["window"], one["slow"]) == (200, False)
        busy.deliver("silent/a", b"99", qos=1)
        eventually(lambda: list(names(fleet, "--slow")) == ["c-silent"])
    fleet.run("sessions", "clean", "c-silent")


def test_who_does_not_read_is_slow(fleet: Fleet) -> None:
    with Raw5(fleet.one.port, receive_buffer=4096) as slow, Raw5.open(fleet.one.port, "c-fast") as fast:
        slow.send(b"\x10\x12\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x05c-slo")
        slow.answer(2)
        assert slow.subscribed(("slow/#", 0)) == (0,)
        payload = bytes(50_000)

        def clogged() -> bool:
            for _ in range(20):
                fast.send(publish("slow/x", payload))
            fast.ping()
            return list(names(fleet, "--slow")) == ["c-slo"]

        eventually(clogged)
        (found,) = fleet.json("clients", "--slow")["clients"]
        assert found["unread"] > 0
        assert found["slow"]
        assert "c-slo" in fleet.text("clients").splitlines()[1]  # the slowest first
        text = fleet.text("clients", "show", "c-slo")
        assert "has not read for" in text
        assert "slow: it does not take what is there for it" in text


def test_kick(fleet: Fleet, several: list[Raw5]) -> None:
    would = fleet.json("clients", "kick", "--match", "c-several-*", "--dry-run")
    assert (len(would["clients"]), would["dry_run"]) == (3, True)
    assert "3 clients would be disconnected" in fleet.text("clients", "kick", "--match", "c-several-*", "--dry-run")
    found, complaint = fleet.part("clients", "kick", "c-several-0", "c-nobody", "--reason", "firmware")
    assert complaint == "not all clients are disconnected: c-nobody is not connected"
    assert found["clients"] == [{"client": "c-several-0", "gateway": fleet.ids[0]}]
    assert found["absent"] == ["c-nobody"]
    several[0].answer(DISCONNECT, reason=KICKED)
    listener = f"127.0.0.1:{fleet.two.port}"
    text = fleet.text("clients", "kick", "--match", "c-several-*", "--listener", listener, "--over", "1s")
    assert text == "2 clients disconnected\n"
    for one in several[1:]:
        one.answer(DISCONNECT, reason=KICKED)
    assert "by name" not in text


def test_everybody(fleet: Fleet, several: list[Raw5]) -> None:
    one, two = fleet.ids
    found = fleet.json("clients", "kick", "--everybody", "--gateway", two)
    assert {each["client"] for each in found["clients"]} == {"c-several-1", "c-several-2"}
    assert names(fleet, "--match", "c-several-*") == {"c-several-0": one}


def test_kicking_where_a_gateway_does_not_answer(
    fleet: Fleet, several: list[Raw5], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients stay, so not all is done."""

    async def ask(*given: object, **more: object) -> Answers:
        return Answers(items=[{"gateway": "there", "value": "c-several-0"}], silent=["gone"])

    monkeypatch.setattr(clients, "ask", ask)
    found, complaint = fleet.part("clients", "kick", "--match", "c-several-*")
    assert (len(found["clients"]), found["silent"]) == (1, ["gone"])
    assert complaint == "not all clients are disconnected: gateway gone has not answered"


def test_kicking_that_is_stopped(fleet: Fleet, several: list[Raw5], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command: the gateways do not go on by themselves; until then they are told to."""
    monkeypatch.setattr(clients, "KICK_RENEWAL_S", 0.1)
    told: list[dict[str, Any]] = []

    def note(inbox: RequestInbox, what: str, arguments: dict[str, Any]) -> None:
        told.append(arguments)
        asking.tell(inbox, what, arguments)

    monkeypatch.setattr(clients, "tell", note)
    asked = clients.Kicked(match="c-several-*", gateway=fleet.ids[1], over=4.0)

    async def begin() -> None:
        async with connected(Settings(nats=(fleet.server.url,))) as inbox:
            kicking = asyncio.ensure_future(clients.kick(inbox, asked))
            await asyncio.sleep(1)
            kicking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await kicking

    asyncio.run(begin())
    assert told[0] == {"kick": told[0]["kick"]}
    assert told[-1] == {"kick": told[0]["kick"], "stop": True}
    eventually(lambda: "the command that disconnects clients has ended: 1 clients stay connected" in fleet.two.log)
    assert len(names(fleet, "--match", "c-several-*", "--gateway", fleet.ids[1])) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("clients", "kick"), 1, "no client is selected"),
        (("clients", "kick", "c-nobody"), 1, "not connected: c-nobody"),
        (("clients", "kick", "--address", "x/y"), 1, "is not a network such as"),
        (("clients", "kick", "x", "--over", "ages"), 2, "over: 'ages' is not a duration such as"),
        (("clients", "list", "--gateway", "nobody"), 1, "gateway nobody does not run"),
        (("clients", "list", "--limit", "-1"), 2, "limit: "),
        (("clients", "list", "--colour", "red"), 2, "No such option"),
        (("clients", "show"), 2, "Missing argument"),
        (("subscriptions", "--topic", "a/#"), 1, "'a/#' is no topic name"),
        (("topics", "a/#/b"), 1, "'a/#/b' is no topic filter"),
    ],
)
def test_bad_input(fleet: Fleet, arguments: tuple[str, ...], status: int, text: str) -> None:
    done = fleet.run(*arguments)
    assert done.status == status, done.text
    assert text in done.text


def test_a_thousand_clients_come_in_pages(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a page has, and a bar for who waits."""
    seen: list[tuple[int, int | None]] = []
    with ExitStack() as stack:
        clients = [Raw5(fleet.one.port) for _ in range(505)]
        for number, client in enumerate(clients):
            stack.enter_context(client)
            name = f"c-many-{number:04}".encode()
            client.send(bytes((0x10, 13 + len(name))) + b"\x00\x04MQTT\x05\x02\x00\x00\x00" + b"\x00\x0b" + name)
        for client in clients:
            client.answer(2)
        assert len(names(fleet, "--match", "c-many-*")) == 505
        token = PROGRESS.set(lambda done, total: seen.append((done, total)))
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        try:
            found = fleet.json("clients", "kick", "--match", "c-many-*")
        finally:
            PROGRESS.reset(token)
        assert len(found["clients"]) == 505
    assert seen[-1] == (505, 505)
    assert len({done for done, _ in seen}) > 1  # it was told on the way


def test_the_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with bar("clients.kick"):
        told = PROGRESS.get()
        assert told is not None
        told(0, None)
        told(1, 2)
        told(1, 4)
        told(4, 4)
    assert PROGRESS.get() is None
    shown = capsys.readouterr()
    assert "clients kick" in shown.err
    assert "4/4" in shown.err
    assert shown.out == ""


def test_subscriptions_and_topics(fleet: Fleet) -> None:
    with (
        Raw5.open(fleet.one.port, "c-sub-1", prop(SESSION_EXPIRY, 100)) as first,
        Raw5.open(fleet.two.port, "c-sub-2") as second,
    ):
        assert first.subscribed(("plants/+/water", 1)) == (1,)
        assert second.subscribed(("plants/#", 2), ("animals", 0)) == (2, 0)
        match = ("--match", "c-sub-*")
        found = fleet.json("subscriptions", *match, "--topic", "plants/rose/water")["subscriptions"]
        assert [(one["filter"], one["client"], one["qos"]) for one in found] == [
            ("plants/#", "c-sub-2", 2),
            ("plants/+/water", "c-sub-1", 1),
        ]
        assert len(fleet.json("subscriptions", *match)["subscriptions"]) == 3
        fleet.text("publish", "plants/rose/water", "1", "--qos", "1")
        second.receive_message(b"1")
        first.receive_message(b"1")
        second.send(publish("plants/rose/light", b"2"))
        second.message(b"2")
        topics = {one["topic"]: one for one in fleet.json("topics", "plants/#")["topics"]}
        assert topics["plants/rose/water"]["stored"] == 1
        assert (topics["plants/rose/light"]["stored"], topics["plants/rose/light"]["retained"]) == (0, False)
        assert fleet.ids[1] in topics["plants/rose/light"]["gateways"]
        text = fleet.text("topics", "plants/+/light")
        assert re.search(rf"^plants/rose/light +0 +{fleet.ids[1]}$", text, re.MULTILINE), text
    eventually(lambda: not names(fleet, *match))
    assert fleet.json("subscriptions", *match)["subscriptions"] == []
    (away,) = fleet.json("subscriptions", *match, "--stored", "--topic", "plants/x/water")["subscriptions"]
    assert (away["client"], away["filter"], away["gateway"]) == ("c-sub-1", "plants/+/water", "")
    text = fleet.text("subscriptions", *match, "--stored")
    assert re.search(r"^plants/\+/water +c-sub-1 +not connected +1$", text, re.MULTILINE), text


def test_progress_without_a_total_is_a_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until there is a total; the line is cleared before what comes next."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with bar("sessions.list"):
        asking.progress(256)
        asking.progress(1024)
        assert capsys.readouterr().err == f"{CLEAR}sessions list: 256 read{CLEAR}sessions list: 1,024 read"
    assert capsys.readouterr().err == CLEAR
    with bar("sessions.list"):
        asking.progress(1024)
        asking.progress(3, 10)
        asking.progress(2048)
    assert capsys.readouterr().err.count(" read") == 1


@pytest.mark.sources
def test_reading_sessions_tells_its_progress(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each page but the last."""
    monkeypatch.setattr(pages, "PAGE_FIRST", 1)
    seen: list[int] = []
    token = PROGRESS.set(lambda done, total: seen.append(done))
    try:
        with Raw5.open(fleet.one.port, "c-one"), Raw5.open(fleet.two.port, "c-two"):
            fleet.json("sessions", "list", "--quick")
    finally:
        PROGRESS.reset(token)
    assert 1 in seen
